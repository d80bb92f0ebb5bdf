"""Random rollouts with terminations, truncations, both at once, open ends, masks and states."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparring.types import ActionKind, PolicyVersion, Rollout, Spaces

DISCRETE = Spaces(observation_size=3, action=ActionKind.DISCRETE, choices=(4,))
MULTI = Spaces(observation_size=3, action=ActionKind.DISCRETE, choices=(2, 3))
CONTINUOUS = Spaces(observation_size=3, action=ActionKind.CONTINUOUS, low=(-1.0, -2.0), high=(1.0, 2.0))


def random_rollout(
    seed: int, steps: int, spaces: Spaces = DISCRETE, *, masked: bool = False, state_size: int = 0,
    dtype: Any = np.float32, ends: float = 0.2, **changes: Any,
) -> Rollout:  # fmt: skip
    rng = np.random.default_rng(seed)
    terminated, truncated = rng.random(steps) < ends, rng.random(steps) < ends
    bootstraps = truncated & ~terminated
    bootstraps[-1] = not terminated[-1]
    count = int(bootstraps.sum())
    masks = None
    if spaces.action is ActionKind.DISCRETE:
        actions = np.stack([rng.integers(n, size=steps) for n in spaces.choices], axis=1)
        if masked:
            masks = rng.random((steps, spaces.mask_size)) < 0.5
            starts = np.cumsum(spaces.choices) - spaces.choices
            np.put_along_axis(masks, actions + starts, True, axis=1)
    else:
        actions = rng.normal(size=(steps, spaces.action_size)).astype(dtype)
    size = spaces.observation_size
    fields: dict[str, Any] = {
        "agent": "a", "environment": 0, "episode": 0, "version": PolicyVersion(incarnation=1, step=0),
        "observations": rng.normal(size=(steps, size)).astype(dtype), "actions": actions,
        "log_probs": np.log(rng.uniform(0.1, 1.0, steps)).astype(dtype), "rewards": rng.normal(size=steps).astype(dtype),
        "terminated": terminated, "truncated": truncated,
        "final_observations": rng.normal(size=(count, size)).astype(dtype), "masks": masks,
        "states": rng.normal(size=(steps, state_size)).astype(dtype) if state_size else None,
        "final_states": rng.normal(size=(count, state_size)).astype(dtype) if state_size else None,
    }  # fmt: skip
    return Rollout(**{**fields, **changes})


def assert_same(first: Rollout, second: Rollout) -> None:
    """Equal to the bit, dtypes included."""
    for name in Rollout.__slots__:
        one, two = getattr(first, name), getattr(second, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes(), name
        else:
            assert one == two, name
