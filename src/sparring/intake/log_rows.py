"""Tables and rows of the trajectory log: its schema, its records, and what is done to rows within a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparring.errors import SparringError


class LogError(SparringError):
    """The log cannot be opened, read or written."""


class ConflictError(LogError):
    """A key is taken by other content, or a reward comes after its turn was consumed."""


class FullError(LogError):
    """Too much waits to be trained: try again later."""


class FencedError(LogError):
    """Another trainer has taken the lease since."""


class Status(StrEnum):
    """Where an item stands."""

    OPEN = "open"
    READY = "ready"
    BATCHED = "batched"
    TRAINED = "trained"
    STALE = "stale"
    UNSCORED = "unscored"
    ERASED = "erased"


class Verdict(StrEnum):
    """What became of an item that was sent."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewItem:
    """What a producer sends: one trajectory, or one call of a session.

    >>> NewItem(key="a", producer="p", kind="turns", body=b"...").session is None
    True
    """

    key: str
    """Unique in the log for ever; the producer's idempotency key."""
    producer: str
    kind: str
    """What ``body`` holds: ``turns`` or ``rollouts``."""
    body: bytes
    agent: str = ""
    session: str | None = None
    """Of calls that belong together; None is a trajectory that stands alone."""
    scored: bool = False
    """Its reward lies in the body. Else it waits for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """What the log returns."""

    number: int
    """Order of arrival, from 1; never reused."""
    key: str
    producer: str
    kind: str
    body: bytes
    agent: str
    session: str | None
    reward: float | None
    """That came apart from the body: of the call, else of its agent, else of its session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What is trained together; the same for ever once it is logged (but for what was erased)."""

    number: int
    """From 1, without gaps in a log; the checkpoint names the last one it has consumed."""
    items: tuple[Item, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to take batches until somebody else has it."""

    holder: str
    fence: int


SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, producer TEXT NOT NULL, kind TEXT NOT NULL,
    agent TEXT NOT NULL, session TEXT, digest BLOB NOT NULL, size INTEGER NOT NULL, body BLOB, scored INTEGER NOT NULL,
    received REAL NOT NULL, status TEXT NOT NULL, reason TEXT, batch INTEGER, reward REAL, shown INTEGER, ready_at REAL
);
CREATE INDEX IF NOT EXISTS items_by_status ON items (status, number);
CREATE UNIQUE INDEX IF NOT EXISTS items_by_shown ON items (shown) WHERE shown IS NOT NULL;
CREATE INDEX IF NOT EXISTS items_by_session ON items (session) WHERE session IS NOT NULL;
CREATE INDEX IF NOT EXISTS items_by_batch ON items (batch) WHERE batch IS NOT NULL;
CREATE INDEX IF NOT EXISTS items_by_producer ON items (producer);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, producer TEXT NOT NULL, opened REAL NOT NULL, touched REAL NOT NULL, ended TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rewards (
    session TEXT NOT NULL, scope TEXT NOT NULL, value REAL NOT NULL, revisions INTEGER NOT NULL,
    PRIMARY KEY (session, scope)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY, fence INTEGER NOT NULL, trained INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS lease (one INTEGER PRIMARY KEY CHECK (one = 1), holder TEXT NOT NULL, fence INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS totals (status TEXT PRIMARY KEY, items INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS count_insert AFTER INSERT ON items BEGIN
    INSERT INTO totals VALUES (NEW.status, 1, NEW.size)
        ON CONFLICT (status) DO UPDATE SET items = items + 1, bytes = bytes + NEW.size;
END;
CREATE TRIGGER IF NOT EXISTS show_insert AFTER INSERT ON items WHEN NEW.status = 'ready' BEGIN
    UPDATE items SET (shown, ready_at) = (
        SELECT COALESCE(MAX(shown), 0) + 1, MAX(
            (julianday('now') - 2440587.5) * 86400.0,
            COALESCE((SELECT ready_at FROM items WHERE shown IS NOT NULL ORDER BY shown DESC LIMIT 1), 0) + 0.000001
        ) FROM items WHERE shown IS NOT NULL
    ) WHERE number = NEW.number;
END;
CREATE TRIGGER IF NOT EXISTS show_update AFTER UPDATE OF status ON items WHEN NEW.status = 'ready' AND NEW.shown IS NULL BEGIN
    UPDATE items SET (shown, ready_at) = (
        SELECT COALESCE(MAX(shown), 0) + 1, MAX(
            (julianday('now') - 2440587.5) * 86400.0,
            COALESCE((SELECT ready_at FROM items WHERE shown IS NOT NULL ORDER BY shown DESC LIMIT 1), 0) + 0.000001
        ) FROM items WHERE shown IS NOT NULL
    ) WHERE number = NEW.number;
END;
CREATE TRIGGER IF NOT EXISTS count_update AFTER UPDATE OF status ON items WHEN OLD.status != NEW.status BEGIN
    UPDATE totals SET items = items - 1, bytes = bytes - OLD.size WHERE status = OLD.status;
    INSERT INTO totals VALUES (NEW.status, 1, NEW.size)
        ON CONFLICT (status) DO UPDATE SET items = items + 1, bytes = bytes + NEW.size;
END;
"""
COLUMNS = "number, key, producer, kind, body, agent, session, reward"
FORMAT = 2


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def explain(error: BaseException) -> str:
    text = str(error)
    if "disk is full" in text or "disk I/O error" in text or "File too large" in text:
        return f"{text}: free some space, or move the log"
    if "file is not a database" in text or "malformed" in text:
        return f"{text}: restore it from a copy, or name another file"
    return text


def waiting(db: sqlite3.Connection) -> tuple[int, int]:
    items, size = db.execute(
        "SELECT COALESCE(SUM(items), 0), COALESCE(SUM(bytes), 0) FROM totals WHERE status IN ('open', 'ready', 'batched')"
    ).fetchone()
    return int(items), int(size)


def insert(db: sqlite3.Connection, item: NewItem, digest: bytes, now: float) -> Verdict:
    known = db.execute("SELECT digest, producer FROM items WHERE key = ?", (item.key,)).fetchone()
    if known is not None:
        same = known == (digest, item.producer)
        return Verdict.DUPLICATE if same else Verdict.CONFLICT
    if item.session is not None:
        touch(db, item.session, item.producer, now)
    ready = item.scored and item.session is None
    db.execute(
        "INSERT INTO items (key, producer, kind, agent, session, digest, size, body, scored, received, status) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            item.key, item.producer, item.kind, item.agent, item.session, digest, len(item.body), item.body, item.scored,
            now, (Status.READY if ready else Status.OPEN).value,
        ),
    )  # fmt: skip
    if (
        item.session is not None
        and db.execute("SELECT 1 FROM sessions WHERE id = ? AND ended IS NOT NULL", (item.session,)).fetchone()
    ):
        settle(db, item.session)  # a call that came after the end of its session: nothing is lost
    return Verdict.ACCEPTED


def touch(db: sqlite3.Connection, session: str, producer: str, now: float) -> None:
    owner = db.execute("SELECT producer FROM sessions WHERE id = ?", (session,)).fetchone()
    if owner is None:
        db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, NULL)", (session, producer, now, now))
    elif owner[0] != producer:
        raise ConflictError(f"session {session!r} belongs to another producer")
    else:
        db.execute("UPDATE sessions SET touched = ? WHERE id = ?", (now, session))


def settle(db: sqlite3.Connection, session: str) -> None:
    """Of an ended session: what has a reward is ready; a revised reward is taken over while nothing is consumed."""
    db.execute(
        "UPDATE items SET reward = COALESCE("
        "(SELECT value FROM rewards WHERE session = items.session AND scope = 'call/' || items.key), "
        "(SELECT value FROM rewards WHERE session = items.session AND scope = 'agent/' || items.agent), "
        "(SELECT value FROM rewards WHERE session = items.session AND scope = '')) "
        "WHERE session = ? AND status IN ('open', 'ready', 'unscored')", (session,),
    )  # fmt: skip
    db.execute(
        "UPDATE items SET status = 'ready', reason = NULL WHERE session = ? AND status IN ('open', 'unscored') "
        "AND (reward IS NOT NULL OR scored)", (session,),
    )  # fmt: skip


def check(db: sqlite3.Connection, lease: Lease) -> None:
    row = db.execute("SELECT holder, fence FROM lease").fetchone()
    if row is None or int(row[1]) != lease.fence:
        raise FencedError(
            f"the lease of {lease.holder!r} has ended: {row[0] if row else 'nobody'!r} consumes this log now"
        )


def items_where(db: sqlite3.Connection, where: str, values: Sequence[Any], *, limit: int = -1) -> tuple[Item, ...]:
    rows = db.execute(f"SELECT {COLUMNS} FROM items WHERE {where} ORDER BY number LIMIT ?", (*values, limit))
    return tuple(item_of(row) for row in rows.fetchall())


def item_of(row: Sequence[Any]) -> Item:
    number, key, producer, kind, body, agent, session, reward = row
    return Item(
        number=number,
        key=key,
        producer=producer,
        kind=kind,
        body=bytes(body),
        agent=agent,
        session=session,
        reward=reward,
    )
