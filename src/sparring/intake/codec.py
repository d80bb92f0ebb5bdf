"""Rollouts as bytes: msgpack, compressed by zstd, under a BLAKE3 hash. No pickle, nothing that runs code.

::

    "SPRL" | format, 1 byte | length of the body, 8 bytes | length unpacked, 8 bytes | BLAKE3, 32 bytes | body

The hash covers everything else, header included, and is not optional; with a key it is a keyed hash, which only those
who hold the key can make. Lengths are little-endian, and so are arrays. Arrays come back to the bit.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import Any

import blake3
import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from sparring.errors import SparringError
from sparring.types import PolicyVersion, Rollout

MAGIC, FORMAT = b"SPRL", 1
KEY_BYTES = 32
DEFAULT_LIMIT = 1 << 30
"""Bytes that a message may unpack to; a larger one is refused before it is unpacked."""
_HEADER = struct.Struct("<4sBQQ")
_DTYPES = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})


class CodecError(SparringError):
    """A message is truncated, tampered with, of another format or key, or holds something else."""


class PackedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array as dtype (``f4``: little-endian kind and width), shape and raw bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class PackedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A ``Rollout`` with its arrays packed."""

    agent: str
    environment: int
    episode: int
    version: PolicyVersion
    observations: PackedArray
    actions: PackedArray
    log_probs: PackedArray
    rewards: PackedArray
    terminated: PackedArray
    truncated: PackedArray
    final_observations: PackedArray
    masks: PackedArray | None = None
    states: PackedArray | None = None
    final_states: PackedArray | None = None


_SCALARS = ("agent", "environment", "episode", "version")
_ARRAYS = tuple(name for name in PackedRollout.__struct_fields__ if name not in _SCALARS)


def encode(rollouts: Sequence[Rollout], *, key: bytes | None = None, level: int = 3) -> bytes:
    """Rollouts as one message.

    Args:
        rollouts: Any number.
        key: 32 secret bytes, for a keyed hash.
        level: Of zstd.
    """
    packed = []
    for rollout in rollouts:
        fields: dict[str, Any] = {name: getattr(rollout, name) for name in _SCALARS}
        fields.update((name, pack_array(getattr(rollout, name))) for name in _ARRAYS)
        packed.append(PackedRollout(**fields))
    return seal(msgspec.msgpack.encode(packed), key=key, level=level)


def decode(message: bytes, *, key: bytes | None = None, limit: int = DEFAULT_LIMIT) -> list[Rollout]:
    """The rollouts of a message; their arrays can be written to.

    Args:
        message: From :func:`encode`.
        key: The key it was sealed with.
        limit: Most bytes it may unpack to.

    Raises:
        CodecError: It is not whole, not as it was sent, of another key, or too large.
    """
    content = unseal(message, key=key, limit=limit)
    try:
        packed = msgspec.msgpack.decode(content, type=list[PackedRollout])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CodecError(f"the message holds no rollouts: {error}") from error
    rollouts = []
    for each in packed:
        fields: dict[str, Any] = {name: getattr(each, name) for name in _SCALARS}
        fields.update((name, _unpack(name, getattr(each, name))) for name in _ARRAYS)
        rollouts.append(Rollout(**fields))
    return rollouts


def seal(content: bytes, *, key: bytes | None = None, level: int = 3) -> bytes:
    """Bytes compressed, with length and hash before them."""
    body = zstandard.ZstdCompressor(level=level).compress(content)
    header = _HEADER.pack(MAGIC, FORMAT, len(body), len(content))
    return header + _hash(header, body, key) + body


def unseal(message: bytes, *, key: bytes | None = None, limit: int = DEFAULT_LIMIT) -> bytes:
    """The content of a sealed message. Nothing is unpacked before the hash is right.

    Raises:
        CodecError: See :func:`decode`.
    """
    start = _HEADER.size + KEY_BYTES
    if len(message) < start:
        raise CodecError(f"the message is truncated: {len(message)} bytes, the header alone has {start}")
    magic, number, length, unpacked = _HEADER.unpack_from(message)
    if magic != MAGIC or number != FORMAT:
        raise CodecError(f"this is no message of format {FORMAT} (it begins with {message[:5]!r})")
    body = message[start:]
    if len(body) != length:
        raise CodecError(f"the message is {'truncated' if len(body) < length else 'too long'}: {len(body)} of {length}")
    if not hmac.compare_digest(_hash(message[: _HEADER.size], body, key), message[_HEADER.size : start]):
        raise CodecError("the message was changed, or sealed with another key: its hash differs")
    if unpacked > limit:
        raise CodecError(f"the message unpacks to {unpacked} bytes, more than the limit of {limit}")
    try:
        content = zstandard.ZstdDecompressor().decompress(body, max_output_size=unpacked)
    except zstandard.ZstdError as error:
        raise CodecError(f"the message cannot be unpacked: {error}") from error
    if len(content) != unpacked:
        raise CodecError(f"the message unpacks to {len(content)} bytes, its header says {unpacked}")
    return content


def pack_array(array: Any) -> PackedArray | None:
    """An array as a message holds it; None stays None.

    Raises:
        CodecError: Its dtype is none of numbers and bool.
    """
    if array is None:
        return None
    array = np.asarray(array)
    name = f"{array.dtype.kind}{array.dtype.itemsize}"
    if name not in _DTYPES:
        raise CodecError(f"an array of {array.dtype} cannot be sent: give numbers or bool")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return PackedArray(dtype=name, shape=array.shape, data=little.tobytes())


def unpack_array(packed: PackedArray) -> NDArray[Any]:
    """The array of a message, of this machine's byte order.

    Raises:
        CodecError: Dtype, shape and bytes do not fit.
    """
    if packed.dtype not in _DTYPES:
        raise CodecError(f"unknown dtype {packed.dtype!r}")
    dtype = np.dtype(f"<{packed.dtype}")
    if min(packed.shape, default=0) < 0 or len(packed.data) != dtype.itemsize * int(
        np.prod(packed.shape, dtype=object)
    ):
        raise CodecError(f"{len(packed.data)} bytes are no array of {packed.dtype} of shape {packed.shape}")
    return np.frombuffer(packed.data, dtype).reshape(packed.shape).astype(dtype.newbyteorder("="))


def _unpack(name: str, packed: PackedArray | None) -> NDArray[Any] | None:
    try:
        return None if packed is None else unpack_array(packed)
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error


def _hash(header: bytes, body: bytes, key: bytes | None) -> bytes:
    if key is not None and len(key) != KEY_BYTES:
        raise CodecError(f"key has {len(key)} bytes: give {KEY_BYTES}")
    hasher = blake3.blake3(key=key) if key is not None else blake3.blake3()
    return bytes(hasher.update(header).update(body).digest())
