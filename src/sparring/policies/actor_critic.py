"""Actor and critic of many small policies at once: one tensor of parameters, a policy a row.

Policies of equal shape are *stacked*: every layer is one batched product over the leading policy axis ``A``, and what
optimises them is one operation on a tensor (A, P). Rows never mix, so a stack learns what its policies would apart.
The network's own gradient is in ``stacked_network.py``, that of distributions and losses is torch's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparring.errors import ConfigError
from sparring.policies import heads
from sparring.policies.acting import ActorWeights
from sparring.policies.contract import StepBatch
from sparring.policies.stacked_network import Layer, hidden_layers, narrow, stacked_network
from sparring.types import ActionKind, PolicyVersion, Spaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What policies of one stack have in common.

    >>> Shape(spaces=Spaces(observation_size=4, action=ActionKind.DISCRETE, choices=(2,)), hidden=(64, 64)).output_size
    2
    """

    spaces: Spaces
    hidden: tuple[int, ...]
    """Widths of the hidden layers, the same for actor and critic."""
    activation: str = "tanh"
    """``tanh`` or ``relu``."""
    state_size: int = 0
    """What a centralised critic sees, in numbers; 0 where the critic sees the actor's observation."""
    squash: bool = False
    """Continuous: samples are squashed into the bounds by tanh."""

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(f"net.hidden is {self.hidden}: give at least one width of 1 or more")
        if self.squash and not all(map(math.isfinite, (*self.spaces.low, *self.spaces.high))):
            raise ConfigError("net.squash is true, but the actions have no finite bounds: write false")

    @property
    def output_size(self) -> int:
        """F: logits, or means."""
        return self.spaces.mask_size or self.spaces.action_size


POLICIES = "policies.msgpack"
"""Document of a checkpoint: a list of :class:`SavedPolicies`; the i-th one's weights are in ``stack-i.safetensors``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPolicies:
    """What a reader needs to act with a checkpoint's stack, beside its tensors."""

    shape: Shape
    names: list[str]
    steps: list[int]
    """Version by policy."""

    def acting(self, tensors: Mapping[str, Tensor], incarnation: int) -> ActorWeights:
        """The acting weights, from ``parameters`` and, where observations are normalised, ``acting/mean`` and
        ``acting/scale``."""
        stack = ActorCriticStack(self.shape, dtype=tensors["parameters"].dtype)
        versions = [PolicyVersion(incarnation=incarnation, step=step) for step in self.steps]
        mean, scale = (tensors[name].numpy() if name in tensors else None for name in ("acting/mean", "acting/scale"))
        return stack.acting(versions, mean, scale, tensors["parameters"])


