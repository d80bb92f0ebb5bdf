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
from typing import TypeVar

import torch

from sparring.errors import SparringError
from sparring.inference.batches import Batch, EngineFigures, JoinedBatch, Loaded, Ticket, WaveBatch

T = TypeVar("T")


def use_threads(count: int) -> None:
    """CPU threads of all that is computed in this process."""
    torch.set_num_threads(count)


class BusyError(SparringError):
    """Too many requests wait."""


class EngineError(SparringError):
    """Decoding failed: a bug of ours, or no memory left. The requests concerned have ended; others go on."""


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
