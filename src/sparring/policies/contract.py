"""What a policy is to the rest: something that replies to prompts, and, if it learns, log-probs with a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sparring.types import PolicyVersion, Reply, SamplingSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One prompt to be answered. ``key`` seeds this row's own random numbers, so a reply does not depend on its batch.

    >>> SampleRequest(prompt_ids=(1, 2), key=(7, 0, 12, 3)).key
    (7, 0, 12, 3)
    """

    prompt_ids: tuple[int, ...]
    """Shape (P,)."""
    key: tuple[int, ...]
    """Integers >= 0, by convention (seed, episode, agent, tick)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRow:
    """One sequence whose marked positions the learner wants log-probs of."""

    token_ids: tuple[int, ...]
    """Shape (T,)."""
    positions: tuple[int, ...]
    """Shape (K,), ascending, each >= 1: log p(token_ids[i] | token_ids[:i]) for i in positions. Nothing after the last
    position is forwarded."""


class Sampler(Protocol):
    """Answers prompts; the in-process sampler, a remote server or a person."""

    def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Reply]:
        """Replies in the order of the requests."""
        ...


class TrainablePolicy(Protocol):
    """What ``learning`` needs of a policy."""

    name: str
    version: PolicyVersion

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``log_probs`` computes what rows share once, so that a batch is as large as its distinct prefixes."""
        ...

    def positions(self, rows: Sequence[ScoreRow]) -> int:
        """Token positions that ``log_probs`` runs forward for these rows, padding left out."""
        ...

    def log_probs(self, rows: Sequence[ScoreRow], *, temperature: float, top_p: float = 1.0) -> torch.Tensor:
        """fp32 log-probs with gradient, shape (sum of K over rows,), rows in order, positions in order."""
        ...

    def reference_log_probs(self, rows: Sequence[ScoreRow], *, temperature: float) -> torch.Tensor:
        """The same under the policy's first weights, without gradient; raises ConfigError if none were kept."""
        ...

    def trainable_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """By stable name."""
        ...

    def matrix_names(self) -> Iterable[str]:
        """Names of the trainable 2-D linear weights (not embeddings, head or norms): those APOLLO may project."""
        ...


# Small policies


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """Steps of A policies side by side, B each, padded where one has fewer."""

    observations: Tensor
    """Shape (A, B, D), normalised where the policy's are."""
    actions: Tensor
    """Shape (A, B, K): int64 choices, or floats as sampled."""
    masks: Tensor | None = None
    """Shape (A, B, M), bool; None allows everything."""
    states: Tensor | None = None
    """Shape (A, B, S): what a centralised critic sees; None where critics see the observations."""


class StackedPolicies(Protocol):
    """What PPO needs of small policies of equal shape: a row of parameters each."""

    names: list[str]
    parameters: Tensor
    """Shape (A, P)."""

    def evaluate(self, parameters: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the actions, entropies (nats), values as the head says them; each (A, B), with gradient."""
        ...

    def values(self, parameters: Tensor, seen: Tensor) -> Tensor:
        """Values (A, B) of observations (or of states, for a centralised critic) of shape (A, B, D)."""
        ...


class ReferencePolicy(Protocol):
    """A policy that may remember its first weights, for a KL term."""

    def reference_state(self) -> Mapping[str, torch.Tensor] | None:
        """The remembered weights for a checkpoint, or None where none were kept."""
        ...

    def load_reference(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the remembered weights from a checkpoint; raises CheckpointError where they do not fit."""
        ...