class ActorCriticStack:
    """Policies by name, each a row of ``parameters``.

    Attributes:
        names: In order of rows.
        parameters: Shape (A, P). Learning changes it in place; joining and leaving replace it.
    """

    def __init__(self, shape: Shape, *, dtype: torch.dtype = torch.float32) -> None:
        self.shape = shape
        self.names: list[str] = []
        self._layout = _layout(shape)
        self._sizes = [math.prod(size) for _, size in self._layout]
        self.parameters = torch.zeros(0, sum(self._sizes), dtype=dtype)

    def add(self, name: str, *, seed: int) -> None:
        """A policy joins as the last row, with weights that depend on ``seed`` and its name alone."""
        if name in self.names:
            raise ValueError(f"policy {name!r} is in this stack")
        row = _initial(self._layout, seed_of(seed, name), self.parameters.dtype)
        self.parameters = torch.cat([self.parameters, row.unsqueeze(0)])
        self.names.append(name)

    def remove(self, name: str) -> None:
        """A policy leaves; the rows after it move up."""
        row = self.names.index(name)
        self.names.pop(row)
        self.parameters = torch.cat([self.parameters[:row], self.parameters[row + 1 :]])

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """Every weight by name, as views of shape (A, ...) of parameters (A, P)."""
        parts = parameters.split(self._sizes, dim=1)
        return {name: part.view(len(parameters), *size) for (name, size), part in zip(self._layout, parts, strict=True)}

    def evaluate(self, parameters: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the batch's actions, entropies, values as the head says them; each (A, B).

        Args:
            parameters: Shape (A, P); gradients go there.
            batch: Observations normalised already.
        """
        seen = batch.observations if batch.states is None else batch.states
        said, values, log_std = stacked_network(parameters, self, batch.observations, seen)
        return *self._distribution(log_std, said.transpose(1, 2), batch), values

    def values(self, parameters: Tensor, seen: Tensor) -> Tensor:
        """Values (A, B) of observations, or of states where the critic is centralised: (A, B, D)."""
        weights = self.named(parameters)
        hidden = hidden_layers(self.towers(weights)[1], seen, self.shape.activation)[-1]
        return narrow(weights["critic.weight"], weights["critic.bias"], hidden).squeeze(1)

    @property
    def activation(self) -> str:
        return self.shape.activation

    def towers(self, weights: Mapping[str, Tensor]) -> tuple[list[Layer], list[Layer]]:
        """Hidden layers of actor and critic: weight (A, in, out) and bias (A, 1, out) of each, as views."""
        found: list[list[Layer]] = []
        for tower, own in enumerate(("actor", "critic")):
            prefix, pick = (own, ...) if self.shape.state_size else ("both", (slice(None), tower))
            found.append([
                (weights[f"{prefix}.{i}.weight"][pick], weights[f"{prefix}.{i}.bias"][pick])
                for i in range(len(self.shape.hidden))
            ])  # fmt: skip
        return found[0], found[1]

    def acting(
        self, versions: Sequence[PolicyVersion], mean: np.ndarray | None = None, scale: np.ndarray | None = None,
        parameters: Tensor | None = None,
    ) -> ActorWeights:  # fmt: skip
        """A copy of what acting needs.

        Args:
            versions: One for each policy.
            parameters: Other parameters than the stack's own, of its shape.
            mean: Shape (A, D), subtracted from observations; None where they are not normalised.
            scale: Shape (A, D).
        """
        weights = self.named((self.parameters if parameters is None else parameters).detach())
        prefix = "actor" if self.shape.state_size else "both"

        def own(name: str) -> np.ndarray:
            array = weights[name]
            if prefix == "both" and name.startswith("both"):
                array = array[:, 0]
            return np.array(array.numpy(), np.float32, copy=True)

        return ActorWeights(
            spaces=self.shape.spaces, versions=tuple(versions),
            layers=tuple((own(f"{prefix}.{i}.weight"), own(f"{prefix}.{i}.bias")) for i in range(len(self.shape.hidden))),
            head=(own("actor.weight").swapaxes(1, 2), own("actor.bias").swapaxes(1, 2)),
            log_stds=own("log_std") if "log_std" in weights else None,
            activation=self.shape.activation, squash=self.shape.squash,
            mean=None if mean is None else np.array(mean[:, None], np.float32),
            scale=None if scale is None else np.array(scale[:, None], np.float32),
        )  # fmt: skip

    def _distribution(self, log_std: Tensor, said: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        spaces = self.shape.spaces
        if spaces.action is ActionKind.DISCRETE:
            return heads.choices(said, batch.actions, spaces.choices, batch.masks)
        if not self.shape.squash:
            return heads.gaussian(said, log_std, batch.actions)
        widths = (said.new_tensor(spaces.high) - said.new_tensor(spaces.low)) / 2.0
        return heads.squashed(said, log_std, batch.actions, widths)


def seed_of(seed: int, *words: str | int) -> int:
    """A 63-bit number from a seed and words, the same everywhere: randomness is keyed, never global.

    >>> seed_of(0, "agent_0") == seed_of(0, "agent_0") != seed_of(1, "agent_0")
    True
    """
    text = "\x1f".join(map(str, (seed, *words)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _layout(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """Name and size of every weight of one policy, in order of the parameter row."""
    towers = {"both": (2, shape.spaces.observation_size)}
    if shape.state_size:
        towers = {"actor": (1, shape.spaces.observation_size), "critic": (1, shape.state_size)}
    layout: list[tuple[str, tuple[int, ...]]] = []
    for prefix, (copies, width) in towers.items():
        lead = (2,) if copies == 2 else ()
        for layer, wider in enumerate(shape.hidden):
            layout += [
                (f"{prefix}.{layer}.weight", (*lead, width, wider)), (f"{prefix}.{layer}.bias", (*lead, 1, wider))
            ]  # fmt: skip
            width = wider
    for prefix, size in (("actor", shape.output_size), ("critic", 1)):
        layout += [(f"{prefix}.weight", (size, shape.hidden[-1])), (f"{prefix}.bias", (size, 1))]
    if shape.spaces.action is ActionKind.CONTINUOUS:
        layout.append(("log_std", (1, shape.spaces.action_size)))
    return layout


def _initial(layout: Sequence[tuple[str, tuple[int, ...]]], seed: int, dtype: torch.dtype) -> Tensor:
    """Orthogonal weights (gain sqrt 2 in hidden layers, 0.01 for the policy, 1 for the value), biases and log-stds 0."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for name, size in layout:
        value = torch.zeros(size, dtype=torch.float64)
        if name.endswith("weight"):
            gain = {"actor.weight": 0.01, "critic.weight": 1.0}.get(name, math.sqrt(2.0))
            for matrix in value.view(-1, *size[-2:]):
                torch.nn.init.orthogonal_(matrix, gain, generator=generator)
        parts.append(value.flatten())
    return torch.cat(parts).to(dtype)
