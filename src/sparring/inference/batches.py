"""The requests that run on one set of weights: rows of any age in common buffers, or, for models that take no trees, waves
of what arrived together. ``engine.Engine`` gives each set its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from sparring.errors import SparringError
from sparring.inference.padded_rows import by_prompt
from sparring.inference.running_rows import PrefixMemory, RunningRows
from sparring.inference.sampler import Decoding, InProcessSampler, choose, row_uniforms
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest
from sparring.types import PolicyVersion, SamplingSettings


@dataclass(eq=False, kw_only=True, slots=True)
class Loaded:
    """Weights that can be asked for, under a name that never means others."""

    name: str
    policy: CausalLM
    version: PolicyVersion
    """Stamped on every reply."""
    uses: int = 0
    """Requests that run or wait on them."""
    retired: bool = False
    """No new request is sent here; freed when the last one has ended."""
    freed: Callable[[Loaded], None] | None = None
    """Called once, from any thread, when it is retired and nothing runs on it any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """What a step brought to one request."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: str | None
    """``stop``, ``length``, or None while it goes on."""


@dataclass(eq=False, kw_only=True, slots=True)
class Ticket:
    """A request on its way."""

    prompt_ids: tuple[int, ...]
    settings: SamplingSettings
    key: tuple[int, ...]
    """Of its random numbers: the same key, prompt, settings and weights give the same reply."""
    loaded: Loaded
    notify: Callable[[NewTokens | SparringError], None]
    """Called from the engine's thread."""
    cancelled: bool = False
    told: int = 0
    """Tokens that were handed over."""


@dataclass(kw_only=True, slots=True)
class EngineFigures:
    """Since the start."""

    requests: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt positions that were computed: what prompts share once."""
    reply_tokens: int = 0
    steps: int = 0
    """Forward passes that brought a token to every row of one set of weights."""
    swaps: int = 0
    seconds: float = field(default=0.0)


class Batch(Protocol):
    """The requests that run on one set of weights."""

    @property
    def tickets(self) -> list[Ticket]:
        """Of those that run."""
        ...

    def admit(self, waiting: Sequence[Ticket], figures: EngineFigures) -> int:
        """Begin with the first of those that wait, as many as fit; returns how many."""
        ...

    def step(self) -> list[tuple[Ticket, NewTokens]]:
        """One more token for each; those that have ended, or were cancelled, are gone afterwards."""
        ...


class JoinedBatch:
    """Rows of any age in common buffers (``running_rows``).

    Args:
        loaded: The weights.
        prefill_tokens: Prompt tokens that begin between two tokens of those that run: nobody waits long for a long prompt.
        cache_bytes: Of keys and values; who does not fit waits.
    """

    def __init__(self, loaded: Loaded, *, prefill_tokens: int, cache_bytes: int) -> None:
        self.tickets = list[Ticket]()
        self._policy, self._cache_bytes, self._prefill_tokens = loaded.policy, cache_bytes, prefill_tokens
        self._rows = RunningRows(loaded.policy.core)
        self._memory = PrefixMemory(loaded.policy.core, prefill_tokens=prefill_tokens)
        self._uniforms: list[np.ndarray[Any, np.dtype[np.float64]]] = []
        self._logits: torch.Tensor | None = None

    def admit(self, waiting: Sequence[Ticket], figures: EngineFigures) -> int:
        """See ``Batch``."""
        taken: list[Ticket] = []
        tokens = longest = 0
        for ticket in waiting:
            length = len(ticket.prompt_ids)
            tokens += length
            longest = max(longest, length + ticket.settings.max_new_tokens)
            begins = not self.tickets and not taken
            full = self._rows.bytes_with(len(taken) + 1, longest) > self._cache_bytes
            if not begins and (full or (taken and tokens > self._prefill_tokens)):
                break
            taken.append(ticket)
        if not taken:
            return 0
        made = self._memory.prefill([ticket.prompt_ids for ticket in taken])
        logits = self._policy.core.logits(made.hidden)
        self._rows.join(made, [ticket.settings.max_new_tokens for ticket in taken])
        self._logits = logits if self._logits is None else torch.cat([self._logits, logits])
        self._uniforms += [row_uniforms(ticket.key, ticket.settings.max_new_tokens) for ticket in taken]
        self.tickets += taken
        figures.prefilled_tokens += made.computed
        return len(taken)

    def step(self) -> list[tuple[Ticket, NewTokens]]:
        """See ``Batch``."""
        gone = [place for place, ticket in enumerate(self.tickets) if ticket.cancelled]
        if gone:
            self._leave(gone)
        if not self.tickets or self._logits is None:
            return []
        chosen, log_probs = self._chosen(self._logits)
        ids, values = chosen.tolist(), log_probs.tolist()
        ends, found, over = self._policy.chat.end_ids, [], []
        for place, ticket in enumerate(self.tickets):
            ticket.told += 1
            finish = "stop" if ids[place] in ends else None
            if finish is None and ticket.told == ticket.settings.max_new_tokens:
                finish = "length"
            if finish is not None:
                over.append(place)
            found.append((ticket, NewTokens(token_ids=(ids[place],), log_probs=(values[place],), finish=finish)))
        order = self._leave(over) if over else None
        if not self.tickets:
            self._logits = None
            return found
        self._logits = self._rows.forward(chosen if order is None else chosen[order])
        return found

    def _leave(self, places: Sequence[int]) -> torch.Tensor:
        order = self._rows.leave(places)
        self.tickets = [self.tickets[place] for place in order]
        self._uniforms = [self._uniforms[place] for place in order]
        chosen = torch.tensor(order, dtype=torch.int64, device=self._policy.core.device)
        if self._logits is not None:
            self._logits = self._logits[chosen] if order else None
        return chosen

    def _chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token and log-prob of each row, under its own settings."""
        uniforms = torch.tensor(
            [row[ticket.told] for row, ticket in zip(self._uniforms, self.tickets, strict=True)],
            dtype=torch.float64, device=logits.device,
        )  # fmt: skip
        groups: dict[tuple[float, float], list[int]] = {}
        for place, ticket in enumerate(self.tickets):
            groups.setdefault((ticket.settings.temperature, ticket.settings.top_p), []).append(place)
        if len(groups) == 1:
            return choose(logits, uniforms, self.tickets[0].settings)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        log_probs = torch.empty(len(logits), device=logits.device)
        for places in groups.values():
            index = torch.tensor(places, device=logits.device)
            settings = self.tickets[places[0]].settings
            tokens[index], log_probs[index] = choose(logits[index], uniforms[index], settings)
        return tokens, log_probs


