"""Is a rollout what its agent's spaces say? One pass when it comes in, so that nothing after it needs to ask."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.types import ActionKind, Rollout, Spaces


def problem(rollout: Rollout, spaces: Spaces, *, state_size: int = 0) -> str:
    """What is wrong with a rollout, naming the field; empty if nothing is.

    Lengths are never cut to fit and missing numbers never filled in: a rollout is right or it is refused.

    Args:
        rollout: As it came.
        spaces: Of its agent.
        state_size: Numbers in what the centralised critic sees; 0 where there is none.
    """
    steps, size, parts = len(rollout), spaces.observation_size, spaces.action_size
    if steps == 0:
        return "it has no steps"
    if rollout.environment < 0 or rollout.episode < 0:
        return "environment and episode are counted from 0"
    discrete = spaces.action is ActionKind.DISCRETE
    wanted: list[tuple[str, Any, tuple[int, ...], str]] = [
        ("observations", rollout.observations, (steps, size), "f"),
        ("actions", rollout.actions, (steps, parts), "i" if discrete else "f"),
        ("log_probs", rollout.log_probs, (steps,), "f"),
        ("rewards", rollout.rewards, (steps,), "f"),
        ("terminated", rollout.terminated, (steps,), "b"),
        ("truncated", rollout.truncated, (steps,), "b"),
    ]
    for name, array, shape, kind in wanted:
        if found := _array_problem(name, array, shape, kind):
            return found
    boundaries = int(rollout.bootstraps.sum())
    wanted = [("final_observations", rollout.final_observations, (boundaries, size), "f")]
    if state_size:
        wanted.append(("states", rollout.states, (steps, state_size), "f"))
        wanted.append(("final_states", rollout.final_states, (boundaries, state_size), "f"))
    if rollout.masks is not None:
        wanted.append(("masks", rollout.masks, (steps, spaces.mask_size), "b"))
    for name, array, shape, kind in wanted:
        if array is None:
            return f"{name} is missing: the critic sees a state of {state_size} numbers"
        if found := _array_problem(name, array, shape, kind):
            return found
    return _choice_problem(rollout, spaces) if discrete else ""


def _array_problem(name: str, array: Any, shape: tuple[int, ...], kind: str) -> str:
    if not isinstance(array, np.ndarray):
        return f"{name} is a {type(array).__name__}: give a numpy array"
    if array.shape != shape:
        return f"{name} has shape {array.shape}, expected {shape}"
    if array.dtype.kind != kind:
        words = {"f": "floats", "i": "whole numbers", "b": "bool"}
        return f"{name} is of {array.dtype}: give {words[kind]}"
    if kind == "f" and not np.isfinite(array).all():
        return f"{name} holds a number that is not finite"
    return ""


def _choice_problem(rollout: Rollout, spaces: Spaces) -> str:
    choices = np.array(spaces.choices)
    if (rollout.actions < 0).any() or (rollout.actions >= choices).any():
        return f"actions holds a choice outside 0 to {', '.join(str(count - 1) for count in spaces.choices)}"
    if rollout.masks is None:
        return ""
    if step := all_masked(rollout.masks, spaces):
        return f"masks forbids every choice at {step}: an agent that must act needs at least one"
    starts = np.cumsum(choices) - choices
    if not np.take_along_axis(rollout.masks, rollout.actions + starts, axis=1).all():
        return "actions holds a choice that masks forbids: the mask must be that of the same step"
    return ""


def all_masked(masks: NDArray[np.bool_], spaces: Spaces) -> str:
    """Which part of an action has no choice left in some row of masks of shape (..., M); empty if none."""
    start = 0
    for part, count in enumerate(spaces.choices):
        free = masks[..., start : start + count].any(axis=-1)
        if not free.all():
            return f"row {int(np.flatnonzero(~free.ravel())[0])}, part {part}"
        start += count
    return ""
