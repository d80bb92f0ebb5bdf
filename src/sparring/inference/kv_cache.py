"""Keys and values coded in a few bits: the newest positions in full, older ones as records, written once.

``CodedRows`` stands for ``tree_attention.FullRows`` where rows share beginnings: shared segments are coded once for all
rows below them, and attention runs in the space of the codes (the query is turned, not the keys). ``CodedColumns`` serves
models that cannot take trees: a layer of transformers' own cache, decoded whole in each step. Layers with a sliding
window keep their own.

A row's position is coded when more than ``window`` newer ones stand after it, at the steps whose number is a multiple of
``LEAVE_TOGETHER``; that depends on the row alone, so a reply does not depend on its company (but for 3.5 bits, whose strong
channels are chosen over the prompts that were prefilled together). Prompts are prefilled in full, and coded afterwards. What
is sampled, and its log-probs, are of the coded model: the learner's importance ratios know the difference.

On a GPU under vLLM, vLLM's own types of cache (fp8, and TurboQuant's presets) are the way; this is for the in-process sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparring.errors import ConfigError
from sparring.inference.quantiser import Codec, make_codec
from sparring.policies.tree_attention import NodeStore, Span, add_spans, kept_mask, score_spans
from sparring.types import KeyValueSettings

LEAVE_TOGETHER = 8
"""Steps between two writings of codes: writing costs a call a layer, whatever it writes."""


def check_head_size(size: int, settings: KeyValueSettings) -> None:
    """Raise ConfigError when heads of this size cannot be coded so."""
    for name, bits in (("kv.key_bits", settings.key_bits), ("kv.value_bits", settings.value_bits)):
        unit = 16 if bits == 3.5 else 8
        if bits is not None and size % unit:
            raise ConfigError(
                f"{name} is {bits:g}, but the model's heads have {size} numbers, not a multiple of {unit}"
            )


def record_bytes(size: int, settings: KeyValueSettings) -> int:
    """Bytes of one key and one value of a head."""
    energy = torch.ones(1, size)
    return sum(
        make_codec(size, bits, energy=energy).record
        for bits in (settings.key_bits, settings.value_bits)
        if bits is not None
    )


def _codec(vectors: Tensor, bits: float | None) -> Codec:
    """For these vectors (..., heads, n, d), whose channels tell which are strong (half bits only)."""
    assert bits is not None  # config checks that both are set
    kept = vectors.float().square().mean(dim=-2)
    energy = kept.flatten(0, -3).mean(dim=0) if kept.ndim > 2 else kept
    codec = make_codec(vectors.shape[-1], bits, energy=energy)
    return replace(codec, transform=codec.transform.to(vectors.device))


@dataclass(kw_only=True, slots=True)
class Coded:
    """Keys, or values, of one layer."""

    codec: Codec
    shared: Tensor
    """Records of shared segments' nodes, uint8 (heads, nodes, record)."""
    own: Tensor
    """Records of what is each row's own, uint8 (rows, heads, columns and those to come, record)."""
    recent: Tensor
    """Not yet coded, fp32 (rows, heads, window + LEAVE_TOGETHER, d), filled from the left."""

    @property
    def bytes(self) -> int:
        return self.shared.nbytes + self.own.nbytes + self.recent.nbytes

    def leave(self, coded: int, count: int, held: int) -> None:
        """Code the oldest ``count`` of ``held`` recent columns, as own columns from ``coded`` on."""
        self.own[:, :, coded : coded + count] = self.codec.encode(self.recent[:, :, :count])
        self.recent[:, :, : held - count] = self.recent[:, :, count:held].clone()

    def select(self, rows: Tensor, drop_coded: int, drop_recent: int) -> None:
        self.own = self.own[:, :, drop_coded:].index_select(0, rows)
        recent = self.recent.index_select(0, rows)
        self.recent = recent.roll(-drop_recent, dims=2) if drop_recent else recent


