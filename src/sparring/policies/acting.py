"""Small policies that act: numpy alone, many agents in one call. A few microseconds where torch takes fifty.

``ActorWeights`` is all of a policy that acting needs, its version with it; an actor swaps it for a newer one by one
assignment, so no step sees half of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.errors import SparringError
from sparring.types import ActionKind, PolicyVersion, Spaces

Floats = NDArray[np.float32]

OBSERVATION_CLIP = 10.0
"""Normalised observations beyond this are cut: a feature that is nearly constant must not shout."""
_FORBIDDEN = np.float32(-1e9)
_LOG_2PI = float(np.log(2.0 * np.pi))


class MaskError(SparringError):
    """An agent that must act may do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorWeights:
    """The acting half of A policies of equal shape; float32."""

    spaces: Spaces
    versions: tuple[PolicyVersion, ...]
    """One for each policy."""
    layers: tuple[tuple[Floats, Floats], ...]
    """Hidden layers: weight (A, in, out) and bias (A, 1, out)."""
    head: tuple[Floats, Floats]
    """Weight (A, hidden, F) and bias (A, 1, F)."""
    log_stds: Floats | None
    """Shape (A, 1, K) for continuous actions."""
    activation: str
    """``tanh`` or ``relu``."""
    squash: bool
    """Continuous: squash samples into the bounds by tanh; else cut them off there."""
    mean: Floats | None
    """Shape (A, 1, D): subtracted from observations; None where they are not normalised."""
    scale: Floats | None
    """Shape (A, 1, D): observations are divided by it, then cut to OBSERVATION_CLIP."""

    def rows(self, index: NDArray[np.int64]) -> ActorWeights:
        """Those of some policies, repeated as the index repeats: for agents that share one."""

        def pick(array: Floats | None) -> Any:
            return None if array is None else array[index]

        return ActorWeights(
            spaces=self.spaces, versions=tuple(self.versions[i] for i in index.tolist()),
            layers=tuple((weight[index], bias[index]) for weight, bias in self.layers),
            head=(self.head[0][index], self.head[1][index]), log_stds=pick(self.log_stds),
            activation=self.activation, squash=self.squash, mean=pick(self.mean), scale=pick(self.scale),
        )  # fmt: skip


def outputs(weights: ActorWeights, observations: NDArray[Any]) -> Floats:
    """What the network says: logits or means, shape (A, E, F), for observations of shape (A, E, D)."""
    x = observations
    if weights.mean is not None and weights.scale is not None:
        x = np.clip((x - weights.mean) / weights.scale, -OBSERVATION_CLIP, OBSERVATION_CLIP)
    for weight, bias in weights.layers:
        x = np.matmul(x, weight)
        x += bias
        if weights.activation == "tanh":
            np.tanh(x, out=x)
        else:
            np.maximum(x, 0.0, out=x)
    x = np.matmul(x, weights.head[0])
    x += weights.head[1]
    out: Floats = x
    return out


def draw_noise(spaces: Spaces, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Random numbers for so many actions: Gumbel for choices (the largest of logit + noise is a sample), else normal.

    Returns:
        Shape (*shape, F).
    """
    if spaces.action is ActionKind.DISCRETE:
        drawn = rng.standard_exponential((*shape, spaces.mask_size), dtype=np.float32)
        with np.errstate(divide="ignore"):
            return -np.log(drawn)
    return rng.standard_normal((*shape, spaces.action_size), dtype=np.float32)


def act(
    weights: ActorWeights, observations: NDArray[Any], masks: NDArray[np.bool_] | None, noise: Floats | None
) -> tuple[NDArray[Any], Floats]:
    """An action for every agent.

    Args:
        weights: Of A policies.
        observations: Shape (A, E, D): each policy in E environments.
        masks: Shape (A, E, M), or None. Rows of agents that need not act must allow something too.
        noise: From :func:`draw_noise`, shape (A, E, F); None takes the most likely action.

    Returns:
        Actions (A, E, K), as they were sampled (:func:`for_environment` makes them the environment's); log-probs (A, E).

    Raises:
        MaskError: A mask allows nothing.
    """
    said = outputs(weights, observations)
    if weights.spaces.action is ActionKind.DISCRETE:
        return _choose(weights.spaces.choices, said, masks, noise)
    assert weights.log_stds is not None
    stds = np.exp(weights.log_stds)
    actions = said if noise is None else said + stds * noise
    z = (actions - said) / stds
    log_probs = (-0.5 * z * z - weights.log_stds - 0.5 * _LOG_2PI).sum(-1)
    if weights.squash:
        slope = 2.0 * (np.log(2.0) - actions - np.logaddexp(0.0, -2.0 * actions))
        log_probs = log_probs - (slope + np.log(_half_widths(weights.spaces))).sum(-1)
    return actions, log_probs.astype(np.float32, copy=False)


def for_environment(weights: ActorWeights, actions: NDArray[Any]) -> NDArray[Any]:
    """Sampled actions as the environment takes them: choices as they are, numbers squashed or cut to the bounds."""
    spaces = weights.spaces
    if spaces.action is ActionKind.DISCRETE:
        return actions
    low, high = np.array(spaces.low, np.float32), np.array(spaces.high, np.float32)
    if weights.squash:
        actions = (high + low) / 2.0 + _half_widths(spaces) * np.tanh(actions)
    played: NDArray[Any] = np.clip(actions, low, high)
    return played


def _half_widths(spaces: Spaces) -> Floats:
    return (np.array(spaces.high, np.float32) - np.array(spaces.low, np.float32)) / np.float32(2.0)


def _choose(
    counts: tuple[int, ...], logits: Floats, masks: NDArray[np.bool_] | None, noise: Floats | None
) -> tuple[NDArray[Any], Floats]:
    if masks is not None:
        logits = np.where(masks, logits, _FORBIDDEN)
    actions = np.empty((*logits.shape[:-1], len(counts)), np.int64)
    log_probs = np.zeros(logits.shape[:-1], np.float32)
    start = 0
    for part, count in enumerate(counts):
        own = logits[..., start : start + count]
        if masks is not None and not masks[..., start : start + count].any(-1).all():
            raise MaskError(f"the mask of part {part} of an action forbids everything: allow at least one choice")
        wanted = own if noise is None else own + noise[..., start : start + count]
        if masks is not None and noise is not None:
            wanted = np.where(masks[..., start : start + count], wanted, -np.inf)
        chosen = wanted.argmax(-1)
        actions[..., part] = chosen
        own = own - own.max(-1, keepdims=True)
        taken = np.take_along_axis(own, chosen[..., None], -1)[..., 0]
        log_probs += taken - np.log(np.exp(own).sum(-1))
        start += count
    return actions, log_probs
