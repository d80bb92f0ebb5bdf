"""Continuous batching: requests join and leave between two tokens, each finishes on the weights it began with.

One thread decodes. Requests that arrive while it computes a token begin together as a *wave*: prefilled at once, what
they share computed once, then decoded beside the other waves, a token of each in turn. A wave has one version of the
weights and one sampling distribution, so that versions run side by side while a new one takes over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from sparring.errors import SparringError
from sparring.inference.padded_rows import by_prompt
from sparring.inference.sampler import Decoding, InProcessSampler
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest
from sparring.types import PolicyVersion, SamplingSettings

T = TypeVar("T")


def use_threads(count: int) -> None:
    """CPU threads of all that is computed in this process."""
    torch.set_num_threads(count)


class BusyError(SparringError):
    """Too many requests wait."""


@dataclass(eq=False, kw_only=True, slots=True)
class Loaded:
    """Weights that can be asked for, under a name that never means others."""

    name: str
    policy: CausalLM
    uses: int = 0
    """Requests that run or wait on them."""
    retired: bool = False
    """No new request is sent here; freed when the last one has ended."""

    @property
    def version(self) -> PolicyVersion:
        return self.policy.version


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
    loaded: Loaded
    notify: Callable[[NewTokens | BaseException], None]
    """Called from the engine's thread."""
    cancelled: bool = False
    told: int = 0
    """Tokens that were handed over."""


@dataclass(kw_only=True, slots=True)
class _Wave:
    loaded: Loaded
    decoding: Decoding
    tickets: list[Ticket | None]
    """In the order of the decoding's replies; None once it has ended."""


@dataclass(kw_only=True, slots=True)
class EngineFigures:
    """Since the start."""

    requests: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    """Distinct prompt positions that were computed."""
    reply_tokens: int = 0
    steps: int = 0
    swaps: int = 0
    seconds: float = field(default=0.0)