class WaveBatch:
    """What arrived together with the same settings, padded and decoded together; a new wave begins when others run."""

    def __init__(self, loaded: Loaded, *, cache_bytes: int) -> None:
        self._policy = loaded.policy
        self._sampler = InProcessSampler(loaded.policy, cache_bytes=cache_bytes)
        self._waves: list[tuple[Decoding, list[Ticket | None]]] = []

    @property
    def tickets(self) -> list[Ticket]:
        """Of all waves."""
        return [ticket for _, members in self._waves for ticket in members if ticket is not None]

    def admit(self, waiting: Sequence[Ticket], figures: EngineFigures) -> int:
        """See ``Batch``."""
        first = waiting[0].settings
        taken = []
        for ticket in waiting:
            if (ticket.settings.temperature, ticket.settings.top_p) != (first.temperature, first.top_p):
                break
            taken.append(ticket)
        longest = max(ticket.settings.max_new_tokens for ticket in taken)
        requests = [SampleRequest(prompt_ids=ticket.prompt_ids, key=ticket.key) for ticket in taken]
        rows = self._sampler.rows(by_prompt(requests), longest)
        order = [index for prompt in rows.prompts for index in prompt.requests]
        if sorted(order) != list(
            range(len(order))
        ):  # memory took others than the first: those wait for a wave of their own
            return self.admit(waiting[: len(order)], figures) if len(order) < len(taken) else 0
        limits = [taken[index].settings.max_new_tokens for index in order]
        decoding = Decoding(self._policy, rows, replace(first, max_new_tokens=longest), limits)
        self._waves.append((decoding, [taken[index] for index in order]))
        figures.prefilled_tokens += rows.prefilled
        return len(order)

    def step(self) -> list[tuple[Ticket, NewTokens]]:
        """See ``Batch``."""
        found, going = [], []
        for decoding, members in self._waves:
            for index, ticket in enumerate(members):
                if ticket is not None and ticket.cancelled:
                    decoding.cancel(index)
                    members[index] = None
            if not any(members):
                continue
            more = decoding.step()
            found += self._delivered(decoding, members)
            if more and any(members):
                going.append((decoding, members))
        self._waves = going
        return found

    def _delivered(self, decoding: Decoding, members: list[Ticket | None]) -> list[tuple[Ticket, NewTokens]]:
        counts = decoding.counts.tolist()
        alive = set(decoding.rows[decoding.alive].tolist())
        over = decoding.done_steps == decoding.steps
        found = []
        for index, ticket in enumerate(members):
            if ticket is None:
                continue
            ids = tuple(decoding.tokens[index, ticket.told : counts[index]].tolist())
            log_probs = tuple(decoding.log_probs[index, ticket.told : counts[index]].tolist())
            ticket.told = counts[index]
            finish = None
            if index not in alive or over:
                finish = "stop" if ids and ids[-1] in self._policy.chat.end_ids else "length"
                members[index] = None
            found.append((ticket, NewTokens(token_ids=ids, log_probs=log_probs, finish=finish)))
        return found
