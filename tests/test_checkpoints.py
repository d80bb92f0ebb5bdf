"""Checkpoints: whole or not at all, verified, and safe from a kill at any moment and from a full disk."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparring import checkpoints, files
from sparring.checkpoints import (
    incarnation,
    latest,
    list_checkpoints,
    read_checkpoint,
    read_manifest,
    rotate,
    truncate_jsonl,
    write_checkpoint,
)
from sparring.errors import CheckpointError
from sparring.files import FileError, compress_frame, read_jsonl, repair_frames, write_atomic

TENSORS = {
    "policy.safetensors": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1, dtype=torch.bfloat16)},
    "optimizer.safetensors": {"step": torch.tensor(7)},
}
DOCUMENTS = {"state.json": b'{"tick": 3}', "empty.bin": b""}


def written(directory: Path, step: int = 3) -> Path:
    return write_checkpoint(
        directory, step, tensors=TENSORS, documents=DOCUMENTS, consumed={"tick": step, "cursor": "x"}
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "checkpoints")
    assert path.name == "step-000003"
    found = read_checkpoint(path)
    assert found.documents == DOCUMENTS
    assert found.manifest.consumed == {"tick": 3, "cursor": "x"}
    assert (found.manifest.format, found.manifest.step) == (1, 3)
    for name, group in TENSORS.items():
        for key, tensor in group.items():
            assert found.tensors[name][key].dtype == tensor.dtype
            assert torch.equal(found.tensors[name][key], tensor)
    assert sorted(each.name for each in path.parent.iterdir()) == ["step-000003"]
    assert not {b"pickle", b"PK\x03\x04"} & {file.read_bytes()[:4] for file in path.iterdir()}


def test_slices_and_transposes_are_saved_as_they_read(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    path = write_checkpoint(tmp_path, 0, tensors={"t.safetensors": {"t": whole.T, "s": whole[1:, ::2]}}, documents={})
    found = read_checkpoint(path).tensors["t.safetensors"]
    assert torch.equal(found["t"], whole.T) and torch.equal(found["s"], whole[1:, ::2])


def test_the_same_again_is_fine_and_anything_else_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = (path / "manifest.json").stat().st_mtime_ns
    assert written(tmp_path) == path
    assert (path / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match="exists and holds something else"):
        write_checkpoint(tmp_path, 3, tensors=TENSORS, documents={"state.json": b"{}"})
    assert read_checkpoint(path).documents == DOCUMENTS
    (path / "state.json").write_bytes(b'{"tick": 4}')
    with pytest.raises(CheckpointError, match="exists and holds something else"):
        written(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["step-000003"]


@pytest.mark.parametrize("name", ["policy.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "append", "remove"])
def test_damage_is_refused_and_the_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = written(tmp_path)
    file = path / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "truncate":
        del data[-1 if name != "manifest.json" else -3 :]
    else:
        data += b"x"
    file.write_bytes(bytes(data))
    if damage == "remove":
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    path = written(tmp_path)
    file = path / "manifest.json"
    good = file.read_bytes()
    rng = random.Random(0)
    for _ in range(200):
        position = rng.randrange(len(good))
        bad = good[:position] + bytes([good[position] ^ (1 << rng.randrange(7))]) + good[position + 1 :]
        file.write_bytes(bad)
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        file.write_bytes(good)  # a change of white space is no change
        assert manifest == read_manifest(path)


def test_another_format_or_step_and_paths_outside_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a")
    moved = path.rename(path.parent / "step-000009")
    with pytest.raises(CheckpointError, match="was renamed"):
        read_checkpoint(moved)
    content = json.loads((moved / "manifest.json").read_bytes())
    (moved / "manifest.json").write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, this version of sparring reads 1"):
        read_checkpoint(moved)
    with pytest.raises(CheckpointError, match="is no checkpoint: there is nothing"):
        read_checkpoint(tmp_path / "step-000001")
    for name in ("../x", "a/b", "/etc/passwd", ".hidden", "manifest.json"):
        with pytest.raises(ValueError, match="cannot be a file of a checkpoint"):
            write_checkpoint(tmp_path, 1, tensors={}, documents={name: b""})
    monkeypatch.setattr(checkpoints, "_check_names", lambda *_: None)
    monkeypatch.setattr(checkpoints, "write_file", lambda path, data: path.resolve().write_bytes(data))
    outside = write_checkpoint(tmp_path / "b", 1, tensors={}, documents={"../../outside": b"x"})
    with pytest.raises(CheckpointError, match="names a file outside"):
        read_checkpoint(outside)


def test_latest_and_rotate_go_by_the_disk(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    for step in (5, 30, 200, 1_000_000, 9):
        written(tmp_path, step)
    (tmp_path / "step-abc").mkdir()
    (tmp_path / ".tmp-step-9999999-x").mkdir()
    assert latest(tmp_path) == tmp_path / "step-1000000"
    assert [path.name for path in rotate(tmp_path, 2, spare={9})] == ["step-000005", "step-000030"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000009", "step-000200", "step-1000000"]
    assert [path.name for path in rotate(tmp_path, 0)] == ["step-000009", "step-000200"]
    assert latest(tmp_path) == tmp_path / "step-1000000"
    written(tmp_path, 1_000_001)
    (tmp_path / "step-1000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="remove it to go back to step-1000000"):
        latest(tmp_path)


def test_only_the_writer_clears_leftovers(tmp_path: Path) -> None:
    left = tmp_path / ".tmp-step-000001-abc"
    left.mkdir()
    (left / "x").write_bytes(b"half")
    assert latest(tmp_path) is None and rotate(tmp_path, 1) == [] and left.exists()
    written(tmp_path)
    assert not left.exists()


# Kills

WRITER = """
import sys, torch
from pathlib import Path
from sparring.checkpoints import incarnation, latest, read_checkpoint, rotate, write_checkpoint
run = Path(sys.argv[1])
number = incarnation(run)
newest = latest(run / "checkpoints")
step = 0 if newest is None else int(read_checkpoint(newest).documents["state.json"])
print("ready", flush=True)
while True:
    step += 1
    write_checkpoint(run / "checkpoints", step, documents={"state.json": str(step).encode()},
                     tensors={"w.safetensors": {"w": torch.full((40_000,), float(step))}},
                     consumed={"tick": step})
    rotate(run / "checkpoints", 2)
    print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_newest_checkpoint_whole(tmp_path: Path) -> None:
    rng = random.Random(1)
    (tmp_path / "checkpoints").mkdir()
    reported, kills = 0, 6
    for number in range(1, kills + 1):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split()
        reported = int(rest[-1]) if rest else reported
        newest = latest(tmp_path / "checkpoints")
        assert (tmp_path / "incarnation").read_text() == f"{number}\n"
        if newest is None:
            assert reported == 0
            continue
        found = read_checkpoint(newest)
        step = found.manifest.step
        assert step >= reported, "a checkpoint that was reported is gone"
        assert found.documents["state.json"] == str(step).encode() and found.manifest.consumed == {"tick": step}
        assert torch.equal(found.tensors["w.safetensors"]["w"], torch.full((40_000,), float(step)))
        for older in list_checkpoints(tmp_path / "checkpoints"):
            read_checkpoint(older)
    assert reported > 0


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_kill_between_any_two_calls_to_the_system(tmp_path: Path, call: str) -> None:
    """The process dies right before its n-th call, for every n until it no longer does."""
    code = textwrap.dedent("""
        import os, sys, torch
        from pathlib import Path
        from sparring.checkpoints import rotate, write_checkpoint
        name, left, step = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
        real = getattr(os, name)
        def dying(*arguments, **keywords):
            global left
            left -= 1
            if left < 0:
                os._exit(9)
            return real(*arguments, **keywords)
        setattr(os, name, dying)
        tensors = {"w.safetensors": {"w": torch.ones(3)}}
        write_checkpoint(Path(sys.argv[1]), step, documents={"a": b"x"}, tensors=tensors)
        rotate(Path(sys.argv[1]), 1)
    """)
    for number in range(20):
        command = [sys.executable, "-c", code, str(tmp_path), call, str(number), str(number + 1)]
        died = subprocess.run(command, check=False).returncode == 9
        newest = latest(tmp_path)
        if newest is not None:
            assert read_checkpoint(newest).manifest.step in (number, number + 1)
        if not died:
            assert read_checkpoint(tmp_path / f"step-{number + 1:06d}").documents == {"a": b"x"}
            assert [each.name for each in tmp_path.iterdir()] == [f"step-{number + 1:06d}"]
            return
    pytest.fail("it never got through")


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no permission to mount a tmpfs here; the tests with a patched write stand in")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("kind", ["tensors", "documents"])
def test_a_disk_that_is_really_full(small_disk: Path, kind: str) -> None:
    kept = written(small_disk / "checkpoints", 1)
    large = torch.zeros(100_000)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-000002: no space left on the disk"):
        if kind == "tensors":
            write_checkpoint(small_disk / "checkpoints", 2, tensors={"w.safetensors": {"w": large}}, documents={})
        else:
            write_checkpoint(small_disk / "checkpoints", 2, tensors={}, documents={"d.bin": bytes(400_000)})
    assert [each.name for each in (small_disk / "checkpoints").iterdir()] == ["step-000001"]
    assert latest(small_disk / "checkpoints") == kept
    read_checkpoint(kept)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fills_up_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    written(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CheckpointError, match="no space left"):
        written(tmp_path, 2)
    monkeypatch.undo()
    assert [each.name for each in tmp_path.iterdir()] == ["step-000001"]


