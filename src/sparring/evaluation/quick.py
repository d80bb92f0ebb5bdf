"""A quick suite for candidates: a held-out panel, decided by the candidate and by what is served, compared in pairs.

The probes are situations of the environment's own panel: no answer stands in them, and a reply that was cut is scored
as what it is, no action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparring.envs.contract import Env, Figure, Situation
from sparring.evaluation.evaluate import suite_of
from sparring.evaluation.panel import play_policy
from sparring.evaluation.statistics import Bootstrap
from sparring.policies.causal_lm import CausalLM
from sparring.publishing import Change, SuiteResult
from sparring.types import SamplingSettings

GUARDS = ("valid_share",)
"""Figures of the suite that guard a publication beside its headline, where the suite has them."""


class QuickSuite:
    """Judges candidates of one run.

    Args:
        env: Whose panel.
        count: Situations.
        sampling: Of every reply.
        seed: Of the panel and of the replies: the same for every candidate.

    Raises:
        ConfigError: The environment declares no suite.
    """

    def __init__(self, env: Env, *, count: int, sampling: SamplingSettings, seed: int) -> None:
        suite = suite_of(env)
        self.name, self.seed, self.sampling = f"{env.name}/{count}", seed, sampling
        self._situations: Sequence[Situation] = suite.situations(count=count, seed=seed)
        headline: Figure | None = getattr(suite, "headline", None)
        self._figures = {name: suite.figures[name] for name in GUARDS if name in suite.figures}
        self._figures |= {"headline": headline} if headline is not None else dict(suite.figures)
        self._bootstrap = Bootstrap([situation.key for situation in self._situations], seed=seed)
        self._served: tuple[str, list[Any]] | None = None

    def judge(self, policy: CausalLM, served: str, weights: Mapping[str, Tensor]) -> SuiteResult:
        """The candidate's figures minus those of what is served. Leaves the policy as it was.

        Args:
            policy: With the candidate's weights.
            served: Version that is served.
            weights: Its weights.
        """
        rows = self._play(policy)
        if self._served is None or self._served[0] != served:
            mine = policy.state()
            policy.load_state(weights)
            try:
                self._served = (served, self._play(policy))
            finally:
                policy.load_state(mine)
        changes = {}
        for name, figure in self._figures.items():
            found = self._bootstrap.difference(figure, rows, self._served[1])
            changes[name] = Change(
                value=found.value, low=found.low, high=found.high, n=found.n, higher_is_better=figure.higher_is_better
            )
        return SuiteResult(suite=self.name, against=served, changes=changes)

    def _play(self, policy: CausalLM) -> list[Any]:
        return play_policy(policy, self._situations, self.sampling, seed=self.seed)
