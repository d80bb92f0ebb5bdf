"""TurboQuant's maths against published figures, numbers worked out by hand, and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.inference.quantiser import (
    codebook,
    dequantise,
    make_codec,
    pack,
    quantise,
    residual_product,
    residual_signs,
    rotation,
    unpack_centroids,
)


def units(count: int, size: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn((count, size), generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3616), (2, 0.1160), (3, 0.03385), (4, 0.00936)])
def test_mean_squared_error_is_the_published_one(bits: int, error: float) -> None:
    x = units(2000, 128)
    turned = x @ rotation(128, 0).T
    codes, norms = quantise(turned, bits)
    decoded = (norms * dequantise(codes, 128, bits)) @ rotation(128, 0)
    found = (decoded - x).square().sum(dim=-1).mean().item()
    assert found == pytest.approx(error, rel=0.03)
    assert 4.0**-bits < found < math.sqrt(3) * math.pi / 2 * 4.0**-bits  # the paper's bounds


def test_codebook_is_of_the_sphere_and_optimal() -> None:
    assert codebook(128, 1)[1] == pytest.approx(math.sqrt(2 / (math.pi * 128)), rel=0.01)
    assert (codebook(4096, 2)[2:] * 64).tolist() == pytest.approx([0.453, 1.510], abs=2e-3)
    # d = 3: a coordinate is uniform on [-1, 1], so cells are equal.
    np.testing.assert_allclose(codebook(3, 2), [-0.75, -0.25, 0.25, 0.75], atol=1e-4)


@pytest.mark.parametrize("size", [8, 64, 24, 80, 7])
def test_rotation_is_orthogonal_and_keyed(size: int) -> None:
    matrix = rotation(size, 3)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-5)
    assert not torch.equal(matrix, rotation(size, 4)) and torch.equal(matrix, rotation(size, 3))


@given(st.data(), st.sampled_from([1, 2, 3, 4]), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_what_was_packed_is_unpacked(data: st.DataObject, bits: int, groups: int) -> None:
    size = 8 * groups
    codes = torch.tensor(
        data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=2 * size, max_size=2 * size)), dtype=torch.uint8
    ).view(2, size)
    packed = pack(codes, bits)
    assert packed.shape == (2, size * bits // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack_centroids(packed, size, bits), dequantise(codes, size, bits))


@pytest.mark.parametrize(("bits", "target"), [(3.0, 52), (3.5, 60), (4.0, 68)])
def test_bytes_of_a_vector(bits: float, target: int) -> None:
    x = units(12, 128).view(2, 6, 128)
    codec = make_codec(128, bits, energy=x.square().mean(dim=1))
    records = codec.encode(x)
    assert records.shape == (2, 6, codec.record) and records.dtype == torch.uint8
    assert records.untyped_storage().nbytes() == 12 * codec.record
    assert codec.record == pytest.approx(target, rel=0.05)


@pytest.mark.parametrize("bits", [2.0, 3.0, 3.5, 4.0])
@pytest.mark.parametrize("size", [64, 48])
def test_codec_round_trip(bits: float, size: int) -> None:
    """Norms are kept to rounding, inner products agree with the turned ones, rows are independent of one another."""
    x = 300.0 * torch.randn((2, 40, size), generator=torch.Generator().manual_seed(1))
    x[:, 3] = 0.0
    codec = make_codec(size, bits, energy=x.square().mean(dim=1))
    records = codec.encode(x)
    decoded = codec.decode(records)
    assert torch.isfinite(decoded).all() and not decoded[:, 3].any()
    assert torch.allclose(decoded.norm(dim=-1), x.norm(dim=-1), rtol=3e-3)
    query = torch.randn(2, 1, size)
    straight = query @ decoded.transpose(-1, -2)
    turned = codec.turn(query) @ codec.decode_turned(records).transpose(-1, -2)
    assert torch.allclose(straight, turned, rtol=1e-3, atol=0.5)
    assert torch.equal(codec.encode(x[:, 5:9]), records[:, 5:9])
    error = (decoded - x).square().sum() / x.square().sum()
    assert error < {2.0: 0.14, 3.0: 0.041, 3.5: 0.028, 4.0: 0.012}[bits]


def test_half_bits_choose_the_strong_channels_before_the_rotation() -> None:
    """Outliers in a quarter of the channels: they get the four bits, whichever they are, in each head its own."""
    x = torch.randn((2, 500, 64), generator=torch.Generator().manual_seed(0))
    x[0, :, 5:21] *= 8.0
    x[1, :, 40:56] *= 8.0
    codec = make_codec(64, 3.5, energy=x.square().mean(dim=1))
    decoded = codec.decode(codec.encode(x))
    error = (decoded - x).square().sum() / x.square().sum()
    blind = make_codec(64, 3.0)
    assert error < 0.4 * (blind.decode(blind.encode(x)) - x).square().sum() / x.square().sum()


def test_residual_makes_inner_products_unbiased() -> None:
    """Two bits alone shrink them by the distortion (.116); with the signs of the residual their mean is right. Three bits
    without signs take as much room and vary far less: why the cache leaves the signs out."""
    size, query = 128, units(1, 128, 5)[0]
    x = 0.6 * query + 0.8 * units(1, 128, 6)[0]
    alone, corrected, three_bits = [], [], []
    for seed in range(400):
        matrix = rotation(size, seed)
        codes, norms = quantise(x @ matrix.T, 2)
        decoded = (norms * dequantise(codes, size, 2)) @ matrix
        codes, norms = quantise(x @ matrix.T, 3)
        three_bits.append((query @ ((norms * dequantise(codes, size, 3)) @ matrix)).item())
        sketch = torch.randn((size, size), generator=torch.Generator().manual_seed(seed))
        signs, left = residual_signs(x - decoded, sketch)
        product = (query @ decoded).item()
        alone.append(product)
        corrected.append(product + residual_product(query, signs, left, sketch).item())
    truth = (query @ x).item()
    error = np.std(corrected) / math.sqrt(len(corrected))
    assert abs(np.mean(corrected) - truth) < 4 * error
    assert np.mean(alone) / truth == pytest.approx(1 - 0.116, abs=0.02)
    assert np.std(corrected) > 1.7 * np.std(three_bits)


@pytest.mark.parametrize(("size", "bits"), [(64, 5.0), (60, 4.0), (24, 3.5), (64, 3.5)])
def test_what_cannot_be_coded_is_said(size: int, bits: float) -> None:
    with pytest.raises(ValueError, match="bits"):
        make_codec(size, bits)
