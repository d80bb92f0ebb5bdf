"""Writing that survives a kill or a power cut; JSON lines, plain or zstd, that can be appended to, read and cut back.

Write beside, force to disk, rename, force the directory to disk: a reader sees the old file or the new one, never half.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from sparring.errors import SparringError

JsonRow = Mapping[str, object]
"""One JSON object of a line."""

TEMPORARY_PREFIX = ".tmp-"
"""Names that begin so are work in progress, or what a kill left of it."""


class FileError(SparringError):
    """A file cannot be read or written, or holds something else than it should."""


def fsync_directory(directory: Path) -> None:
    """Force the names in a directory to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and force its content to disk.

    Raises:
        OSError: As the operating system has it, ``ENOSPC`` on a full disk.
    """
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file as a whole: beside, to disk, rename, directory to disk.

    Raises:
        FileError: The disk is full or the place cannot be written; the old file is as it was.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FileError(f"cannot write {path}: {explain(error)}") from error


def explain(error: OSError) -> str:
    """An OSError for people, with the fix where it is known.

    >>> explain(OSError(28, "No space left on device"))
    'no space left on the disk: free some, or write to another place'
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on the disk: free some, or write to another place"
    return error.strerror or str(error)


# JSON lines


def read_jsonl(path: Path) -> Iterator[JsonRow]:
    """The rows of a ``.jsonl`` or ``.jsonl.zst`` file. A last line (or last zstd frame) that a kill tore is left out.

    Raises:
        FileError: The file cannot be read, or a line before the last is no JSON object.
    """
    data, _ = _read_whole(path)
    lines = data.split(b"\n")
    # What follows the last newline is empty, or a line that was not finished.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise FileError(f"{path}: line {number} is no JSON ({error})") from error
        if not isinstance(row, dict):
            raise FileError(f"{path}: line {number} is no JSON object")
        yield row


def truncate_jsonl(path: Path, keep: int | Callable[[JsonRow], bool]) -> int:
    """Cut a ``.jsonl`` or ``.jsonl.zst`` file back, as a resume does, and leave out a torn last line. A file that is
    not there stays away.

    Args:
        path: The file; it is replaced as a whole.
        keep: The last ``tick`` to keep (rows without one are kept), or which rows to keep.

    Returns:
        How many rows are left.

    Raises:
        FileError: See :func:`read_jsonl`; or the disk is full (the file is then as it was).
    """
    if not path.exists():
        return 0

    def kept(row: JsonRow) -> bool:
        if not isinstance(keep, int):
            return keep(row)
        tick = row.get("tick")
        return not isinstance(tick, int) or tick <= keep

    rows = [row for row in read_jsonl(path) if kept(row)]
    data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    write_atomic(path, compress_frame(data) if path.suffix == ".zst" else data)
    return len(rows)


def compress_frame(data: bytes) -> bytes:
    """One zstd frame. Frames may follow each other in a file, and each can be read when a later one is torn."""
    import zstandard

    return zstandard.ZstdCompressor(level=6).compress(data) if data else b""


def repair_frames(path: Path) -> None:
    """Cut a torn last frame off a ``.zst`` file, so that another can be appended. A file that is not there stays away.

    Raises:
        FileError: The file cannot be read.
    """
    if path.exists():
        _, whole = _read_whole(path)
        if whole < path.stat().st_size:
            os.truncate(path, whole)


def _read_whole(path: Path) -> tuple[bytes, int]:
    """Content (of the whole frames, where it is compressed), and the length in bytes of what is whole in the file."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {explain(error)}") from error
    if path.suffix != ".zst":
        return raw, raw.rfind(b"\n") + 1
    import zstandard

    parts: list[bytes] = []
    rest = raw
    while rest:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            part = frame.decompress(rest)
        except zstandard.ZstdError as error:
            if len(rest) < 18:  # shorter than the longest frame header: torn, not damaged
                break
            raise FileError(f"{path}: damaged ({error})") from error
        if not frame.eof:
            break
        parts.append(part)
        rest = frame.unused_data
    return b"".join(parts), len(raw) - len(rest)
