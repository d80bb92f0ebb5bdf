"""TurboQuant (arXiv 2504.19874): vectors as a norm and a few bits a coordinate. Pure maths, no cache in here.

A vector x of d numbers is turned by an orthogonal matrix (random signs and Hadamard; QR of a Gaussian for sizes that are
no power of two). Each coordinate of the turned unit vector then follows one known law, density (1 - t^2)^((d - 3) / 2),
so one Lloyd-Max codebook serves them all. Kept are the codes, packed, and one fp32 scale:

    y = T x,   c_i = nearest centroid of y_i / |x|,   s = |x| / |c|,   x' = s T^t c

``s`` (norm correction) gives x' the length of x; without it (s = |x|) decoded vectors are shorter and attention flatter. Inner
products need no turning back: <q, x'> = s <T q, c>.

Half bits: the channels with the most energy, chosen *before* the rotation, form a part of their own with a bit more; each
part has its own rotation, codebook and scale. 3.5 bits is half of the channels at 4 and half at 3. The second scale is kept as
bfloat16 (the range of fp32, error 2^-9, a fiftieth of that of the codes).

The residual of the paper's inner-product version (a bit more a coordinate, QJL) is in here too, since it is unbiased; the cache
does not use it: its variance goes through softmax, which is not linear, and makes things worse than the bias does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

BITS = (2.0, 3.0, 3.5, 4.0)
"""What the cache takes; codebooks exist for 1 to 4."""
_GRID = 200_001
_SWEEPS = 20_000


# ------------------------------------------------------------------------------------------------------- pure functions


@lru_cache
def codebook(size: int, bits: int) -> NDArray[np.float64]:
    """The 2^bits centroids, ascending, that least distort a coordinate of a uniformly random unit vector of ``size`` numbers.

    Lloyd-Max on a grid: boundaries half-way between centroids, centroids the means between boundaries, until neither moves.

    >>> codebook(128, 1).round(4).tolist()  # +- sqrt(2 / (pi d)), nearly
    [-0.0704, 0.0704]
    """
    reach = min(1.0, 12.0 / math.sqrt(size))  # what lies beyond weighs less than 1e-30
    t = np.linspace(-reach, reach, _GRID)
    inside = np.maximum(1.0 - t * t, 1e-300)
    density = np.exp(0.5 * (size - 3) * np.log(inside))
    mass = np.concatenate([[0.0], np.cumsum(density)])
    moment = np.concatenate([[0.0], np.cumsum(density * t)])
    levels = 2**bits
    edges = np.searchsorted(mass, mass[-1] * np.arange(1, levels) / levels)
    centroids = np.zeros(levels)
    for _ in range(_SWEEPS):
        cuts = np.concatenate([[0], edges, [_GRID]])
        found = np.diff(moment[cuts]) / np.diff(mass[cuts])
        found = 0.5 * (found - found[::-1])  # the law is symmetric
        if np.abs(found - centroids).max() < 1e-12:
            break
        centroids = found
        edges = np.searchsorted(t, 0.5 * (centroids[1:] + centroids[:-1]))
    return centroids


@lru_cache
def rotation(size: int, seed: int) -> Tensor:
    """An orthogonal matrix, fp32 (size, size): Hadamard times random signs where the size is a power of two, else QR.

    >>> matrix = rotation(8, 0)
    >>> torch.allclose(matrix @ matrix.T, torch.eye(8), atol=1e-6)
    True
    """
    generator = torch.Generator().manual_seed(seed)
    if size & (size - 1) == 0:
        hadamard = torch.ones(1, 1, dtype=torch.float64)
        while hadamard.shape[0] < size:
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
        signs = 2.0 * torch.randint(0, 2, (size,), generator=generator) - 1.0
        turned: Tensor = (hadamard * signs / math.sqrt(size)).float()
        return turned
    q, r = torch.linalg.qr(torch.randn((size, size), generator=generator, dtype=torch.float64))
    uniform: Tensor = (q * torch.sign(torch.diagonal(r))).float()  # with these signs, over all rotations
    return uniform


def quantise(turned: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and norms of turned vectors: (..., d) to uint8 (..., d) and fp32 (..., 1). A zero vector has norm 0."""
    norms = turned.norm(dim=-1, keepdim=True)
    centroids = _centroids(turned.shape[-1], bits).to(turned.device)
    units = turned / norms.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.bucketize(units, 0.5 * (centroids[1:] + centroids[:-1])).to(torch.uint8), norms