# Incarnations, atomic files, JSON lines


def test_incarnations_only_go_up(tmp_path: Path) -> None:
    assert [incarnation(tmp_path) for _ in range(3)] == [1, 2, 3]
    (tmp_path / "incarnation").write_text("three")
    with pytest.raises(CheckpointError, match="damaged: it holds 'three'"):
        incarnation(tmp_path)
    (tmp_path / "incarnation").unlink()
    written(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="missing though the run has checkpoints"):
        incarnation(tmp_path)


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_atomic(file, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(FileError, match="no space left"):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


def test_lines_are_cut_back_to_a_tick(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"tick":1}\n{"tick":2}\n{"note":"x"}\n{"tick":3}\n{"tick":4,"torn')
    assert [row.get("tick") for row in read_jsonl(file)] == [1, 2, None, 3]
    assert truncate_jsonl(file, 2) == 3
    assert file.read_text() == '{"tick":1}\n{"tick":2}\n{"note":"x"}\n'
    assert truncate_jsonl(file, lambda row: row.get("tick") == 1) == 1
    assert truncate_jsonl(tmp_path / "none.jsonl", 3) == 0
    file.write_text('{"tick":1}\nrubbish\n{"tick":2}\n')
    with pytest.raises(FileError, match="line 2 is no JSON"):
        truncate_jsonl(file, 3)


def test_frames_cut_anywhere_lose_only_themselves(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.zst"
    first, second = compress_frame(b'{"tick":1}\n' * 20), compress_frame(b'{"tick":2}\n' * 20)
    for cut in range(len(second)):
        file.write_bytes(first + second[:cut])
        assert [row["tick"] for row in read_jsonl(file)] == [1] * 20
        repair_frames(file)
        assert file.read_bytes() == first
    file.write_bytes(first + second)
    assert truncate_jsonl(file, 1) == 20
    assert [row["tick"] for row in read_jsonl(file)] == [1] * 20
    assert truncate_jsonl(file, 0) == 0 and list(read_jsonl(file)) == []
    file.write_bytes(b"no zstd at all, but long enough")
    with pytest.raises(FileError, match="damaged"):
        list(read_jsonl(file))


def test_checkpoints_load_without_torch() -> None:
    code = "import sys, sparring.checkpoints, sparring.rundir; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
