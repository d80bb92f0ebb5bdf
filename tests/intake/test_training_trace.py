"""OpenEnv's TrainingTrace as OpenEnv writes it: the mask covers prompt and completion (openenv 0.10.0, harness/training.py)."""

from __future__ import annotations

import pytest

from sparring.intake.wire import WireError, from_training_trace


def trace(mask: list[int] | None) -> dict[str, object]:
    turn: dict[str, object] = {
        "node_id": "n", "prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "per_token_logps": [-0.5, -0.25],
        "request": {}, "response": {}, "metadata": {},
    }  # fmt: skip
    return {"schema_version": 1, "turns": [turn if mask is None else turn | {"loss_mask": mask}]}


@pytest.mark.parametrize(("mask", "purpose"), [([0, 0, 1, 1], "action"), ([0, 0, 0, 0], "context"), (None, "action")])
def test_a_mask_over_prompt_and_completion_is_read(mask: list[int] | None, purpose: str) -> None:
    (one,) = from_training_trace(trace(mask), agent="a")
    assert (one.key, one.calls[0].purpose, one.calls[0].reply_ids) == ("n", purpose, (3, 4))


@pytest.mark.parametrize("mask", [[1, 1], [1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 2], []])
def test_any_other_mask_is_refused(mask: list[int]) -> None:
    with pytest.raises(WireError, match="loss_mask"):
        from_training_trace(trace(mask), agent="a")
