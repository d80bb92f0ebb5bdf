"""A quick suite for candidates: one held-out panel, the same for every candidate of a run.

The probes are situations of the environment's own panel: no answer stands in them, and a reply that was cut is scored as
what it is, no action. What is kept is every measure of every situation, so that ``publishing`` can compare any two
checkpoints in pairs without playing again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import blake3
import msgspec
from torch import Tensor

from sparring.checkpoints import verify_checkpoint
from sparring.envs.contract import Env, Figure
from sparring.evaluation.evaluate import suite_of
from sparring.evaluation.panel import play_policy
from sparring.policies.causal_lm import CausalLM
from sparring.suite_results import SuiteFigure, SuiteResult
from sparring.types import SamplingSettings

GUARDS = ("valid_share",)
"""Figures of the suite that guard a publication beside its headline, where the suite has them."""


class QuickSuite:
    """Measures candidates of one run.

    Args:
        env: Whose panel.
        count: Situations.
        sampling: Of every reply.
        seed: Of the panel and of the replies: the same for every candidate.

    Attributes:
        panel: Names the panel, its replies' settings and its figures; results of one panel can be compared.

    Raises:
        ConfigError: The environment declares no suite.
    """

    def __init__(self, env: Env, *, count: int, sampling: SamplingSettings, seed: int) -> None:
        suite = suite_of(env)
        self.seed, self.sampling = seed, sampling
        self._situations = suite.situations(count=count, seed=seed)
        headline: Figure | None = getattr(suite, "headline", None)
        self._figures = {name: suite.figures[name] for name in GUARDS if name in suite.figures}
        self._figures |= {"headline": headline} if headline is not None else dict(suite.figures)
        self._keys = tuple(situation.key for situation in self._situations)
        named = (env.name, seed, asdict(sampling), self._keys, sorted(self._figures))
        self.panel = f"{env.name}/{count}/{blake3.blake3(msgspec.json.encode(named)).hexdigest(8)}"

    def measure(
        self, policy: CausalLM, checkpoint: Path, *, weights: Mapping[str, Tensor] | None = None
    ) -> SuiteResult:
        """How a checkpoint does.

        Args:
            policy: With the checkpoint's weights.
            checkpoint: Whole; the result is bound to it.
            weights: Those of the checkpoint, where the policy has others now; it has its own again afterwards.

        Raises:
            CheckpointError: It is not whole, or the weights do not fit.
        """
        started = time.perf_counter()
        _, manifest = verify_checkpoint(checkpoint)
        if weights is None:
            rows = self._play(policy)
        else:
            mine = policy.state()
            policy.load_state(weights)
            try:
                rows = self._play(policy)
            finally:
                policy.load_state(mine)
        figures = {
            name: SuiteFigure(
                measures=tuple(tuple(_number(measure(row)) for row in rows) for measure in figure.of),
                higher_is_better=figure.higher_is_better, unit=figure.unit,
            )
            for name, figure in self._figures.items()
        }  # fmt: skip
        return SuiteResult(
            checkpoint=manifest, panel=self.panel, keys=self._keys, figures=figures,
            seconds=time.perf_counter() - started,
        )  # fmt: skip

    def _play(self, policy: CausalLM) -> list[Any]:
        return play_policy(policy, self._situations, self.sampling, seed=self.seed)


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)