class Engine:
    """Decodes for a server. All methods may be called from any thread.

    Args:
        most_running: Requests that are decoded at once; more wait.
        most_waiting: More are refused with BusyError.
    """

    def __init__(self, *, most_running: int = 64, most_waiting: int = 256) -> None:
        self.most_running, self.most_waiting = most_running, most_waiting
        self.figures = EngineFigures()
        self._lock = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._errands: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._waves: list[_Wave] = []
        self._samplers: dict[int, InProcessSampler] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests that are being decoded."""
        return sum(ticket is not None for wave in self._waves for ticket in wave.tickets)

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Take requests on, all or none.

        Raises:
            BusyError: Too many wait.
        """
        with self._lock:
            if self._closed:
                raise BusyError("the server is stopping")
            if len(self._waiting) + len(tickets) > self.most_waiting:
                raise BusyError(f"{len(self._waiting)} requests wait: try again later")
            for ticket in tickets:
                ticket.loaded.uses += 1
            self._waiting.extend(tickets)
            self._lock.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: its row is freed at the next step."""
        ticket.cancelled = True

    def between_steps(self, errand: Callable[[], T]) -> Future[T]:
        """Run something while nothing is decoded: what changes modules that running requests use."""
        future: Future[T] = Future()
        with self._lock:
            self._errands.append((errand, future))  # type: ignore[arg-type]
            self._lock.notify()
        return future

    def close(self) -> None:
        """Stop; what runs is told so."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join()

    # ---------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._waiting or self._waves or self._errands or self._closed):
                    self._lock.wait()
                if self._closed:
                    break
                errands = list(self._errands)
                self._errands.clear()
                free = self.most_running - self.running
                fresh = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            for errand, future in errands:
                try:
                    future.set_result(errand())
                except BaseException as error:
                    future.set_exception(error)
            started = time.perf_counter()
            with torch.inference_mode():
                self._begin(fresh)
                self._step()
            self.figures.seconds += time.perf_counter() - started
        stopped = BusyError("the server is stopping")
        for ticket in [*self._waiting, *(t for wave in self._waves for t in wave.tickets if t is not None)]:
            self._end(ticket, stopped)
        for _, errand_future in self._errands:
            errand_future.set_exception(stopped)

    def _begin(self, fresh: Sequence[Ticket]) -> None:
        """Waves of what came; what does not fit into the memory of the keys and values waits for the next step."""
        groups: dict[tuple[int, float, float], list[Ticket]] = {}
        for ticket in fresh:
            if ticket.cancelled:
                self._end(ticket, None)
            else:
                key = (id(ticket.loaded), ticket.settings.temperature, ticket.settings.top_p)
                groups.setdefault(key, []).append(ticket)
        for tickets in groups.values():
            loaded = tickets[0].loaded
            longest = max(ticket.settings.max_new_tokens for ticket in tickets)
            settings = replace(tickets[0].settings, max_new_tokens=longest)
            requests = [SampleRequest(prompt_ids=ticket.prompt_ids, key=ticket.key) for ticket in tickets]
            try:
                with loaded.policy.activated():
                    rows = self._sampler(loaded).rows(by_prompt(requests), longest)
                    order = [index for prompt in rows.prompts for index in prompt.requests]
                    limits = [tickets[index].settings.max_new_tokens for index in order]
                    decoding = Decoding(loaded.policy, rows, settings, limits)
            except (SparringError, RuntimeError, ValueError) as error:
                for ticket in tickets:
                    self._end(ticket, error)
                continue
            self._waves.append(_Wave(loaded=loaded, decoding=decoding, tickets=[tickets[index] for index in order]))
            left = [ticket for index, ticket in enumerate(tickets) if index not in set(order)]
            with self._lock:
                self._waiting.extendleft(reversed(left))
            self.figures.requests += len(order)
            self.figures.prompt_tokens += sum(len(tickets[index].prompt_ids) for index in order)
            self.figures.prefilled_tokens += rows.prefilled

    def _sampler(self, loaded: Loaded) -> InProcessSampler:
        found = self._samplers.get(id(loaded))
        if found is None or found.policy is not loaded.policy:
            found = self._samplers[id(loaded)] = InProcessSampler(loaded.policy)
        return found

    def _step(self) -> None:
        going = []
        for wave in self._waves:
            for index, ticket in enumerate(wave.tickets):
                if ticket is not None and ticket.cancelled:
                    wave.decoding.cancel(index)
                    self._end(ticket, None)
                    wave.tickets[index] = None
            try:
                with wave.loaded.policy.activated():
                    more = wave.decoding.step()
            except (SparringError, RuntimeError) as error:
                for ticket in wave.tickets:
                    if ticket is not None:
                        self._end(ticket, error)
                continue
            self.figures.steps += 1
            self._deliver(wave)
            if more and any(ticket is not None for ticket in wave.tickets):
                going.append(wave)
        self._waves = going

    def _deliver(self, wave: _Wave) -> None:
        decoding = wave.decoding
        counts = decoding.counts.tolist()
        alive = set(decoding.rows[decoding.alive].tolist())
        over = decoding.done_steps == decoding.steps
        for index, ticket in enumerate(wave.tickets):
            if ticket is None:
                continue
            ended = index not in alive or over
            ids = tuple(decoding.tokens[index, ticket.told : counts[index]].tolist())
            log_probs = tuple(decoding.log_probs[index, ticket.told : counts[index]].tolist())
            ticket.told = counts[index]
            self.figures.reply_tokens += len(ids)
            finish = None
            if ended:
                finish = "stop" if ids and ids[-1] in wave.loaded.policy.chat.end_ids else "length"
                wave.tickets[index] = None
                self._release(ticket)
            ticket.notify(NewTokens(token_ids=ids, log_probs=log_probs, finish=finish))

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        self._release(ticket)
        if error is not None:
            ticket.notify(error)

    def _release(self, ticket: Ticket) -> None:
        with self._lock:
            ticket.loaded.uses -= 1
            if ticket.loaded.retired and ticket.loaded.uses == 0:
                self._samplers.pop(id(ticket.loaded), None)

    def retire(self, loaded: Loaded) -> None:
        """No new requests come; what the engine keeps for these weights goes with the last of them."""
        with self._lock:
            loaded.retired = True
            if loaded.uses == 0:
                self._samplers.pop(id(loaded), None)