def dequantise(codes: Tensor, size: int, bits: int) -> Tensor:
    """The centroids of codes, before any scale; (..., d) to fp32 (..., d)."""
    return _centroids(size, bits).to(codes.device)[codes.long()]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., n), n a multiple of 8, below 2^bits, to bytes (..., n * bits / 8).

    2 and 4 bits: neighbours in one byte, the first in the low bits. 3 bits: eight codes in three bytes, the same way.

    >>> pack(torch.tensor([1, 2, 0, 0, 0, 0, 0, 15], dtype=torch.uint8), 4).tolist()
    [33, 0, 0, 240]
    """
    groups = codes.view(*codes.shape[:-1], codes.shape[-1] // _GROUP[bits], _GROUP[bits]).to(torch.int32)
    shifts = bits * torch.arange(_GROUP[bits], dtype=torch.int32, device=codes.device)
    words = (groups << shifts).sum(dim=-1, dtype=torch.int32)
    if bits != 3:
        return words.to(torch.uint8)
    return torch.stack([words & 255, (words >> 8) & 255, words >> 16], dim=-1).to(torch.uint8).flatten(-2)


def unpack_centroids(packed: Tensor, size: int, bits: int) -> Tensor:
    """The centroids of packed codes, fp32 (..., n): one look-up for the two or four codes of a byte (3 bits: of 12 bits)."""
    table = _table(size, bits).to(packed.device)
    if bits != 3:
        return embedding(packed.to(torch.int32), table).flatten(-2)
    low, middle, high = packed.view(*packed.shape[:-1], packed.shape[-1] // 3, 3).to(torch.int32).unbind(-1)
    halves = torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=-1)
    return embedding(halves, table).flatten(-3)


def residual_signs(residual: Tensor, sketch: Tensor) -> tuple[Tensor, Tensor]:
    """QJL of what quantisation left over: signs (..., m) of the sketch (m, d) and norms (..., 1)."""
    return torch.sign(residual @ sketch.T), residual.norm(dim=-1, keepdim=True)


def residual_product(query: Tensor, signs: Tensor, norms: Tensor, sketch: Tensor) -> Tensor:
    """Unbiased estimate of <query, residual>, (...): sqrt(pi / 2) / m * norm * <S query, signs>, S Gaussian."""
    factor = math.sqrt(math.pi / 2.0) / sketch.shape[0]
    return factor * norms.squeeze(-1) * ((query @ sketch.T) * signs).sum(dim=-1)


_GROUP = {1: 8, 2: 4, 3: 8, 4: 2}
"""Codes that are packed together."""


@lru_cache
def _centroids(size: int, bits: int) -> Tensor:
    return torch.from_numpy(codebook(size, bits)).float()


@lru_cache
def _table(size: int, bits: int) -> Tensor:
    """Centroids of all codes that a byte (3 bits: 12 bits) may hold, (256 or 4096, codes)."""
    width = 12 if bits == 3 else 8
    words = torch.arange(2**width).unsqueeze(-1)
    codes = (words >> (bits * torch.arange(width // bits))) & (2**bits - 1)
    return _centroids(size, bits)[codes]


# ------------------------------------------------------------------------------------------------------------ the codec


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Turned channels ``start`` to ``stop`` of a vector, quantised by themselves; its codes begin at byte ``offset``."""

    start: int
    stop: int
    bits: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def packed(self) -> int:
        """Bytes of the codes."""
        return self.size * self.bits // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """How the vectors of one layer are coded, keys or values: each into one record of bytes (codes, then scales).

    A record is a row of a uint8 tensor, so rows are repeated, dropped and reordered without unpacking anything.
    """

    transform: Tensor
    """fp32 (heads or 1, d, d), orthogonal: y = transform @ x. Parts' rotations, after the parts' channels were gathered."""
    parts: tuple[Part, ...]
    """One, or two for half bits, the one with more bits first."""

    @property
    def record(self) -> int:
        """Bytes of a vector: 68, 62, 52, 36 at d = 128 and 4, 3.5, 3, 2 bits."""
        return self.parts[-1].offset + self.parts[-1].packed + 4 + 2 * (len(self.parts) - 1)

    def turn(self, x: Tensor) -> Tensor:
        """Queries (..., heads, n, d) into the space of the codes."""
        return x @ self.transform.transpose(-1, -2)

    def turn_back(self, y: Tensor) -> Tensor:
        """From the space of the codes, (..., heads, n, d)."""
        return y @ self.transform

    def encode(self, x: Tensor) -> Tensor:
        """Vectors (..., heads, n, d) to records, uint8 (..., heads, n, record)."""
        turned = self.turn(x.float())
        pieces, scales = [], []
        for number, part in enumerate(self.parts):
            codes, norms = quantise(turned[..., part.start : part.stop], part.bits)
            length = dequantise(codes, part.size, part.bits).norm(dim=-1, keepdim=True)
            scale = norms / length
            pieces.append(pack(codes, part.bits))
            scales.append((scale if number == 0 else scale.to(torch.bfloat16)).contiguous().view(torch.uint8))
        return torch.cat([*pieces, *scales], dim=-1)

    def decode_turned(self, records: Tensor) -> Tensor:
        """Records (..., record) to vectors in the space of the codes, fp32 (..., d)."""
        if not records.numel():
            return records.new_zeros((*records.shape[:-1], self.parts[-1].stop), dtype=torch.float32)
        at = self.parts[-1].offset + self.parts[-1].packed
        found = []
        for number, part in enumerate(self.parts):
            stored, dtype = (4, torch.float32) if number == 0 else (2, torch.bfloat16)
            scale = records[..., at : at + stored].contiguous().view(dtype).float()
            at += stored
            packed = records[..., part.offset : part.offset + part.packed].contiguous()
            found.append(unpack_centroids(packed, part.size, part.bits) * scale)
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def decode(self, records: Tensor) -> Tensor:
        """Records (..., heads, n, record) to vectors (..., heads, n, d)."""
        return self.turn_back(self.decode_turned(records))


def make_codec(size: int, bits: float, *, energy: Tensor | None = None, seed: int = 0) -> Codec:
    """The codec of vectors of ``size`` numbers at 1, 2, 3, 3.5 or 4 bits.

    Args:
        size: A multiple of 8 (half bits: of 16).
        energy: Mean square of each channel, (heads, size); half bits only, which give the stronger half a bit more.

    Raises:
        ValueError: The size or the bits are none of these, or half bits come without ``energy``.
    """
    whole = float(bits).is_integer()
    if bits not in (1.0, *BITS):
        raise ValueError(f"{bits} bits: choose from 1, 2, 3, 3.5 and 4")
    if size % (8 if whole else 16):
        raise ValueError(
            f"vectors of {size} numbers at {bits} bits: the size must be a multiple of {8 if whole else 16}"
        )
    if whole:
        only = Part(start=0, stop=size, bits=int(bits), offset=0)
        return Codec(transform=rotation(size, seed).unsqueeze(0), parts=(only,))
    if energy is None:
        raise ValueError(f"{bits} bits need the energy of each channel, to choose which get a bit more")
    half = size // 2
    strong = Part(start=0, stop=half, bits=math.ceil(bits), offset=0)
    weak = Part(start=half, stop=size, bits=math.floor(bits), offset=strong.packed)
    order = energy.argsort(dim=-1, descending=True, stable=True)
    order = torch.cat([order[:, :half].sort(dim=-1).values, order[:, half:].sort(dim=-1).values], dim=-1)
    turns = torch.block_diag(rotation(half, seed), rotation(half, seed + 1)).to(energy.device)
    gather = torch.eye(size, device=energy.device)[order]  # (heads, size, size): channel order[i] to place i
    return Codec(transform=turns @ gather, parts=(strong, weak))
