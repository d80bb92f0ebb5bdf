"""Checkpoints: written beside and renamed, verified by hash when read, never pickle.

::

    checkpoints/
      step-000100/            one checkpoint; there whole or not at all
        policy.safetensors    tensors by name, one file a group
        state.json            any document
        manifest.json         written last: a hash of every file, and what the checkpoint has consumed
      .tmp-...                work in progress, or what a kill left; the next write clears it away

The checkpoint is the truth of a run: whatever was logged after it is cut back when the run resumes
(``truncate_jsonl``), and whatever it names as consumed is acknowledged only after its rename.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import blake3
import msgspec

from sparring.errors import CheckpointError
from sparring.files import (
    TEMPORARY_PREFIX,
    FileError,
    explain,
    fsync_directory,
    truncate_jsonl,
    write_atomic,
    write_file,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FORMAT",
    "Checkpoint",
    "FileRecord",
    "Manifest",
    "checkpoint_step",
    "incarnation",
    "latest",
    "list_checkpoints",
    "read_checkpoint",
    "read_manifest",
    "rotate",
    "truncate_jsonl",
    "verify_checkpoint",
    "write_checkpoint",
]

FORMAT = 1
"""Version of the layout; a checkpoint of another one is refused."""
MANIFEST = "manifest.json"
TENSORS_SUFFIX = ".safetensors"
Consumed = Mapping[str, int | float | str]
"""What a checkpoint has consumed, by name: the tick, a cursor into the log, the number of episodes."""

S = TypeVar("S")
_STEP = re.compile(r"step-(\d{6,})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What a file of a checkpoint must be.

    >>> FileRecord(bytes=2, blake3="00").bytes
    2
    """

    bytes: int
    blake3: str
    """Hexadecimal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Table of contents of a checkpoint.

    >>> Manifest(format=1, step=3, files={}, consumed={"tick": 3}).step
    3
    """

    format: int
    step: int
    files: Mapping[str, FileRecord]
    consumed: Consumed


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint as it was read, every hash verified.

    >>> Checkpoint(path=Path("step-000003"), tensors={}, documents={"state.json": b"{}"},
    ...     manifest=Manifest(format=1, step=3, files={}, consumed={})).documents["state.json"]
    b'{}'
    """

    path: Path
    tensors: Mapping[str, Mapping[str, Tensor]]
    """File name (with ``.safetensors``) -> name -> tensor, on the CPU."""
    documents: Mapping[str, bytes]
    """File name -> content."""
    manifest: Manifest


# Writing


def write_checkpoint(
    directory: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, bytes],
    consumed: Consumed | None = None,
) -> Path:
    """Write ``directory/step-000123`` so that it is there whole or not at all, whatever happens meanwhile.

    Only the process that holds the run's lock may call it: it clears away what an earlier kill left behind.

    Args:
        directory: ``checkpoints/`` of the run; made if it is missing.
        step: Number of the checkpoint, from 0: the tick of the loop or the step of the optimiser, as the loop counts.
        tensors: File name, ending in ``.safetensors`` -> tensors by name; none may share memory with another.
        documents: File name -> content, e.g. JSON.
        consumed: What is behind this checkpoint; see :data:`Consumed`.

    Returns:
        The checkpoint's directory. If the same checkpoint is there already, it is left as it is.

    Raises:
        CheckpointError: The disk is full, or cannot be written; or another checkpoint of this step exists. Nothing
            is left half written.
    """
    _check_names(tensors, documents)
    target = directory / f"step-{step:06d}"
    work: Path | None = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        work = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{target.name}-", dir=directory))
        work.chmod(0o755)
        files: dict[str, FileRecord] = {}
        for name, group in sorted(tensors.items()):
            _write_tensors(work / name, group)
            files[name] = _record(work / name)
        for name, data in sorted(documents.items()):
            write_file(work / name, data)
            files[name] = _record(work / name)
        manifest = Manifest(format=FORMAT, step=step, files=files, consumed=dict(consumed or {}))
        write_file(work / MANIFEST, _encode_manifest(manifest))
        fsync_directory(work)
        if target.exists():
            _refuse_other(target, manifest)
            return target
        os.rename(work, target)
        fsync_directory(directory)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoint {target}: {explain(error)}") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _check_names(tensors: Mapping[str, object], documents: Mapping[str, object]) -> None:
    for name in (*tensors, *documents):
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"{name!r} cannot be a file of a checkpoint")
    for name in tensors:
        if not name.endswith(TENSORS_SUFFIX):
            raise ValueError(f"{name!r} holds tensors and must end in {TENSORS_SUFFIX}")
    for name in documents:
        if name.endswith(TENSORS_SUFFIX):
            raise ValueError(f"{name!r} is a document and must not end in {TENSORS_SUFFIX}")


def _write_tensors(path: Path, group: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in group.items()}, path)
    except SafetensorError as error:  # safetensors hides the OSError in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code)) from error
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _record(path: Path) -> FileRecord:
    """Hash of a file, read through a memory map so that large ones take no memory."""
    hasher = blake3.blake3()
    if path.stat().st_size:
        hasher.update_mmap(path)
    return FileRecord(bytes=path.stat().st_size, blake3=hasher.hexdigest())


def _encode_manifest(manifest: Manifest) -> bytes:
    """JSON of the manifest with a hash of itself, so that a changed manifest shows too."""
    content = msgspec.to_builtins(manifest)
    return msgspec.json.format(msgspec.json.encode({**content, "blake3": _own_hash(manifest)}), indent=1) + b"\n"


def _own_hash(manifest: Manifest) -> str:
    content = msgspec.json.encode(msgspec.to_builtins(manifest), order="sorted")
    return str(blake3.blake3(content).hexdigest())


def _refuse_other(target: Path, manifest: Manifest) -> None:
    there = read_manifest(target)
    if there != manifest or any(_problem(target / name, record) for name, record in there.files.items()):
        raise CheckpointError(
            f"{target} exists and holds something else: remove it, or continue the run that wrote it with --resume"
        )


def _remove_leftovers(directory: Path) -> None:
    for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


# Reading


def checkpoint_step(path: Path) -> int | None:
    """The number of a checkpoint's directory; None for any other name.

    >>> checkpoint_step(Path("checkpoints/step-000123"))
    123
    """
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first, by number, as they are on disk."""
    if not directory.is_dir():
        return []
    found = [(step, path) for path in directory.iterdir() if (step := checkpoint_step(path)) is not None]
    return [path for _, path in sorted(found)]


