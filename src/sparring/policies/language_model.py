"""A Hugging Face causal language model as one set of weights: forward passes, log-probs at wanted positions, adapters.

Views of it (:class:`sparring.policies.causal_lm.CausalLM`) are what learns and replies; several views, with an adapter
each, may share one of these. Nothing here looks at a token's value to tell padding from text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparring.errors import ConfigError
from sparring.policies import tree_attention
from sparring.policies.contract import ScoreRow
from sparring.policies.distribution import token_log_probs
from sparring.policies.kv_buffer import new_cache
from sparring.policies.loading import cache_argument, head_is_plain
from sparring.tokens.prefix_tree import distinct_prefixes, merge, packs

_LOGIT_CHUNK_BYTES = 64 * 1024**2
WORTH_A_TREE = 0.9
"""Rows go through a tree where its nodes are at most this share of their tokens."""


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped so that padded tokens (rows x longest) stay within the budget, similar lengths together.

    A row longer than the budget stands alone.

    >>> micro_batches([5, 2, 3], 6)
    [[1, 2], [0]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _by_length(heads: Sequence[tuple[int, ...]], budget: int) -> list[list[int]]:
    return micro_batches([len(head) for head in heads], budget)


class LanguageModel:
    """Weights on a device, with the adapters that share them.

    Attributes:
        model: The transformers model. With adapters, its linear layers are PEFT's.
        device: Where it is.
        micro_batch_tokens: Token positions, padding included, of one forward pass of :meth:`log_probs`.
        plain_head: Logits are the output layer on the hidden states, so it runs at wanted positions only.
        rows_because: Why :meth:`log_probs` goes row by row, for people; None where it computes each distinct prefix once.
    """

    def __init__(
        self, model: Any, *, micro_batch_tokens: int = 8192, gradient_checkpointing: bool = False, pad_id: int = 0
    ) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.micro_batch_tokens = micro_batch_tokens
        self.pad_id = pad_id
        self.plain_head = head_is_plain(model)
        self._cache_argument = cache_argument(model)
        self.rows_because = self._prepare_trees()
        self._peft: Any = None
        self._adapters: dict[str, bool] = {}
        self._active: str | None = None
        self._layers: list[Any] | None = None
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            options = {"use_reentrant": False, "context_fn": self._recompute_contexts}
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable(options)

    # Sizes

    @property
    def config(self) -> Any:
        """The text model's transformers configuration."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens, or None where the configuration does not tell."""
        value = getattr(self.config, "max_position_embeddings", None)
        return int(value) if value else None

    @property
    def head_size(self) -> int:
        """Numbers in the key, or value, of one head."""
        named = getattr(self.config, "head_dim", None)
        return int(named or self.config.hidden_size // self.config.num_attention_heads)

    @property
    def vectors_per_position(self) -> int:
        """Keys of one position, over all layers and heads; as many values."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        return int(self.config.num_hidden_layers * heads)

    @property
    def bytes_per_position(self) -> int:
        """Bytes of the keys and values of one position, over all layers, where every layer attends to all of them."""
        return 2 * self.vectors_per_position * self.head_size * (2 if self.device.type == "cuda" else 4)

    @property
    def uses_sdpa(self) -> bool:
        """Attention runs through torch's scaled dot product, which takes a ready mask."""
        return str(self.model.config._attn_implementation) in ("sdpa", tree_attention.NAME)

    def _prepare_trees(self) -> str | None:
        """Attention that takes trees, if a trial gives the same as row by row; else the reason why not."""
        if not self.plain_head:
            return "its output layer is not all that follows its hidden states"
        reason = tree_attention.why_not(self.model)
        if reason is not None:
            return reason
        vocabulary = int(self.config.vocab_size)
        rows = [tuple(token % vocabulary for token in row) for row in ((1, 2, 3, 4, 5), (1, 2, 6, 7), (1, 2, 6, 8, 9))]
        tree = merge(rows)
        try:
            self.model.set_attn_implementation(tree_attention.NAME)
            with torch.no_grad():
                together = self.tree_hidden(tree_attention.learner_plan(tree, self.device))
                for number, row in enumerate(rows):
                    alone = self.hidden(torch.tensor([row], device=self.device))[0]
                    if not torch.allclose(alone, together[tree.nodes(number)], rtol=1e-3, atol=1e-3):
                        self.model.set_attn_implementation("sdpa")
                        return "a trial gave other numbers than row by row"
        except (TypeError, ValueError, RuntimeError) as error:
            self.model.set_attn_implementation("sdpa")
            return f"its code takes no trees ({type(error).__name__}: {str(error)[:80]})"
        return None

    def positions(self, rows: Sequence[ScoreRow]) -> int:
        """Token positions that :meth:`log_probs` runs forward for these rows, padding left out."""
        heads = [row.token_ids[: row.positions[-1]] for row in rows if row.positions]
        if not self._shares(heads):
            return sum(len(head) for head in heads)
        cut = packs(heads, self.micro_batch_tokens)
        return sum(distinct_prefixes([heads[index] for index in pack]) for pack in cut)

    def _shares(self, heads: Sequence[tuple[int, ...]]) -> bool:
        """Whether a tree of these beginnings of rows is worth it."""
        return self.rows_because is None and distinct_prefixes(heads) <= WORTH_A_TREE * sum(map(len, heads))

    # Forward passes

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 on a GPU; on a CPU everything stays fp32."""
        if self.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()

    def hidden(
        self, ids: Tensor, *, mask: Tensor | None = None, positions: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Last hidden states, or logits where the head is not plain.

        Args:
            ids: int64 (N, T).
            mask: None (causal), int64 (N, past + T) with 0 on padding, or a ready mask (N, 1, T, past + T).
            positions: int64 (N, T); None counts from 0.
            cache: A transformers cache, filled in passing, or None.

        Returns:
            (N, T, H), or (N, T, V) where ``plain_head`` is False.
        """
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": cache is not None,
        }
        if cache is not None:
            arguments[self._cache_argument] = cache
        with self.autocast():
            if self.plain_head:
                states: Tensor = self.model.base_model(**arguments).last_hidden_state
            else:
                states = self.model(**arguments).logits
        return states

    def tree_hidden(self, tree: tree_attention.TreePlan) -> Tensor:
        """Last hidden states of a tree's nodes, (N, H)."""
        ready = torch.zeros((1, 1, 1, 1), device=self.device)  # four dimensions: transformers makes no mask of its own
        with self.autocast():
            states: Tensor = self.model.base_model(
                input_ids=tree.token_ids, attention_mask=ready, position_ids=tree.positions, use_cache=False, tree=tree
            ).last_hidden_state
        return states[0]

    def rows_hidden(self, ids: Tensor, positions: Tensor, rows: tree_attention.DecodingRows) -> Tensor:
        """Last hidden states (R, H) of one more token a row, ids and positions (R,); its keys and values are kept."""
        ready = torch.zeros((1, 1, 1, 1), device=self.device)
        with self.autocast():
            states: Tensor = self.model.base_model(
                input_ids=ids.unsqueeze(-1), attention_mask=ready, position_ids=positions.unsqueeze(-1),
                use_cache=False, rows=rows,
            ).last_hidden_state  # fmt: skip
        rows.advance()
        return states[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits (N, V) of hidden states (N, H) from :meth:`hidden`; the head runs in fp32 also on a GPU."""
        if not self.plain_head:
            return hidden.float()
        out: Tensor = self.model.get_output_embeddings()(hidden.float())
        return out

    def new_cache(self) -> Any:
        """An empty key-value cache of the model's kind."""
        return new_cache(self.model.config)

    def log_probs(self, rows: Sequence[ScoreRow], *, temperature: float, top_p: float) -> Tensor:
        """See :meth:`sparring.policies.contract.TrainablePolicy.log_probs`.

        Rows that share beginnings are merged into trees of at most ``micro_batch_tokens`` nodes, and each distinct
        prefix is computed once a tree. Where nothing is shared, or the model cannot (``rows_because``), rows of similar
        length are padded on the right and need no mask: causal attention never looks at what comes after. Nothing after
        a row's last wanted position is forwarded.

        Raises:
            ValueError: Positions are not ascending, or outside 1 to T - 1.
        """
        starts, total = [], 0
        for number, row in enumerate(rows):
            ordered = all(a < b for a, b in zip(row.positions, row.positions[1:], strict=False))
            if row.positions and not (ordered and row.positions[0] >= 1 and row.positions[-1] < len(row.token_ids)):
                raise ValueError(f"row {number}: positions must ascend within 1 to {len(row.token_ids) - 1}")
            starts.append(total)
            total += len(row.positions)
        wanted = [number for number, row in enumerate(rows) if row.positions]
        if not wanted:
            return torch.zeros(0, device=self.device)
        heads = [rows[number].token_ids[: rows[number].positions[-1]] for number in wanted]
        shares = self._shares(heads)
        cut = packs if shares else _by_length
        parts: list[Tensor] = []
        places: list[int] = []
        for group in cut(heads, self.micro_batch_tokens):
            members = [wanted[index] for index in group]
            parts.append(self._group_log_probs([rows[n] for n in members], temperature, top_p, tree=shares))
            places.extend(starts[n] + k for n in members for k in range(len(rows[n].positions)))
        back = torch.empty(total, dtype=torch.int64)
        back[torch.tensor(places)] = torch.arange(total)
        return torch.cat(parts)[back.to(self.device)]

    def _group_log_probs(self, rows: Sequence[ScoreRow], temperature: float, top_p: float, *, tree: bool) -> Tensor:
        targets = torch.tensor([row.token_ids[p] for row in rows for p in row.positions]).to(self.device)
        checkpointing = self.gradient_checkpointing and torch.is_grad_enabled()
        self.model.train(checkpointing)  # transformers checkpoints in training mode only; there is no dropout to wake
        try:
            picked = self._tree_states(rows) if tree else self._row_states(rows)
        finally:
            self.model.eval()

        def score(states: Tensor, wanted: Tensor) -> Tensor:
            return token_log_probs(self.logits(states), wanted, temperature, top_p)

        size = max(1, _LOGIT_CHUNK_BYTES // (4 * int(self.config.vocab_size)))
        if len(picked) <= size:
            return score(picked, targets)
        pieces = []
        for states, wanted in zip(picked.split(size), targets.split(size), strict=True):
            if torch.is_grad_enabled():
                piece: Any = checkpoint(score, states, wanted, use_reentrant=False)
                pieces.append(piece)
            else:
                pieces.append(score(states, wanted))
        return torch.cat(pieces)

    def _tree_states(self, rows: Sequence[ScoreRow]) -> Tensor:
        """Hidden states that predict the wanted positions, (K, H): one forward pass over the rows' tree."""
        tree = merge([row.token_ids[: row.positions[-1]] for row in rows])
        states = self.tree_hidden(tree_attention.learner_plan(tree, self.device))
        wanted = [tree.nodes(number)[[p - 1 for p in row.positions]] for number, row in enumerate(rows)]
        return states[torch.from_numpy(np.concatenate(wanted)).to(self.device)]

    def _row_states(self, rows: Sequence[ScoreRow]) -> Tensor:
        """The same, row by row and padded."""
        width = max(row.positions[-1] for row in rows)
        ids = torch.full((len(rows), width), self.pad_id, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : row.positions[-1]] = torch.tensor(row.token_ids[: row.positions[-1]])
        row_index = torch.tensor([n for n, row in enumerate(rows) for _ in row.positions])
        column_index = torch.tensor([p - 1 for row in rows for p in row.positions])
        return self.hidden(ids.to(self.device))[row_index.to(self.device), column_index.to(self.device)]

    # Adapters

    def add_adapter(self, name: str, lora_config: Any, *, trainable: bool = True) -> None:
        """Add a LoRA adapter; it starts as the base model (its B matrices are 0).

        Raises:
            ConfigError: The name is taken or cannot name an adapter.
        """
        if name in self._adapters:
            raise ConfigError(f"there is already an adapter {name!r}")
        if not name.replace("_", "").replace("-", "").isalnum() or name in "lora_":
            raise ConfigError(f"{name!r} cannot name an adapter: use letters, digits, '_' and '-', and not 'lora'")
        if self._peft is None:
            from peft import get_peft_model

            for parameter in self.model.parameters():
                parameter.requires_grad_(False)
            self._peft = get_peft_model(self.model, lora_config, adapter_name=name)
            self._active = name
        else:
            self._peft.add_adapter(name, lora_config)
        self._adapters[name] = trainable
        self._layers = None
        if any(self._adapters.values()):
            self._restore_gradients()
        else:
            self._restore_gradients(name)
            self._tell_layers(self._active)  # whatever adding has made of them

    def remove_adapter(self, name: str) -> None:
        """Take an adapter off the model and free its numbers.

        Raises:
            ConfigError: There is none of this name.
        """
        if name not in self._adapters:
            raise ConfigError(f"there is no adapter {name!r}")
        if self._active == name:
            self._switch(None)
        del self._adapters[name]
        self._peft.delete_adapter(name)
        if not any(self._adapters.values()):
            self._tell_layers(self._active)  # PEFT puts another in the place of the one that it thinks was in use

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, in the order they were added."""
        return tuple(self._adapters)

    @property
    def active(self) -> str | None:
        """The adapter in use; None is the base model."""
        return self._active

    @property
    def peft(self) -> Any:
        """PEFT's wrapper, or None without adapters."""
        return self._peft

    def adapter_parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """An adapter's parameters by PEFT's file names, in which the adapter's own name does not occur."""
        marker = f".{name}."
        found = {}
        for key, parameter in self._peft.named_parameters():
            if marker in key and "lora_" in key:
                found[key.replace(marker, ".")] = parameter
        return found

    @contextmanager
    def activated(self, name: str | None) -> Iterator[None]:
        """Use this adapter (None: the base model) within the block."""
        before = self._active
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before if before in self._adapters else None)  # it may have been removed meanwhile

    def _switch(self, name: str | None) -> None:
        if self._peft is None or name == self._active:
            return
        if not any(self._adapters.values()):
            # All are frozen (a server's): which one is in use is all that changes, so the layers are told, and PEFT's
            # walk over every parameter of the model, longer than a small model's forward pass, is left out.
            self._tell_layers(name)
            self._active = name
            return
        if name is None:
            self._peft.base_model.disable_adapter_layers()
        else:
            if self._active is None:
                self._peft.base_model.enable_adapter_layers()
            self._peft.set_adapter(name)
        self._active = name
        self._restore_gradients()

    def _tell_layers(self, name: str | None) -> None:
        for layer in self._adapted_layers():
            layer._disable_adapters = name is None
            if name is not None:
                layer._active_adapter = name

    def _adapted_layers(self) -> list[Any]:
        """PEFT's layers; found again when an adapter was added, which may adapt others."""
        if self._layers is None:
            from peft.tuners.tuners_utils import BaseTunerLayer

            self._layers = [module for module in self._peft.modules() if isinstance(module, BaseTunerLayer)]
        return self._layers

    def _restore_gradients(self, only: str | None = None) -> None:
        """PEFT lets only the active adapter require gradients, and a backward pass that is still to come for another
        would silently find none; so that is set right after each switch (for ``only`` one where none of them learns)."""
        for name, trainable in self._adapters.items():
            if only in (None, name):
                for parameter in self.adapter_parameters(name).values():
                    parameter.requires_grad_(trainable)

    def _recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """A checkpointed layer is computed again under the adapter it ran with, whichever is active by then."""
        return nullcontext(), self.activated(self._active)