class CodedRows:
    """Rows decoded over coded keys and values; a ``DecodingRows``. Own columns: codes, then recent ones.

    Attributes:
        spans: Shared segments, whose nodes are counted within ``Coded.shared``.
        coded: Own columns that are coded.
        length: Own columns in all.
    """

    def __init__(
        self, store: NodeStore, spans: Sequence[Span], shared: int, index: Tensor, mask: Tensor, *, new_tokens: int,
        settings: KeyValueSettings,
    ) -> None:  # fmt: skip
        """``index`` int64 (R, width) names the nodes that are each row's own, right-aligned; the store is emptied."""
        self.shared, self.mask, self.window = shared, mask, settings.window
        rows, width = index.shape
        self.length, self.coded, self._steps = width, max(0, width - settings.window), 0
        self.spans, nodes, first = list[Span](), list[Tensor](), 0
        for span in spans:
            nodes.append(torch.arange(span.first_node, span.first_node + span.length, device=index.device))
            self.spans.append(replace(span, first_node=first))
            first += span.length
        chosen = torch.cat(nodes) if nodes else index.new_zeros(0)
        room = self.coded + new_tokens // LEAVE_TOGETHER * LEAVE_TOGETHER

        def coded(table: Tensor, bits: float | None) -> Coded:
            codec = _codec(table, bits)
            records = codec.encode(table)
            heads, _, size = table.shape
            own = records.new_zeros((rows, heads, room, codec.record))
            flat = index[:, : self.coded].reshape(-1)
            own[:, :, : self.coded] = records.index_select(1, flat).view(heads, rows, -1, codec.record).transpose(0, 1)
            recent = torch.zeros((rows, heads, self.window + LEAVE_TOGETHER, size), device=table.device)
            flat = index[:, self.coded :].reshape(-1)
            newest = table.index_select(1, flat).view(heads, rows, -1, size).transpose(0, 1)
            recent[:, :, : width - self.coded] = newest
            return Coded(codec=codec, shared=records.index_select(1, chosen), own=own, recent=recent)

        self.keys: dict[int, Coded] = {}
        self.values: dict[int, Coded] = {}
        for layer in list(store.keys):  # a layer's full vectors go as its codes come
            self.keys[layer] = coded(store.keys.pop(layer), settings.key_bits)
            self.values[layer] = coded(store.values.pop(layer), settings.value_bits)

    @property
    def bytes(self) -> int:
        """Allocated for keys and values."""
        return sum(held.bytes for table in (self.keys, self.values) for held in table.values())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One softmax over shared, coded and recent columns; see ``tree_attention.DecodingRows``."""
        with torch.autocast(query.device.type, enabled=False):
            keys, values = self.keys[layer], self.values[layer]
            held, coded = self.length - self.coded, self.coded
            keys.recent[:, :, held : held + 1], values.recent[:, :, held : held + 1] = key, value
            count, heads, _, size = query.shape
            groups, end, own = key.shape[1], self.length + 1, self.shared + coded
            queries = (query.float() * scale).view(count, groups, heads // groups, size)
            turned = keys.codec.turn(queries)
            scores = queries.new_zeros((count, groups, heads // groups, self.shared + end))
            scores[..., own:] = queries @ keys.recent[:, :, : held + 1].transpose(-1, -2)
            if coded:
                decoded = keys.codec.decode_turned(keys.own[:, :, :coded])
                scores[..., self.shared : own] = turned @ decoded.transpose(-1, -2)
            if self.spans:
                score_spans(scores, turned, self.spans, keys.codec.decode_turned(keys.shared))
            shares = (scores + self.mask[..., : self.shared + end]).softmax(dim=-1)
            found = torch.zeros_like(queries)
            if coded:
                found += shares[..., self.shared : own] @ values.codec.decode_turned(values.own[:, :, :coded])
            if self.spans:
                add_spans(found, shares, self.spans, values.codec.decode_turned(values.shared))
            found = values.codec.turn_back(found) + shares[..., own:] @ values.recent[:, :, : held + 1]
        return found.reshape(count, 1, heads, size).to(query.dtype)

    def advance(self) -> None:
        """One more column; at every eighth step what has left the window is coded."""
        self.length, self._steps = self.length + 1, self._steps + 1
        held = self.length - self.coded
        if self._steps % LEAVE_TOGETHER == 0 and held > self.window:
            for table in (self.keys, self.values):
                for layer in table.values():
                    layer.leave(self.coded, held - self.window, held)
            self.coded = self.length - self.window

    def keep(self, rows: Tensor, spans: list[Span], drop: int) -> None:
        """Rows are chosen among records: nothing is decoded."""
        coded = min(drop, self.coded)
        for table in (self.keys, self.values):
            for layer in table.values():
                layer.select(rows, coded, drop - coded)
        self.mask = kept_mask(self.mask, rows, self.shared, drop)
        self.spans, self.coded, self.length = spans, self.coded - coded, self.length - drop


def before_window(spans: Sequence[Span], row_lengths: Sequence[int], window: int) -> list[Span]:
    """Spans cut where the first of their rows' windows begins, so that every row's newest positions are its own."""
    found = []
    for span in spans:
        end = min(row_lengths[span.start : span.stop]) - window
        length = min(span.length, end - span.column)
        if length > 0:
            found.append(replace(span, length=length))
    return found


class CodedColumns:
    """One layer of transformers' own cache, for models that take no trees; a ``HeldColumns``."""

    def __init__(self, keys: Tensor, values: Tensor, settings: KeyValueSettings) -> None:
        """The prefilled keys and values, each (rows, heads, columns, d)."""
        self.window, self.length, self._steps = settings.window, keys.shape[2], 0
        cut = max(0, self.length - self.window)
        self.codecs = (_codec(keys, settings.key_bits), _codec(values, settings.value_bits))
        self.records = [c.encode(x[:, :, :cut]) for c, x in zip(self.codecs, (keys, values), strict=True)]
        self.recent = [x[:, :, cut:].clone() for x in (keys, values)]

    @property
    def bytes(self) -> int:
        """Allocated for keys and values."""
        return sum(tensor.nbytes for tensor in (*self.records, *self.recent))

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See ``HeldColumns``; what left the window at the step before is coded first."""
        if self._steps % LEAVE_TOGETHER == 0 and self.recent[0].shape[2] > self.window:
            leave = self.recent[0].shape[2] - self.window
            for side, codec in enumerate(self.codecs):
                fresh = codec.encode(self.recent[side][:, :, :leave])
                self.records[side] = torch.cat([self.records[side], fresh], dim=2)
                self.recent[side] = self.recent[side][:, :, leave:].clone()
        self._steps, self.length = self._steps + 1, self.length + keys.shape[2]
        whole = []
        for side, (codec, new) in enumerate(zip(self.codecs, (keys, values), strict=True)):
            self.recent[side] = torch.cat([self.recent[side], new], dim=2)
            whole.append(torch.cat([codec.decode(self.records[side]).to(new.dtype), self.recent[side]], dim=2))
        return whole[0], whole[1]

    def select(self, rows: Tensor) -> None:
        """Rows are chosen, or repeated, among records: nothing is decoded."""
        self.records = [records.index_select(0, rows) for records in self.records]
        self.recent = [recent.index_select(0, rows) for recent in self.recent]
