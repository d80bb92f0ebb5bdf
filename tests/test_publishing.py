"""The pointer that servers follow: closed unless a suite opens it, whole whatever is killed, rolled back and kept so."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sparring.checkpoints import list_checkpoints, rotate, verify_checkpoint, write_checkpoint
from sparring.errors import PublicationError
from sparring.publishing import (
    HISTORY,
    POINTER,
    Follower,
    Kind,
    checkpoints_in_use,
    current,
    decided,
    history,
    publish,
    read_pointer,
    reconcile,
    rollback,
)
from sparring.suite_results import SuiteFigure, SuiteResult
from sparring.types import PolicyVersion

KEYS = tuple(f"probe-{number}" for number in range(40))


def version(step: int) -> PolicyVersion:
    return PolicyVersion(incarnation=1, step=step)


def checkpoint(run: Path, step: int) -> Path:
    return write_checkpoint(run / "checkpoints", step, tensors={}, documents={"state.json": f"{step}".encode()})


def suite(place: Path, share: float, *, panel: str = "p", missing: bool = False) -> SuiteResult:
    """Right answers to the first ``share`` of the probes."""
    values = tuple(None if missing else float(number < share * len(KEYS)) for number in range(len(KEYS)))
    _, manifest = verify_checkpoint(place)
    figure = SuiteFigure(measures=(values,), higher_is_better=True, unit="share")
    return SuiteResult(checkpoint=manifest, panel=panel, keys=KEYS, figures={"right": figure}, seconds=0.0)


def put(run: Path, step: int, share: float, **other: Any) -> Any:
    place = checkpoint(run, step)
    return publish(run, place, suite(place, share, **other), version=version(step))


def test_a_better_candidate_is_published_and_one_worse_beyond_its_interval_is_refused_with_figures(tmp_path):
    assert put(tmp_path, 0, 0.5).published
    assert put(tmp_path, 1, 0.6).published
    refused = put(tmp_path, 2, 0.2)
    assert not refused.published
    assert "right -0.4 (-0." in refused.reason
    found = current(tmp_path)
    assert found is not None and (found.version, found.previous, found.serial) == ("v1.1", "v1.0", 2)
    assert [(line.kind, line.version) for line in history(tmp_path)] == [
        (Kind.PUBLISHED, "v1.0"), (Kind.PUBLISHED, "v1.1"), (Kind.REFUSED, "v1.2"),
    ]  # fmt: skip


def test_a_loss_within_the_interval_is_published_but_many_of_them_do_not_add_up(tmp_path):
    put(tmp_path, 0, 0.5)
    shares = [0.475, 0.45, 0.425, 0.4, 0.375, 0.35]
    published = [put(tmp_path, step, share).published for step, share in enumerate(shares, start=1)]
    assert published[0] and not published[-1]
    assert "the run's first" in history(tmp_path)[-1].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: None, "no suite result"),
        (lambda found: _with(found, checkpoint="00"), "another checkpoint"),
        (lambda found: _with(found, figures={}), "measured nothing"),
        (lambda found: _with(found, panel="q"), "panel is not that of"),
        (lambda found: _with(found, keys=KEYS[:-1]), "has not one measure"),
    ],
)
def test_without_a_suite_result_that_counts_nothing_is_published(tmp_path, change, reason):
    put(tmp_path, 0, 0.5)
    place = checkpoint(tmp_path, 1)
    decision = publish(tmp_path, place, change(suite(place, 0.9)), version=version(1))
    assert not decision.published and reason in decision.reason
    assert current(tmp_path).version == "v1.0"


def test_a_figure_that_is_no_number_is_refused_even_as_the_first(tmp_path):
    assert not put(tmp_path, 0, 0.5, missing=True).published
    assert current(tmp_path) is None


def _with(found: SuiteResult, **changes: Any) -> SuiteResult:
    import dataclasses

    return dataclasses.replace(found, **changes)


def test_a_checkpoint_that_is_not_whole_or_not_the_runs_is_never_named(tmp_path):
    place = checkpoint(tmp_path, 0)
    result = suite(place, 0.5)
    (place / "state.json").write_bytes(b"9")
    with pytest.raises(PublicationError, match="was changed"):
        publish(tmp_path, place, result, version=version(0))
    with pytest.raises(PublicationError, match="is no checkpoint of"):
        publish(tmp_path, tmp_path / "checkpoints" / ".tmp-step-000001-x", result, version=version(0))
    other = checkpoint(tmp_path / "other", 1)
    with pytest.raises(PublicationError, match="is no checkpoint of"):
        publish(tmp_path, other, result, version=version(1))
    (tmp_path / "checkpoints" / "step-000001").symlink_to(other)
    with pytest.raises(PublicationError, match="link"):
        publish(tmp_path, tmp_path / "checkpoints" / "step-000001", result, version=version(1))
    assert not (tmp_path / POINTER).exists()


def test_a_rolled_back_version_is_not_published_again_by_itself(tmp_path):
    for step in range(3):
        put(tmp_path, step, 0.5)
    back = rollback(tmp_path, to=version(0))
    assert (back.version, back.withdrawn, back.serial) == ("v1.0", ("v1.1", "v1.2"), 4)
    again = publish(tmp_path, tmp_path / "checkpoints/step-000002", None, version=version(2))
    assert not again.published and "withdrawn" in again.reason
    assert put(tmp_path, 3, 0.5).published
    assert current(tmp_path).withdrawn == ("v1.1", "v1.2")
    assert decided(tmp_path, version(2)) and not decided(tmp_path, version(4))
    forward = rollback(tmp_path, to=version(2))
    assert forward.version == "v1.2" and "v1.2" not in forward.withdrawn
    assert rollback(tmp_path).version == "v1.1"


def test_a_rollback_to_what_was_never_published_or_is_gone_says_so(tmp_path):
    with pytest.raises(PublicationError, match="published nothing"):
        rollback(tmp_path)
    put(tmp_path, 0, 0.5)
    with pytest.raises(PublicationError, match="first publication"):
        rollback(tmp_path)
    put(tmp_path, 1, 0.5)
    with pytest.raises(PublicationError, match=r"never published v1\.9"):
        rollback(tmp_path, to=version(9))
    (tmp_path / "checkpoints/step-000000/state.json").unlink()
    with pytest.raises(PublicationError, match="not whole"):
        rollback(tmp_path)
    assert current(tmp_path).version == "v1.1"


def test_where_the_panel_has_changed_the_published_version_is_measured_on_the_new_one(tmp_path):
    put(tmp_path, 0, 0.5)
    assert "panel is not that of" in put(tmp_path, 1, 0.5, panel="q").reason
    old = suite(tmp_path / "checkpoints/step-000000", 0.9, panel="q")
    place = checkpoint(tmp_path, 2)
    worse = publish(tmp_path, place, suite(place, 0.3, panel="q"), version=version(2), baseline=old)
    assert not worse.published and "right -0.6" in worse.reason
    place = checkpoint(tmp_path, 3)
    assert publish(tmp_path, place, suite(place, 0.9, panel="q"), version=version(3), baseline=old).published
    assert put(tmp_path, 4, 0.9, panel="q").published  # from here on without a baseline


def test_a_follower_keeps_what_it_has_while_the_pointer_is_bad(tmp_path):
    follower = Follower(tmp_path)
    assert follower.poll() is None and follower.trouble is None
    put(tmp_path, 0, 0.5)
    found = follower.poll()
    follower.serving(found)
    assert found.version == "v1.0" and follower.poll() is None
    put(tmp_path, 1, 0.5)
    good = (tmp_path / POINTER).read_bytes()
    (tmp_path / POINTER).write_bytes(good[:-20])
    assert follower.poll() is None and "damaged" in follower.trouble
    (tmp_path / POINTER).write_bytes(good)
    assert follower.poll().version == "v1.1"


def test_published_checkpoints_outlive_rotation(tmp_path):
    for step in range(9):
        place = checkpoint(tmp_path, step)
        if step % 2 == 0:
            publish(tmp_path, place, suite(place, 0.5), version=version(step))
    rotate(tmp_path / "checkpoints", 1, spare=checkpoints_in_use(tmp_path))
    assert [place.name[-1] for place in list_checkpoints(tmp_path / "checkpoints")] == ["0", "2", "4", "6", "8"]


def test_what_a_kill_or_another_hand_left_is_healed_at_the_start(tmp_path):
    put(tmp_path, 0, 0.5)
    put(tmp_path, 1, 0.5)
    lines = (tmp_path / HISTORY).read_bytes().splitlines(keepends=True)
    (tmp_path / HISTORY).write_bytes(lines[0] + lines[1][:40])  # killed after the pointer, in the middle of the line
    assert reconcile(tmp_path) == (current(tmp_path), None)
    assert [line.version for line in history(tmp_path)] == ["v1.0", "v1.1"]
    pointer = (tmp_path / POINTER).read_bytes()
    (tmp_path / POINTER).write_bytes(pointer.replace(b'"v1.1"', b'"v1.0"'))
    with pytest.raises(PublicationError, match="was changed"):
        read_pointer(tmp_path)
    found, repaired = reconcile(tmp_path)
    assert found.version == "v1.1" and "was changed" in repaired
    (tmp_path / "checkpoints/step-000001/state.json").write_bytes(b"2")
    found, repaired = reconcile(tmp_path)
    assert found.version == "v1.0" and "went back to v1.0" in repaired
    assert current(tmp_path) == found
    (tmp_path / POINTER).write_bytes(b"{")
    (tmp_path / "checkpoints/step-000000/state.json").unlink()
    with pytest.raises(PublicationError, match="no earlier publication is whole"):
        reconcile(tmp_path)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_publishing import put, rollback, version
run = Path(sys.argv[1])
put(run, 0, 0.5)
print("on", flush=True)
for step in range(1, 100000):
    put(run, step, 0.5)
    if step % 3 == 0:
        rollback(run)
"""


@pytest.mark.parametrize("moment", [0.01, 0.037, 0.06, 0.11])
def test_kill_minus_nine_at_any_moment_leaves_a_pointer_that_names_whole_weights(tmp_path, moment):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"on\n"
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
    found = current(tmp_path)
    assert found is not None
    assert reconcile(tmp_path) == (found, None)
    assert history(tmp_path)[-1].serial == found.serial
