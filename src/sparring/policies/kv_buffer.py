"""A key-value cache in buffers made once: a decoding step copies one token's keys and values, not all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class BufferLayer(DynamicLayer):
    """One layer's keys and values, each (rows, key-value heads, columns, head size), filled from the left."""

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it without types
        self.key_buffer, self.value_buffer, self.length = keys, values, length
        self.device, self.is_initialized = keys.device, True
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns all filled ones as views."""
        end = self.length + key_states.shape[-2]
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        self.keys, self.values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Filled columns."""
        return self.length


class KeyValueBuffer(Cache):
    """All layers' buffers. Prompt columns are filled from prefilled chunks, right-aligned; decoding appends."""

    def __init__(self, layers: Sequence[BufferLayer]) -> None:
        super().__init__(layers=list(layers))
        self.buffers = list(layers)

    @classmethod
    def like(cls, cache: Any, *, rows: int, columns: int, extra: int) -> KeyValueBuffer:
        """Empty buffers with the shapes of ``cache``: ``columns`` filled (with zeros so far) and ``extra`` to come.

        Zeros, not garbage: a masked column still enters the sums, with weight 0.
        """
        layers = []
        for layer in cache.layers:
            shape = (rows, layer.keys.shape[1], columns + extra, layer.keys.shape[3])
            value_shape = (*shape[:3], layer.values.shape[3])
            layers.append(BufferLayer(layer.keys.new_zeros(shape), layer.values.new_zeros(value_shape), columns))
        return cls(layers)

    def fill(self, rows: slice, source: Any, source_rows: Tensor) -> None:
        """Copy prefilled prompts into ``rows``, right-aligned in the filled columns; ``source_rows`` may repeat."""
        for layer, other in zip(self.buffers, source.layers, strict=True):
            width = other.keys.shape[2]
            start = layer.length - width
            layer.key_buffer[rows, :, start : layer.length] = other.keys.index_select(0, source_rows)
            layer.value_buffer[rows, :, start : layer.length] = other.values.index_select(0, source_rows)

    def select(self, rows: Tensor, *, drop_columns: int) -> None:
        """Keep these rows only, and drop columns on the left that are padding in all of them."""
        for layer in self.buffers:
            layer.key_buffer = layer.key_buffer[:, :, drop_columns:].index_select(0, rows)
            layer.value_buffer = layer.value_buffer[:, :, drop_columns:].index_select(0, rows)
            layer.length -= drop_columns
            layer.keys, layer.values = (
                layer.key_buffer[:, :, : layer.length],
                layer.value_buffer[:, :, : layer.length],
            )


class HeldColumns(Protocol):
    """One layer's keys and values, kept in some form of its own."""

    length: int
    """Columns so far."""

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One step's columns (rows, key-value heads, n, head size); returns all of them so far."""
        ...

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, which may repeat."""
        ...


class HeldLayer(DynamicLayer):
    """A layer of transformers' cache over columns that are held elsewhere."""

    def __init__(self, held: HeldColumns) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it without types
        self.held, self.is_initialized = held, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns all of them."""
        return self.held.append(key_states, value_states)

    def get_seq_length(self) -> int:
        """Filled columns."""
        return self.held.length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with these rows, which may repeat."""
        self.held.select(indices)


def held_cache(cache: Any, hold: Callable[[Tensor, Tensor], HeldColumns]) -> Any:
    """The same cache, in which ``hold`` has taken over the layers that see their whole past; others stay as they are."""
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            cache.layers[number] = HeldLayer(hold(layer.keys, layer.values))
    return cache


def new_cache(config: Any) -> DynamicCache:
    """An empty cache with the kind of layer that the model's configuration asks for."""
    return DynamicCache(config=config)


def is_plain(cache: Any) -> bool:
    """True when every layer attends to its whole past: then buffers may replace it."""
    return bool(cache.layers) and all(type(layer) is DynamicLayer for layer in cache.layers)


def bytes_per_token(cache: Any) -> int:
    """Bytes that one position of one row takes over all layers of a filled cache."""
    total = 0
    for layer in cache.layers:
        for states in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(states, torch.Tensor) and states.ndim == 4:
                total += states.shape[1] * states.shape[3] * states.element_size()
    return total
