"""Messages come back to the bit; a changed, cut or foreign one is refused before it is unpacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_fixtures import CONTINUOUS, DISCRETE, MULTI, assert_same, random_rollout
from sparring.files import FileError
from sparring.intake.codec import CodecError, decode, encode, seal, unseal
from sparring.intake.parquet import read_parquet, write_parquet
from sparring.types import PolicyVersion

KEY = bytes(range(32))


@given(
    seed=st.integers(0, 1000), steps=st.integers(1, 9), spaces=st.sampled_from([DISCRETE, MULTI, CONTINUOUS]),
    masked=st.booleans(), state=st.integers(0, 2), dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_a_message_comes_back_to_the_bit(seed, steps, spaces, masked, state, dtype) -> None:  # type: ignore[no-untyped-def]
    sent = [
        random_rollout(seed + i, steps + i, spaces, masked=masked, state_size=state, dtype=dtype, agent=f"ä{i}")
        for i in range(2)
    ]
    came = decode(encode(sent))
    for one, two in zip(sent, came, strict=True):
        assert_same(one, two)
    came[0].rewards[0] = 3.0  # may be written to


def test_big_endian_and_empty_arrays() -> None:
    rollout = random_rollout(0, 2, ends=1.0, rewards=np.array([1.5, -2.0], ">f8"))
    (came,) = decode(encode([rollout]))
    assert came.rewards.tolist() == [1.5, -2.0] and came.final_observations.shape == (0, 3)
    assert decode(encode([])) == []


def test_every_flipped_byte_is_found() -> None:
    """Header, hash and body alike: integrity is never skipped."""
    message = encode([random_rollout(0, 3)])
    for position in range(len(message)):
        for bit in (0x01, 0x80):
            broken = bytearray(message)
            broken[position] ^= bit
            with pytest.raises(CodecError):
                decode(bytes(broken))


def test_every_truncation_is_found() -> None:
    message = encode([random_rollout(0, 3)])
    for length in range(len(message)):
        with pytest.raises(CodecError, match="truncated"):
            decode(message[:length])
    with pytest.raises(CodecError, match="too long"):
        decode(message + b"\0")


def test_a_removed_hash_or_another_key_is_refused() -> None:
    message = encode([random_rollout(0, 3)], key=KEY)
    assert len(decode(message, key=KEY)) == 1
    for key in (None, bytes(32)):
        with pytest.raises(CodecError, match="another key"):
            decode(message, key=key)
    with pytest.raises(CodecError, match="another key"):
        decode(message[:21] + bytes(32) + message[53:], key=KEY)
    with pytest.raises(CodecError, match="give 32"):
        encode([], key=b"short")


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    message = seal(bytes(1_000_000))
    assert len(message) < 1000
    with pytest.raises(CodecError, match="more than the limit"):
        unseal(message, limit=999_999)


@pytest.mark.parametrize("content", [b"", b"\x81\xa1a\x01", b"\x91\x80", b"\xff"])
def test_what_holds_no_rollouts_is_refused(content: bytes) -> None:
    with pytest.raises(CodecError, match="no rollouts"):
        decode(seal(content))


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(CodecError, match="cannot be sent"):
        encode([random_rollout(0, 2, actions=np.array([[object()], [None]]))])


@pytest.mark.parametrize("spaces", [DISCRETE, MULTI, CONTINUOUS])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parquet_loses_nothing(spaces, dtype, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Flags, versions, environment and episode included; also where one rollout ends where the next begins."""
    sent = [
        random_rollout(
            i, i + 1, spaces, masked=spaces is not CONTINUOUS, state_size=2 if spaces is MULTI else 0, dtype=dtype,
            agent=f"agent_{i % 2}", environment=i, episode=5 * i, version=PolicyVersion(incarnation=2, step=i),
            ends=1.0 if i == 0 else 0.3,
        )
        for i in range(6)
    ]  # fmt: skip
    write_parquet(tmp_path / "r.parquet", sent)
    for one, two in zip(sent, read_parquet(tmp_path / "r.parquet"), strict=True):
        assert_same(one, two)


def test_parquet_refuses_a_mixture_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="differ in dtype or width of actions"):
        write_parquet(tmp_path / "r.parquet", [random_rollout(0, 2, DISCRETE), random_rollout(0, 2, MULTI)])
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(FileError, match="no Parquet file of rollouts"):
        read_parquet(tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == [tmp_path / "x.parquet"]
