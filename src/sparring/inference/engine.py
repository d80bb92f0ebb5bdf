"""Continuous batching: requests join and leave between two tokens, and each finishes on the weights it began with.

One thread decodes, outside any event loop. All rows of one set of weights go through the model together, whatever their
age, settings or length; sets of weights (versions, adapters) run side by side, a token of each in turn, while a new one
takes over. Models that take no trees are decoded in *waves*: what arrives together begins and is padded together.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from sparring.errors import SparringError
from sparring.inference.padded_rows import by_prompt
from sparring.inference.running_rows import PrefixMemory, RunningRows
from sparring.inference.sampler import Decoding, InProcessSampler, choose, row_uniforms
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest
from sparring.types import PolicyVersion, SamplingSettings

T = TypeVar("T")


def use_threads(count: int) -> None:
    """CPU threads of all that is computed in this process."""
    torch.set_num_threads(count)


class BusyError(SparringError):
    """Too many requests wait."""


class EngineError(SparringError):
    """Decoding failed: a bug of ours, or no memory left. The requests concerned have ended; others go on."""


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


class Engine:
    """Decodes for a server. All methods may be called from any thread.

    Args:
        most_running: Requests that are decoded at once; more wait.
        most_waiting: More are refused with BusyError.
        prefill_tokens: Prompt tokens that begin between two tokens of those that run.
        cache_bytes: Of keys and values, for each set of weights.
    """

    def __init__(
        self, *, most_running: int = 64, most_waiting: int = 256, prefill_tokens: int = 1536,
        cache_bytes: int = 2 * 1024**3,
    ) -> None:  # fmt: skip
        self.most_running, self.most_waiting = most_running, most_waiting
        self.figures = EngineFigures()
        self._prefill_tokens, self._cache_bytes = prefill_tokens, cache_bytes
        self._lock = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._errands: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._batches: dict[Loaded, Batch] = {}
        self._retired: list[Loaded] = []
        self._active: Loaded | None = None
        self._activation = ExitStack()
        self._running = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests that are being decoded."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """The thread decodes, or waits for requests."""
        return self._thread.is_alive()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Take requests on, all or none.

        Raises:
            BusyError: Too many wait, or the server is stopping.
        """
        with self._lock:
            if self._closed:
                raise BusyError("the server is stopping")
            if len(self._waiting) + len(tickets) > self.most_waiting:
                raise BusyError(f"{len(self._waiting)} requests wait, of at most {self.most_waiting}: try again later")
            for ticket in tickets:
                ticket.loaded.uses += 1
            self._waiting.extend(tickets)
            self._lock.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: its row is freed before the next token."""
        ticket.cancelled = True

    def between_steps(self, errand: Callable[[], T]) -> Future[T]:
        """Run something while nothing is decoded: what changes modules that running requests use."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(BusyError("the server is stopping"))
                return future
            self._errands.append((errand, future))  # type: ignore[arg-type]
            self._lock.notify()
        return future

    def retire(self, loaded: Loaded) -> None:
        """No new requests come; what is kept for these weights goes with the last of them."""
        with self._lock:
            loaded.retired = True
            self._retired.append(loaded)
            self._lock.notify()  # the thread drops what it keeps for them

    def close(self) -> None:
        """Stop; what runs is told so."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join()

    # ---------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        """Whatever ends the thread, nobody is left waiting, and ``alive`` says so."""
        try:
            self._decode_until_closed()
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
        with self._lock:
            self._closed = True
        self._stop()

    def _decode_until_closed(self) -> None:
        while True:
            with self._lock:
                while not (self._waiting or self._running or self._errands or self._closed or self._drained()):
                    self._lock.wait()
                if self._closed:
                    return
                errands = list(self._errands)
                self._errands.clear()
                drained = self._drained()
            started = time.perf_counter()
            if errands:
                self._deactivate()
            for errand, future in errands:
                try:
                    future.set_result(errand())
                except BaseException as error:
                    future.set_exception(error)
            for loaded in drained:
                self._drop(loaded)
            with torch.inference_mode():
                self._begin()
                self._step()
            self.figures.seconds += time.perf_counter() - started

    def _drained(self) -> list[Loaded]:
        """Retired weights that nothing runs on."""
        return [loaded for loaded in self._retired if not loaded.uses]

    def _drop(self, loaded: Loaded) -> None:
        if self._active is loaded:
            self._deactivate()
        self._batches.pop(loaded, None)
        with self._lock:
            self._retired.remove(loaded)
        if loaded.freed is not None:
            loaded.freed(loaded)

    def _activate(self, loaded: Loaded) -> None:
        """The model's adapter is changed only where another set of weights has its turn: that costs a walk over it."""
        if self._active is not loaded:
            self._deactivate()
            self._activation.enter_context(loaded.policy.activated())
            self._active = loaded

    def _deactivate(self) -> None:
        self._activation.close()
        self._active = None

    def _begin(self) -> None:
        """Begin what waits, in the order of arrival for each set of weights, as far as there is room."""
        with self._lock:
            waiting = list(self._waiting)
        if not waiting:
            return
        gone = [ticket for ticket in waiting if ticket.cancelled]
        room = self.most_running - self._running
        groups: dict[Loaded, list[Ticket]] = {}
        for ticket in waiting:
            if not ticket.cancelled and room > 0:
                groups.setdefault(ticket.loaded, []).append(ticket)
                room -= 1
        begun: list[Ticket] = []
        for loaded, tickets in groups.items():
            try:
                self._activate(loaded)
                taken = self._batch(loaded).admit(tickets, self.figures)
            except Exception as error:  # one set of weights fails; the thread and all others go on
                self._fail(loaded, tickets, error)
                continue
            begun += tickets[:taken]
        with self._lock:
            out = {id(ticket) for ticket in (*gone, *begun)}
            self._waiting = deque(ticket for ticket in self._waiting if id(ticket) not in out)
        self._running += len(begun)
        self.figures.requests += len(begun)
        self.figures.prompt_tokens += sum(len(ticket.prompt_ids) for ticket in begun)
        for ticket in gone:
            self.figures.cancelled += 1
            self._release(ticket)

    def _batch(self, loaded: Loaded) -> Batch:
        if loaded not in self._batches:
            if loaded.policy.core.rows_because is None:
                self._batches[loaded] = JoinedBatch(
                    loaded, prefill_tokens=self._prefill_tokens, cache_bytes=self._cache_bytes
                )
            else:
                self._batches[loaded] = WaveBatch(loaded, cache_bytes=self._cache_bytes)
        return self._batches[loaded]

    def _step(self) -> None:
        for loaded, batch in list(self._batches.items()):
            before = batch.tickets
            if not before:
                continue
            try:
                self._activate(loaded)
                found = batch.step()
            except Exception as error:
                self._fail(loaded, [], error)
                continue
            self.figures.steps += 1
            self.figures.reply_tokens += sum(len(news.token_ids) for _, news in found)
            for ticket, news in found:
                ticket.notify(news)
            ended = {id(ticket) for ticket in before} - {id(ticket) for ticket in batch.tickets}
            for ticket in before:
                if id(ticket) in ended:
                    self._running -= 1
                    self.figures.cancelled += ticket.cancelled
                    self._release(ticket)

    def _fail(self, loaded: Loaded, waiting: Sequence[Ticket], error: Exception) -> None:
        """Decoding on these weights failed: all that ran or was to begin there is told, and the traceback is shown."""
        traceback.print_exception(error, file=sys.stderr)
        told = EngineError(f"decoding failed ({type(error).__name__}); the server's log has the details")
        batch = self._batches.pop(loaded, None)
        running = batch.tickets if batch is not None else []
        with self._lock:
            out = {id(ticket) for ticket in waiting}
            self._waiting = deque(ticket for ticket in self._waiting if id(ticket) not in out)
        started = {id(ticket) for ticket in running}
        for ticket in [*running, *(ticket for ticket in waiting if id(ticket) not in started)]:
            self._running -= id(ticket) in started
            self.figures.failed += 1
            ticket.notify(told)
            self._release(ticket)

    def _release(self, ticket: Ticket) -> None:
        with self._lock:
            ticket.loaded.uses -= 1

    def _stop(self) -> None:
        stopped = BusyError("the server is stopping")
        for ticket in [*self._waiting, *(t for batch in self._batches.values() for t in batch.tickets)]:
            ticket.notify(stopped)
        for _, future in self._errands:
            future.set_exception(stopped)
