"""The log keeps what it acknowledged, once, whatever is killed, cut or full; a checkpoint is the truth about what is trained."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.intake.trajectory_log import (
    Batch,
    ConflictError,
    FencedError,
    FullError,
    Item,
    LogError,
    NewItem,
    Status,
    TrajectoryLog,
    Verdict,
)


def item(key: str, body: bytes = b"x", **more: object) -> NewItem:
    return NewItem(key=key, producer="p", kind="turns", body=body, **({"scored": True} | more))  # type: ignore[arg-type]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TrajectoryLog]:
    with TrajectoryLog(tmp_path / "log.sqlite") as made:
        yield made


def keys(batch: Batch | None) -> list[str]:
    return [] if batch is None else [one.key for one in batch.items]


def test_the_same_key_is_kept_once_and_other_content_is_a_conflict(log: TrajectoryLog) -> None:
    assert log.append([item("a"), item("b"), item("a")]) == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.DUPLICATE]
    assert log.append([item("a"), item("a", b"other"), item("c")]) == [
        Verdict.DUPLICATE, Verdict.CONFLICT, Verdict.ACCEPTED,
    ]  # fmt: skip
    assert log.append([NewItem(key="a", producer="q", kind="turns", body=b"x")]) == [Verdict.CONFLICT]
    assert log.counts()["ready"] == 3


def test_a_batch_is_the_same_for_ever_and_acknowledged_twice_without_harm(log: TrajectoryLog) -> None:
    log.append([item(f"k{i}", bytes([i])) for i in range(5)])
    lease = log.lease("one")
    assert log.next_batch(lease, 0, least=6, most=9) is None
    first = log.next_batch(lease, 0, least=2, most=3)
    assert first is not None and first.number == 1 and keys(first) == ["k0", "k1", "k2"]
    log.append([item("late")])
    assert log.next_batch(lease, 0, least=1, most=99) == first  # not what is ready now: what was logged
    second = log.next_batch(lease, 1, least=1, most=99)
    assert keys(second) == ["k3", "k4", "late"]
    for _ in range(2):
        log.acknowledge(lease, 1)
    assert log.counts() | {} == {
        "open": 0, "ready": 0, "batched": 3, "trained": 3, "stale": 0, "unscored": 0, "erased": 0,
    }  # fmt: skip
    assert log.newest_batch() == (2, 1)


def test_the_checkpoint_is_the_truth(log: TrajectoryLog) -> None:
    log.append([item(f"k{i}") for i in range(4)])
    old = log.lease("old")
    for number in range(4):
        log.next_batch(old, number, least=1, most=1)
    log.acknowledge(old, 3)
    new = log.lease("new")
    log.reconcile(new, 2)  # killed between rename and acknowledgement, or an older checkpoint was chosen
    assert log.counts()["trained"] == 2 and log.newest_batch() == (4, 2)
    assert keys(log.next_batch(new, 2, least=1, most=9)) == ["k2"]
    for refused in (
        lambda: log.acknowledge(old, 4), lambda: log.next_batch(old, 4, least=1, most=1), lambda: log.reconcile(old, 0),
        lambda: log.forget(old, 1),
    ):  # fmt: skip
        with pytest.raises(FencedError, match="'new' consumes"):
            refused()
    with pytest.raises(LogError, match=r"batch 7.*another log"):
        log.reconcile(new, 7)
    log.acknowledge(new, 3)
    assert log.forget(new, 2) == 2
    with pytest.raises(LogError, match="forgotten batch 2"):
        log.reconcile(new, 1)
    assert log.append([item("k0")]) == [Verdict.DUPLICATE]  # a retry of what is long trained


def test_stale_items_are_marked_with_their_reason(log: TrajectoryLog) -> None:
    log.append([item(f"k{i}") for i in range(6)])
    lease = log.lease("one")

    def stale(one: Item) -> str | None:
        return "too old" if one.number % 2 else None

    assert keys(log.next_batch(lease, 0, least=1, most=2, stale=stale)) == ["k1", "k3"]
    found = log.find("k0")
    assert found is not None and found[1:] == (Status.STALE, "too old")
    assert log.counts()["stale"] == 2  # those beyond the batch were not looked at


def test_rewards_come_late_and_are_revised_until_consumed(log: TrajectoryLog) -> None:
    call = {"session": "s", "scored": False}
    log.append([item("c1", agent="x", **call), item("c2", agent="y", **call), item("c3", agent="y", **call)])
    with pytest.raises(LogError, match="no session 'nobody'"):
        log.reward("nobody", 1.0)
    with pytest.raises(LogError, match="no call of 'z'"):
        log.reward("s", 1.0, agent="z")
    assert log.reward("s", 1.0) == 0 and log.reward("s", 2.0) == 1 and log.reward("s", 2.0) == 1
    assert log.reward("s", 5.0, agent="y") == 0 and log.reward("s", 7.0, call="c3") == 0
    assert log.counts()["ready"] == 0  # not before the end
    log.end("s")
    log.end("s")
    assert log.reward("s", 3.0) == 2  # still not consumed
    log.append([item("c4", agent="x", **call)])  # after the end: nothing is lost
    batch = log.next_batch(log.lease("one"), 0, least=1, most=9)
    assert batch is not None
    assert [(one.key, one.reward) for one in batch.items] == [("c1", 3.0), ("c2", 5.0), ("c3", 7.0), ("c4", 3.0)]
    for late in (
        lambda: log.reward("s", 9.0),
        lambda: log.reward("s", 9.0, agent="x"),
        lambda: log.reward("s", 9.0, call="c3"),
    ):
        with pytest.raises(ConflictError, match="too late"):
            late()
    with pytest.raises(ConflictError, match="another producer"):
        log.open_session("s", "somebody")


def test_a_reward_that_is_sent_again_changes_nothing_even_when_it_was_consumed(log: TrajectoryLog) -> None:
    log.append([item("c1", session="s", scored=False)])
    assert [log.reward("s", 1.0), log.reward("s", 1.0), log.reward("s", 2.0), log.reward("s", 2.0)] == [0, 0, 1, 1]
    log.end("s")
    assert keys(log.next_batch(log.lease("one"), 0, least=1, most=9)) == ["c1"]
    assert log.reward("s", 2.0) == 1  # a retry of an answer that was lost
    with pytest.raises(ConflictError, match="too late"):
        log.reward("s", 3.0)


def test_no_row_becomes_ready_behind_a_reader_of_pages(log: TrajectoryLog) -> None:
    log.append([item("late", session="s", scored=False), item("early")])
    first = log.page(0, 10, (Status.READY,))
    assert [row.key for row, _, _ in first] == ["early"]
    log.reward("s", 1.0)
    log.end("s")
    second = log.page(first[-1][1], 10, (Status.READY,))
    assert [row.key for row, _, _ in second] == ["late"]
    assert second[0][2] > first[0][2]  # by date, too


def test_a_bug_in_one_operation_does_not_touch_the_others_of_its_commit(log: TrajectoryLog) -> None:
    gate = threading.Event()
    log._enqueue(lambda db: gate.wait(10))
    bug = log._enqueue(lambda db: [db.execute("UPDATE totals SET items = 99"), 1 / 0])
    wrong = log._enqueue(lambda db: db.execute("INSERT INTO items (key) VALUES (NULL)"))
    others = log.submit([item("a")])
    gate.set()
    assert others.result() == [Verdict.ACCEPTED]
    with pytest.raises(ZeroDivisionError):
        bug.result()
    with pytest.raises(sqlite3.IntegrityError):
        wrong.result()
    assert log.counts()["ready"] == 1


def test_sessions_that_nobody_ends_expire_by_rule(log: TrajectoryLog) -> None:
    log.append([item("c1", session="with", scored=False), item("c2", session="without", scored=False)])
    log.reward("with", 1.0)
    assert log.expire(3600.0) == 0 and log.counts()["open"] == 2
    assert log.expire(-1.0) == 2
    assert log.counts()["ready"] == 1 and log.counts()["unscored"] == 1
    assert log.reward("without", 0.5) == 0  # later than late, and nothing consumed: it counts
    assert log.counts()["ready"] == 2 and log.sessions() == {"expired": 2}


def test_too_much_is_refused_whole(tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "log.sqlite", most_items=3, most_bytes=100) as log:
        log.append([item("a"), item("b")])
        with pytest.raises(FullError, match="try again later"):
            log.append([item("c"), item("d")])
        with pytest.raises(FullError):
            log.append([item("e", bytes(200))])
        assert log.counts()["ready"] == 2
        log.acknowledge(
            (lease := log.lease("one")), (log.next_batch(lease, 0, least=1, most=9) or Batch(number=0, items=())).number
        )
        assert log.append([item("c"), item("d")]) == [Verdict.ACCEPTED] * 2


def test_erased_is_gone_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    secret = b"a secret of theirs " * 4
    with TrajectoryLog(path) as log:
        log.append(
            [
                item("a", secret),
                item("b", secret),
                NewItem(key="c", producer="q", kind="turns", body=b"mine", scored=True),
            ]
        )
        lease = log.lease("one")
        batch = log.next_batch(lease, 0, least=1, most=1)
        assert keys(batch) == ["a"]
        assert log.erase("p") == 2
        assert keys(log.next_batch(lease, 0, least=1, most=1)) == []  # logged before; its content is gone
        assert keys(log.next_batch(lease, 1, least=1, most=9)) == ["c"]
        assert log.append([item("b", secret)]) == [Verdict.DUPLICATE]  # does not come back
        assert log.counts()["erased"] == 2
        log.reconcile(log.lease("two"), 0)
    assert not any(b"a secret of theirs" in file.read_bytes() for file in tmp_path.iterdir())


def test_another_file_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    path.write_text("not a database, and longer than a header " * 40)
    with pytest.raises(LogError, match=r"cannot open the log .*not a database"):
        TrajectoryLog(path)
    other = tmp_path / "newer.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(LogError, match="format 99"):
        TrajectoryLog(other)


def test_many_writers_at_once(log: TrajectoryLog) -> None:
    results: list[Verdict] = []

    def write(who: int) -> None:
        for number in range(20):
            results.extend(log.append([item(f"{number % 15}-{who // 2}")]))

    threads = [threading.Thread(target=write, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(Verdict.ACCEPTED) == 4 * 15 == log.counts()["ready"]
    assert results.count(Verdict.DUPLICATE) == 160 - 60


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)), st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.just("acknowledge"), st.just(0)), st.tuples(st.just("checkpoint"), st.just(0)),
        st.tuples(st.just("crash"), st.just(0)),
    ), max_size=30,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(steps=_steps)
def test_every_accepted_item_is_trained_exactly_once_in_the_checkpoint(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """``trained`` is what a checkpoint stands for: it travels with the cursor, and a crash falls back to it."""
    sent: list[str] = []
    with TrajectoryLog(tmp_path_factory.mktemp("log") / "log.sqlite") as log:
        lease = log.lease("first")
        cursor, trained = 0, list[str]()
        saved: tuple[int, list[str]] = (0, [])
        for step, count in [
            *steps,
            ("crash", 0),
            *[("take", 9)] * (len(steps) + 2),
            ("checkpoint", 0),
            ("acknowledge", 0),
        ]:
            if step == "append":
                new = [f"k{len(sent) + i}" for i in range(count)]
                log.append([item(key) for key in new])
                sent += new
            elif step == "take":
                batch = log.next_batch(lease, cursor, least=1, most=count)
                if batch is not None:
                    cursor, trained = batch.number, [*trained, *keys(batch)]
            elif step == "checkpoint":
                saved = (cursor, trained)
            elif step == "acknowledge":
                log.acknowledge(lease, saved[0])
            else:
                cursor, trained = saved
                lease = log.lease("next")
                log.reconcile(lease, cursor)
        assert sorted(trained) == sorted(sent) and len(set(trained)) == len(trained)
        assert log.counts()["trained"] == len(sent)


_WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from sparring.intake.trajectory_log import NewItem, TrajectoryLog
    log = TrajectoryLog(Path(sys.argv[1]))
    first = int(sys.argv[2])
    for number in range(first, first + 100_000):
        group = [NewItem(key=f"{number}/{i}", producer="p", kind="turns", body=b"x" * 300, scored=True) for i in range(3)]
        log.append(group)
        print(number, flush=True)
    """
)


