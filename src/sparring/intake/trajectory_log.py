"""The durable log of trajectories from outside: what is received is on disk before it is acknowledged, trained exactly
once, and never under another's name. One SQLite file in WAL mode with ``synchronous=FULL``; several processes may open it.

::

    append --> open --(reward known, session ended)--> ready --take--> batched --acknowledge--> trained
                 |                                       |
                 +--(expired without a reward)--> unscored    +--(too old for the learner)--> stale

How a trainer uses it, in this order, so that a kill at any point loses nothing and trains nothing twice:

1. ``lease`` gives a fence, greater than any before; whoever holds an older one is refused from then on.
2. ``reconcile(lease, consumed)`` with the last batch that the checkpoint names: later batches are open again, whatever
   the log thought of them. **The checkpoint is the truth.**
3. ``next_batch``: first what is logged and not trained, the same content in the same order; else a new batch, which is on
   disk before it is returned.
4. Train, write the checkpoint (it names the batch) and rename it, then ``acknowledge``: idempotent, so that a kill between
   the two is healed by step 2.
5. ``forget(before)`` what the oldest kept checkpoint has consumed.

Writers share commits (group commit): a thread collects what has arrived meanwhile, and one fsync answers them all.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import blake3

from sparring.intake.log_rows import (
    COLUMNS,
    FORMAT,
    SCHEMA,
    Batch,
    ConflictError,
    FencedError,
    FullError,
    Item,
    Lease,
    LogError,
    NewItem,
    Status,
    Verdict,
    check,
    connect,
    explain,
    insert,
    item_of,
    items_where,
    settle,
    touch,
    waiting,
)

__all__ = [
    "Batch", "ConflictError", "FencedError", "FullError", "Item", "Lease", "LogError", "NewItem", "Status", "TrajectoryLog",
    "Verdict",
]  # fmt: skip
T = TypeVar("T")
OF_ONE_STATEMENT = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError)
"""What is wrong with one statement, not with the file."""
SHARED_COMMIT = 512
"""Most operations that one commit answers."""


class TrajectoryLog:
    """See the module. All methods may be called from any thread; they return when what they did is on disk.

    Args:
        path: The SQLite file; it is made where it is missing.
        most_items: Back-pressure: so many may wait to be trained, then ``append`` raises FullError.
        most_bytes: The same in bytes.

    Raises:
        LogError: The file is no log, of another format, or cannot be written.
    """

    def __init__(self, path: Path, *, most_items: int = 1_000_000, most_bytes: int = 8 << 30) -> None:
        self.path, self.most_items, self.most_bytes = path, most_items, most_bytes
        self._tasks: queue.SimpleQueue[tuple[Callable[[sqlite3.Connection], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._readers = threading.local()
        self._closed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = connect(path)
            self._writer.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;")
            (version,) = self._writer.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise LogError(f"{path} is a log of format {version}, this version reads {FORMAT}")
            self._writer.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={FORMAT}; COMMIT;")
        except (sqlite3.Error, OSError) as error:
            raise LogError(f"cannot open the log {path}: {explain(error)}") from error
        self._thread = threading.Thread(target=self._write_loop, name="trajectory-log", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- producers

    def append(self, items: Sequence[NewItem]) -> list[Verdict]:
        """Keep items; a verdict each, in order. The same key with the same content is a duplicate, and changes nothing.

        Raises:
            FullError: Too much waits; nothing of this call was kept.
        """
        return self.submit(items).result()

    def submit(self, items: Sequence[NewItem]) -> Future[list[Verdict]]:
        """:meth:`append` without waiting: the future is done when the items are on disk."""
        digests = [blake3.blake3(f"{item.kind}\n{item.agent}\n".encode() + item.body).digest() for item in items]

        def work(db: sqlite3.Connection) -> list[Verdict]:
            count, size = waiting(db)
            if count + len(items) > self.most_items or size + sum(len(i.body) for i in items) > self.most_bytes:
                raise FullError(f"{count} trajectories ({size} bytes) wait to be trained: try again later")
            now = time.time()
            return [insert(db, item, digest, now) for item, digest in zip(items, digests, strict=True)]

        return self._enqueue(work)

    def open_session(self, session: str, producer: str) -> None:
        """Make a session known; one that is known already stays as it is.

        Raises:
            ConflictError: It belongs to another producer.
        """

        def work(db: sqlite3.Connection) -> None:
            touch(db, session, producer, time.time())

        self._enqueue(work).result()

    def reward(self, session: str, value: float, *, agent: str | None = None, call: str | None = None) -> int:
        """Give a session, one agent of it or one call its reward, or revise it. The most specific one counts.

        Returns:
            How often it was revised before: 0 for the first. The same value again changes nothing, not even this.

        Raises:
            ConflictError: A turn that it would change was consumed already.
            LogError: No such session, agent or call.
        """

        def work(db: sqlite3.Connection) -> int:
            row = db.execute("SELECT ended FROM sessions WHERE id = ?", (session,)).fetchone()
            if row is None:
                raise LogError(f"no session {session!r}")
            where, values = "session = ?", [session]
            if call is not None:
                where, values = f"{where} AND key = ?", [*values, call]
            elif agent is not None:
                where, values = f"{where} AND agent = ?", [*values, agent]
            found = db.execute(f"SELECT status, COUNT(*) FROM items WHERE {where} GROUP BY status", values).fetchall()
            if not found and (call is not None or agent is not None):
                raise LogError(f"session {session!r} has no call of {call if call is not None else agent!r}")
            scope = f"call/{call}" if call is not None else f"agent/{agent}" if agent is not None else ""
            same = db.execute(
                "SELECT revisions FROM rewards WHERE session = ? AND scope = ? AND value = ?", (session, scope, value)
            ).fetchone()
            if same is not None:
                return int(same[0])  # sent again: nothing is revised, and nothing is too late
            if any(status not in (Status.OPEN, Status.READY, Status.UNSCORED) for status, _ in found):
                raise ConflictError(f"the reward of {session!r} comes too late: its turns were consumed")
            (revisions,) = db.execute(
                "INSERT INTO rewards VALUES (?, ?, ?, 0) ON CONFLICT (session, scope) "
                "DO UPDATE SET value = excluded.value, revisions = revisions + 1 RETURNING revisions",
                (session, scope, value),
            ).fetchone()
            db.execute("UPDATE sessions SET touched = ? WHERE id = ?", (time.time(), session))
            if row[0] is not None:
                settle(db, session)
            return int(revisions)

        return self._enqueue(work).result()

    def end(self, session: str, reason: str = "ended") -> None:
        """No more calls come: what has a reward is ready. Idempotent.

        Raises:
            LogError: No such session.
        """

        def work(db: sqlite3.Connection) -> None:
            if not db.execute(
                "UPDATE sessions SET ended = COALESCE(ended, ?), touched = ? WHERE id = ?",
                (reason, time.time(), session),
            ).rowcount:
                raise LogError(f"no session {session!r}")
            settle(db, session)

        self._enqueue(work).result()

    def expire(self, idle_seconds: float) -> int:
        """End sessions that nothing was heard of for so long, and give up on ended ones that got no reward within it.

        Returns:
            How many sessions were ended.
        """

        def work(db: sqlite3.Connection) -> int:
            before = time.time() - idle_seconds
            late = db.execute("SELECT id FROM sessions WHERE ended IS NULL AND touched < ?", (before,)).fetchall()
            for (session,) in late:
                db.execute("UPDATE sessions SET ended = 'expired' WHERE id = ?", (session,))
                settle(db, session)
            db.execute(
                "UPDATE items SET status = 'unscored', reason = 'no reward came' WHERE status = 'open' AND received < ? AND "
                "(session IS NULL OR session IN (SELECT id FROM sessions WHERE ended IS NOT NULL AND touched < ?))",
                (before, before),
            )
            return len(late)

        return self._enqueue(work).result()

    def erase(self, producer: str) -> int:
        """Remove the content of all that a producer sent, trained or not; keys stay, so that nothing comes back.

        Returns:
            How many items lost their content.
        """

        def work(db: sqlite3.Connection) -> int:
            count = db.execute(
                "UPDATE items SET body = NULL, reward = NULL, status = CASE WHEN status = 'trained' THEN 'trained' ELSE "
                "'erased' END, reason = 'erased' WHERE producer = ? AND body IS NOT NULL", (producer,),
            ).rowcount  # fmt: skip
            db.execute("DELETE FROM rewards WHERE session IN (SELECT id FROM sessions WHERE producer = ?)", (producer,))
            return count

        count = self._enqueue(work).result()
        self._vacuum()
        return count

    # --------------------------------------------------------------------------------------------------- trainers

    def lease(self, holder: str) -> Lease:
        """Take the right to consume; whoever had it before is refused from now on."""

        def work(db: sqlite3.Connection) -> Lease:
            (fence,) = db.execute(
                "INSERT INTO lease VALUES (1, ?, 1) ON CONFLICT (one) DO UPDATE SET holder = excluded.holder, "
                "fence = fence + 1 RETURNING fence", (holder,),
            ).fetchone()  # fmt: skip
            return Lease(holder=holder, fence=int(fence))

        return self._enqueue(work).result()

    def reconcile(self, lease: Lease, consumed: int) -> None:
        """Make the log agree with a checkpoint that has consumed batches up to ``consumed`` (0: none).

        Raises:
            FencedError: See :class:`FencedError`.
            LogError: The checkpoint names a batch that this log never had, or needs content that it has forgotten.
        """

        def work(db: sqlite3.Connection) -> None:
            check(db, lease)
            (newest,) = db.execute("SELECT COALESCE(MAX(number), 0) FROM batches").fetchone()
            if consumed > newest:
                raise LogError(
                    f"the checkpoint has consumed batch {consumed}, {self.path} knows {newest}: this is another log"
                )
            gone = db.execute(
                "SELECT MIN(batch) FROM items WHERE batch > ? AND body IS NULL AND COALESCE(reason, '') != 'erased'",
                (consumed,),
            ).fetchone()[0]
            if gone is not None:
                raise LogError(f"the log has forgotten batch {gone}, which this checkpoint has not consumed")
            db.execute("UPDATE batches SET trained = number <= ?", (consumed,))
            db.execute(
                "UPDATE items SET status = CASE WHEN batch <= ? THEN 'trained' ELSE 'batched' END "
                "WHERE batch IS NOT NULL AND status IN ('trained', 'batched')", (consumed,),
            )  # fmt: skip

        self._enqueue(work).result()

    def next_batch(
        self, lease: Lease, after: int, *, least: int, most: int, stale: Callable[[Item], str | None] | None = None
    ) -> Batch | None:
        """The batch after ``after``: as it was logged, or a new one of what is ready, oldest first; None where fewer than
        ``least`` are ready.

        Args:
            stale: Why an item is too old to learn from, or None; what is stale is marked so, with its reason, and not
                trained.

        Raises:
            FencedError: See :class:`FencedError`.
        """

        def work(db: sqlite3.Connection) -> Batch | None:
            check(db, lease)
            row = db.execute("SELECT number FROM batches WHERE number > ? ORDER BY number LIMIT 1", (after,)).fetchone()
            if row is not None:
                return Batch(number=row[0], items=items_where(db, "batch = ? AND body IS NOT NULL", (row[0],)))
            chosen: list[Item] = []
            last = 0
            while len(chosen) < most:
                found = items_where(db, "status = 'ready' AND number > ?", (last,), limit=most - len(chosen))
                if not found:
                    break
                last = found[-1].number
                for item in found:
                    reason = stale(item) if stale is not None else None
                    if reason is None:
                        chosen.append(item)
                    else:
                        db.execute(
                            "UPDATE items SET status = 'stale', reason = ? WHERE number = ?", (reason, item.number)
                        )
            if len(chosen) < max(1, least):
                return None
            (number,) = db.execute("SELECT COALESCE(MAX(number), 0) + 1 FROM batches").fetchone()
            db.execute("INSERT INTO batches VALUES (?, ?, 0)", (number, lease.fence))
            db.executemany(
                "UPDATE items SET status = 'batched', batch = ? WHERE number = ?", [(number, i.number) for i in chosen]
            )
            return Batch(number=number, items=tuple(chosen))

        return self._enqueue(work).result()

    def acknowledge(self, lease: Lease, through: int) -> None:
        """Batches up to ``through`` are in a checkpoint that has been renamed into place. Idempotent.

        Raises:
            FencedError: See :class:`FencedError`.
        """

        def work(db: sqlite3.Connection) -> None:
            check(db, lease)
            db.execute("UPDATE items SET status = 'trained' WHERE status = 'batched' AND batch <= ?", (through,))
            db.execute("UPDATE batches SET trained = 1 WHERE number <= ?", (through,))

        self._enqueue(work).result()

    def mark_trained(self, keys: Sequence[str], reason: str) -> int:
        """Somebody who pulled these items, without a lease, has trained them: no batch will hold them. Idempotent.

        Returns:
            How many were ready until now.
        """

        def work(db: sqlite3.Connection) -> int:
            return sum(
                db.execute(
                    "UPDATE items SET status = 'trained', reason = ? WHERE key = ? AND status = 'ready'", (reason, key)
                ).rowcount
                for key in keys
            )

        return self._enqueue(work).result()

    def trained_keys(self, after: int, through: int) -> list[str]:
        """Keys of what was trained in batches above ``after`` and up to ``through``, oldest first."""
        rows = self._read(
            "SELECT key FROM items WHERE batch > ? AND batch <= ? AND status = 'trained' ORDER BY number",
            (after, through),
        )
        return [str(key) for (key,) in rows]

    def forget(self, lease: Lease, through: int) -> int:
        """Drop the content of what was trained in batches up to ``through`` (those that the oldest kept checkpoint has
        consumed); keys stay, so that a late retry is still a duplicate.

        Returns:
            How many items lost their content.
        """

        def work(db: sqlite3.Connection) -> int:
            check(db, lease)
            return db.execute(
                "UPDATE items SET body = NULL WHERE status = 'trained' AND batch <= ? AND body IS NOT NULL", (through,)
            ).rowcount

        return self._enqueue(work).result()

    # -------------------------------------------------------------------------------------------------- looking in

    def counts(self) -> dict[str, int]:
        """Items by status, all statuses."""
        found = dict(self._read("SELECT status, items FROM totals"))
        return {status.value: int(found.get(status.value, 0)) for status in Status}

    def bytes_waiting(self) -> int:
        """Of what is open, ready or batched."""
        (size,) = next(
            self._read("SELECT COALESCE(SUM(bytes), 0) FROM totals WHERE status IN ('open', 'ready', 'batched')")
        )
        return int(size)

    def producers(self) -> dict[str, dict[str, int]]:
        """Items by producer and status."""
        found: dict[str, dict[str, int]] = {}
        for producer, status, count in self._read(
            "SELECT producer, status, COUNT(*) FROM items GROUP BY 1, 2 ORDER BY 1, 2"
        ):
            found.setdefault(producer, {})[status] = count
        return found

    def newest_batch(self) -> tuple[int, int]:
        """Numbers of the newest batch, and of the newest that is acknowledged; 0 for none."""
        newest, trained = next(self._read(
            "SELECT COALESCE(MAX(number), 0), COALESCE(MAX(CASE WHEN trained THEN number END), 0) FROM batches"
        ))  # fmt: skip
        return int(newest), int(trained)

    def sessions(self) -> dict[str, int]:
        """Sessions that are open, ended, or ended by expiry."""
        return {
            str(state): int(count)
            for state, count in self._read(
                "SELECT COALESCE(ended, 'open'), COUNT(*) FROM sessions GROUP BY 1 ORDER BY 1"
            )
        }

    def find(self, key: str) -> tuple[Item, Status, str | None] | None:
        """One item, its status and the reason for it; its body is empty where the log has forgotten it."""
        for row in self._read(f"SELECT {COLUMNS}, status, reason FROM items WHERE key = ?", (key,)):
            return item_of((*row[:4], row[4] or b"", *row[5:8])), Status(row[8]), row[9]
        return None

    def calls(self, session: str) -> list[Item]:
        """Calls of a session whose content is still there, in order of arrival."""
        return [
            item_of(row)
            for row in self._read(
                f"SELECT {COLUMNS} FROM items WHERE session = ? AND body IS NOT NULL ORDER BY number", (session,)
            )
        ]

    def page(self, after: int, limit: int, statuses: Sequence[Status]) -> list[tuple[Item, int, float]]:
        """Items that became ready after the ``after``-th that did, in that order, each with its place in it and its time
        (seconds since 1970; rises strictly). Not the order of arrival: a row whose reward comes late would then appear
        behind a reader that has passed it, and never be seen."""
        marks = ", ".join("?" * len(statuses))
        return [
            (item_of(row[:8]), int(row[8]), float(row[9]))
            for row in self._read(
                f"SELECT {COLUMNS}, shown, ready_at FROM items WHERE shown > ? AND body IS NOT NULL AND status IN ({marks}) "
                "ORDER BY shown LIMIT ?", (after, *(status.value for status in statuses), limit),
            )
        ]  # fmt: skip

    def close(self) -> None:
        """Finish what was submitted, and close the file."""
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
            self._thread.join()
            self._writer.close()

    def __enter__(self) -> TrajectoryLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- the file

    def _read(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        reader: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if reader is None:
            reader = self._readers.connection = connect(self.path)
        try:
            yield from reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise LogError(f"cannot read the log {self.path}: {explain(error)}") from error

    def _enqueue(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        future: Future[T] = Future()
        if self._closed:
            raise LogError(f"the log {self.path} is closed")
        self._tasks.put((work, future))
        return future

    def _write_loop(self) -> None:
        while (first := self._tasks.get()) is not None:
            group, over = [first], False
            while len(group) < SHARED_COMMIT:
                try:
                    task = self._tasks.get_nowait()
                except queue.Empty:
                    break
                if task is None:
                    over = True
                    break
                group.append(task)
            self._commit(group)
            if over:
                return

    def _commit(self, group: Sequence[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]]) -> None:
        """One transaction for all; each operation stands or falls alone, but for the commit itself."""
        db = self._writer
        done: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            db.execute("BEGIN IMMEDIATE")
            for work, future in group:
                db.execute("SAVEPOINT one")
                try:
                    done.append((future, work(db), None))
                    db.execute("RELEASE one")
                except (
                    Exception
                ) as error:  # a refusal, or a bug: its own caller hears of it, the others are not touched
                    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, OF_ONE_STATEMENT):
                        raise  # the file itself cannot be written
                    db.execute("ROLLBACK TO one")
                    db.execute("RELEASE one")
                    done.append((future, None, error))
            db.execute("COMMIT")
        except BaseException as error:
            self._undo()
            told = (
                LogError(f"cannot write the log {self.path}: {explain(error)}; nothing was kept")
                if isinstance(error, sqlite3.Error)
                else error
            )
            for _, future in group:
                future.set_exception(told)
            return
        for future, result, failed in done:
            if failed is not None:
                future.set_exception(failed)
            else:
                future.set_result(result)

    def _undo(self) -> None:
        """After a failure the file is as the last commit left it; a connection that cannot undo is replaced."""
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error:
            self._writer.close()
            self._writer = connect(self.path)

    def _vacuum(self) -> None:
        """Overwrite freed pages and fold the WAL in, so that what was erased is not left in the file."""
        connection = connect(self.path)
        try:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise LogError(
                f"erased, but the file could not be compacted: {explain(error)}; erase again later"
            ) from error
        finally:
            connection.close()