def latest(directory: Path) -> Path | None:
    """The newest checkpoint, or None where there is none.

    A kill leaves no checkpoint without its manifest, so one that lacks it was damaged by other hands: that is an error,
    for an older one in its place would train again what was trained.

    Raises:
        CheckpointError: The newest one has no manifest.
    """
    found = list_checkpoints(directory)
    if not found:
        return None
    if not (found[-1] / MANIFEST).is_file():
        before = f"to go back to {found[-2].name}" if len(found) > 1 else "and start afresh"
        raise CheckpointError(f"{found[-1]} is incomplete (it has no {MANIFEST}): remove it {before}")
    return found[-1]


def read_manifest(path: Path) -> Manifest:
    """The verified table of contents of a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of another format.
    """
    file = path / MANIFEST
    try:
        raw = msgspec.json.decode(file.read_bytes())
    except FileNotFoundError as error:
        what = f"it has no {MANIFEST}" if path.is_dir() else "there is nothing"
        raise CheckpointError(f"{path} is no checkpoint: {what}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {explain(error)}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it is no JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is damaged: it is no JSON object")
    if raw.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {raw.get('format')!r}, this version of sparring reads {FORMAT}: use the version that "
            "wrote it"
        )
    own_hash = raw.pop("blake3", None)
    try:
        manifest = msgspec.convert(raw, Manifest)
        intact = own_hash == _own_hash(manifest)
    except (msgspec.ValidationError, OverflowError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"{file} was changed after it was written: its hash differs")
    if any(not _FILE_NAME.fullmatch(name) or name == MANIFEST for name in manifest.files):
        raise CheckpointError(f"{file} names a file outside the checkpoint")
    if checkpoint_step(path) not in (None, manifest.step):
        raise CheckpointError(f"{file} is of step {manifest.step}: the directory was renamed")
    return manifest