def killed_writer(path: Path, first: int, lines: int) -> int:
    """Writes until ``lines`` appends were acknowledged, then SIGKILL; the last acknowledged number."""
    command = [sys.executable, "-c", _WRITER, str(path), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = first - 1
        for line in process.stdout:
            last = int(line)
            if last - first + 1 >= lines:
                break
        process.send_signal(signal.SIGKILL)
        return max([last, *(int(line) for line in process.stdout.read().split())])


def test_a_killed_writer_has_lost_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    path, rng, first = tmp_path / "log.sqlite", random.Random(7), 0
    acknowledged: list[int] = []
    for _ in range(6):
        last = killed_writer(path, first, rng.randrange(1, 60))
        acknowledged += range(first, last + 1)
        first = last + 2  # the one under way may be there or not, but whole
        with TrajectoryLog(path) as log:
            assert {log.find(f"{n}/{i}") is not None for n in acknowledged for i in range(3)} == {True}
            assert len({log.find(f"{last + 1}/{i}") is not None for i in range(3)}) == 1
            with sqlite3.connect(path) as check:
                assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_torn_write_ahead_log_keeps_whole_transactions(tmp_path: Path) -> None:
    path, rng = tmp_path / "log.sqlite", random.Random(3)
    killed_writer(path, 0, 40)
    wal = path.with_name("log.sqlite-wal")
    size = wal.stat().st_size
    before = -1
    for cut in sorted(rng.randrange(size) for _ in range(12)):
        copy = tmp_path / f"cut-{cut}"
        copy.mkdir()
        shutil.copy(path, copy / "log.sqlite")
        data = bytearray(wal.read_bytes()[:cut])
        (copy / "log.sqlite-wal").write_bytes(data)
        with TrajectoryLog(copy / "log.sqlite") as log:
            kept = log.counts()["ready"]
            assert kept % 3 == 0 and kept >= before  # appends are whole, and a longer file holds no less
            before = kept
            assert log.append([item("new")]) == [Verdict.ACCEPTED]


def test_a_full_disk_is_said_and_keeps_what_was_there(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        from pathlib import Path
        from sparring.intake.trajectory_log import LogError, NewItem, TrajectoryLog
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        log = TrajectoryLog(Path(sys.argv[1]))
        log.append([NewItem(key="first", producer="p", kind="turns", body=b"x", scored=True)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        try:
            for number in range(100):
                log.append([NewItem(key=str(number), producer="p", kind="turns", body=bytes(50_000), scored=True)])
                print(number, flush=True)
        except LogError as error:
            print(error, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(log.append([NewItem(key="after", producer="p", kind="turns", body=b"x", scored=True)]))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log.sqlite")], capture_output=True, text=True, check=True
    )
    *kept, error, after = done.stdout.strip().splitlines()
    assert kept and "cannot write the log" in error and "nothing was kept" in error and "ACCEPTED" in after
    with TrajectoryLog(tmp_path / "log.sqlite") as log:
        assert all(log.find(key) is not None for key in ("first", "after", *kept))
        assert log.counts()["ready"] == len(kept) + 2


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path) -> None:
    path, rng, first = tmp_path / "log.sqlite", random.Random(11), 0
    expected = 0
    for _ in range(200):
        last = killed_writer(path, first, rng.randrange(1, 40))
        expected += 3 * (last - first + 1)
        with TrajectoryLog(path) as log:
            extra = log.find(f"{last + 1}/0") is not None
            expected += 3 * extra
            assert log.counts()["ready"] == expected
        first = last + 2
