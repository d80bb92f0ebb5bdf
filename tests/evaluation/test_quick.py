"""The quick suite on the real panel: equal weights pass, poisoned ones are refused, a cut reply is no action."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparring import models
from sparring.checkpoints import write_checkpoint
from sparring.envs.load import load_env
from sparring.evaluation.quick import QuickSuite
from sparring.publishing import current, publish
from sparring.types import PolicyVersion, SamplingSettings


def version(step: int) -> PolicyVersion:
    return PolicyVersion(incarnation=1, step=step)


@pytest.fixture(scope="module")
def policy() -> Any:
    return models.load("tiny", training=False)


def suite(tokens: int) -> QuickSuite:
    env = load_env("market", rules="brief", settings={})
    return QuickSuite(env, count=24, sampling=SamplingSettings(max_new_tokens=tokens), seed=0)


def saved(run: Path, step: int, policy: Any) -> Path:
    tensors = {"policy-shared.safetensors": policy.state()}
    return write_checkpoint(run / "checkpoints", step, tensors=tensors, documents={})


def test_equal_weights_are_published_and_poisoned_ones_are_refused_with_the_figures(
    tmp_path: Path, policy: Any
) -> None:
    quick = suite(64)
    place = saved(tmp_path, 0, policy)
    result = quick.measure(policy, place)
    assert publish(tmp_path, place, result, version=version(0)).published
    same = saved(tmp_path, 1, policy)
    assert publish(tmp_path, same, quick.measure(policy, same), version=version(1)).published
    mine = policy.state()
    generator = torch.Generator().manual_seed(0)
    poison = {name: torch.randn(tensor.shape, generator=generator) * 0.1 for name, tensor in mine.items()}
    policy.load_state(poison)
    bad = saved(tmp_path, 2, policy)
    policy.load_state(mine)
    decision = publish(tmp_path, bad, quick.measure(policy, bad, weights=poison), version=version(2))
    assert not decision.published and "valid_share -" in decision.reason
    assert current(tmp_path).version == "v1.1"
    assert quick.measure(policy, place).figures == result.figures  # the policy is as it was, and one seed is one result


def test_a_reply_that_was_cut_is_no_action_and_no_probe_shows_an_answer(tmp_path: Path, policy: Any) -> None:
    place = saved(tmp_path, 0, policy)
    cut = suite(2).measure(policy, place)
    assert cut.figures["valid_share"].value == 0.0
    assert cut.panel != suite(64).panel  # other settings are another panel: never compared