def verify_checkpoint(path: Path) -> tuple[Manifest, str]:
    """Check that a checkpoint is whole, without reading its tensors into memory.

    Returns:
        Its manifest, and the BLAKE3 of ``manifest.json``, which names every byte of the checkpoint.

    Raises:
        CheckpointError: A file is missing, truncated or changed; the message names it.
    """
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        problem = _problem(path / name, record)
        if problem:
            raise CheckpointError(f"{path / name} {problem}")
    return manifest, blake3.blake3((path / MANIFEST).read_bytes()).hexdigest()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after verifying every file.

    Raises:
        CheckpointError: A file is missing, truncated, changed, or of another format; the message names it.
    """
    manifest = read_manifest(path)
    tensors: dict[str, Mapping[str, Tensor]] = {}
    documents: dict[str, bytes] = {}
    for name, record in manifest.files.items():
        file = path / name
        problem = _problem(file, record)
        if problem:
            raise CheckpointError(f"{file} {problem}")
        try:
            if name.endswith(TENSORS_SUFFIX):
                tensors[name] = _read_tensors(file)
            else:
                documents[name] = file.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {explain(error)}") from error
    return Checkpoint(path=path, tensors=tensors, documents=documents, manifest=manifest)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(file))
    except SafetensorError as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from error


def _problem(file: Path, record: FileRecord) -> str:
    """What is wrong with a file; empty if nothing is."""
    try:
        if not file.is_file():
            return "is missing"
        size = file.stat().st_size
        if size != record.bytes:
            return f"is {'truncated' if size < record.bytes else 'too long'}: {size} bytes, not {record.bytes}"
        return "" if _record(file) == record else "was changed after it was written: its hash differs"
    except OSError as error:
        return f"cannot be read: {explain(error)}"


# Keeping few


def rotate(directory: Path, keep: int, *, spare: Collection[int] = ()) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints, going by what is on disk. The newest always stays.

    Args:
        directory: ``checkpoints/`` of the run.
        keep: How many of the newest stay, at least 1.
        spare: Steps of checkpoints that stay besides: the best, or those that are served.

    Returns:
        What was removed.
    """
    removed = []
    for path in list_checkpoints(directory)[: -max(keep, 1)]:
        if checkpoint_step(path) in spare:
            continue
        # Renamed first: a kill in the middle must not leave half a checkpoint under its name.
        doomed = directory / f"{TEMPORARY_PREFIX}old-{path.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            os.rename(path, doomed)
        except OSError as error:
            raise CheckpointError(f"cannot remove {path}: {explain(error)}") from error
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(path)
    return removed


# Incarnations


def incarnation(run_dir: Path) -> int:
    """Count one more start or resume of a run, durably, and return its number, from 1.

    Call it at every start and resume, before anything is sampled: a version (incarnation, step) is then never reused,
    not even when a kill threw away steps that were not saved.

    Raises:
        CheckpointError: The counter is damaged, is missing though the run has checkpoints, or cannot be written.
    """
    path = run_dir / "incarnation"
    try:
        text = path.read_text()
    except FileNotFoundError:
        if list_checkpoints(run_dir / "checkpoints"):
            raise CheckpointError(
                f"{path} is missing though the run has checkpoints: write into it a number not below the number of "
                "times that the run was started"
            ) from None
        text = "0"
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not re.fullmatch(r"\d{1,12}\s*", text, flags=re.ASCII):
        raise CheckpointError(f"{path} is damaged: it holds {text[:40]!r}, not a number")
    number = int(text) + 1
    try:
        write_atomic(path, f"{number}\n".encode())
    except FileError as error:
        raise CheckpointError(str(error)) from error
    return number


def read_state(checkpoint: Checkpoint, kind: type[S]) -> S:
    """A loop's own state, ``state.json``.

    Raises:
        CheckpointError: It is missing, or of another version.
    """
    try:
        return msgspec.json.decode(checkpoint.documents["state.json"], type=kind)
    except (KeyError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{checkpoint.path}: state.json is missing or of another version ({error})") from error
