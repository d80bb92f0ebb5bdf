"""The sampler in this process: prompts are prefilled, what they share once, and replies decoded together. What they
shared can be kept for the next ones.

Rows come in two kinds with the same three members: ``tree_rows`` where prompts share beginnings, ``padded_rows`` where
they do not or the model cannot. Each row draws from its own random numbers (a counter-based generator
seeded by the request's key), one number a token, so a reply does not depend on which others it is sampled with, apart
from rounding in the matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparring.errors import PromptError
from sparring.inference.kv_cache import check_head_size
from sparring.inference.padded_rows import PaddedRows, Prompt, by_prompt
from sparring.inference.tree_rows import Past, TreeRows
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import Sampler, SampleRequest
from sparring.policies.distribution import effective, log_distribution
from sparring.policies.language_model import WORTH_A_TREE
from sparring.tokens.prefix_tree import distinct_prefixes
from sparring.types import KeyValueSettings, Reply, SamplingSettings

_COMPACT_BELOW = 0.75  # share of rows still running under which finished ones are worth a copy of the cache


@dataclass(slots=True)
class SamplerStatistics:
    """What a sampler did since it was made, or since :meth:`InProcessSampler.reset_statistics`.

    >>> SamplerStatistics(reply_tokens=100, decode_seconds=0.5, prefill_seconds=0.5).tokens_per_second
    100.0
    """

    replies: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt positions that were computed: what prompts share once, padding excluded."""
    reply_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Reply tokens over the whole time, prefill included."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.reply_tokens / seconds if seconds else 0.0


class InProcessSampler:
    """Samples from a policy's present weights. A ``Sampler``.

    Args:
        policy: Whose adapter is used and whose version is stamped on the replies.
        prefill_tokens: Prompt tokens, padding included, of one prefill batch. Small batches stay in a CPU's cache.
        cache_bytes: Size of the keys and values of the rows that are decoded together; more rows wait their turn.
        remember: Keep what prompts share for the next ones while the weights stand. A reply then depends, in the last
            bits of its log-probs, on what was asked before: not for a run that must resume to the bit. Keys and values
            that are coded are not kept.
        kv: Whether keys and values are coded (see ``kv_cache``); None keeps them in full.

    Raises:
        ConfigError: The model's heads cannot be coded so.
    """

    def __init__(
        self,
        policy: CausalLM,
        *,
        prefill_tokens: int | None = None,
        cache_bytes: int = 2 * 1024**3,
        remember: bool = False,
        kv: KeyValueSettings | None = None,
    ) -> None:
        self.policy, self.remember, self.kv = policy, remember, kv or KeyValueSettings()
        check_head_size(policy.core.head_size, self.kv)
        self.prefill_tokens = prefill_tokens or (1536 if policy.core.device.type == "cpu" else 32768)
        self.cache_bytes = cache_bytes
        self.statistics = SamplerStatistics()
        self._past: Past | None = None
        self._past_of: object = None

    def forget(self) -> None:
        """Drop what prompts shared: the next ones are computed whole, as by a new sampler."""
        self._past = None

    def reset_statistics(self) -> None:
        """Count from 0 again."""
        self.statistics = SamplerStatistics()

    def sample(self, requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Reply]:
        """Replies in the order of the requests.

        Log-probs are of the very distribution drawn from; greedy replies (temperature 0) carry those of temperature 1.

        Raises:
            PromptError: A prompt is empty, or does not leave room for the reply in the model's context.
            ValueError: The settings make no distribution.
        """
        effective(settings.temperature, settings.top_p)
        if settings.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {settings.max_new_tokens}, must be 1 or more")
        limit = self.policy.core.context_length
        for number, request in enumerate(requests):
            length = len(request.prompt_ids)
            if not length:
                raise PromptError(f"request {number} has an empty prompt")
            if limit is not None and length + settings.max_new_tokens > limit:
                raise PromptError(
                    f"request {number}: {length} prompt tokens and {settings.max_new_tokens} to come exceed the "
                    f"model's context of {limit}: shorten the prompt or lower max_new_tokens"
                )
        replies: list[Reply | None] = [None] * len(requests)
        weights = self.policy.fingerprint()
        if weights != self._past_of:
            self.forget()
        self._past_of = weights
        with torch.inference_mode(), self.policy.activated():
            waiting = by_prompt(requests)
            while waiting:
                rows = self.rows(waiting, settings.max_new_tokens)
                taken = {id(prompt) for prompt in rows.prompts}
                waiting = [prompt for prompt in waiting if id(prompt) not in taken]
                self.statistics.prefilled_tokens += rows.prefilled
                self.statistics.prefill_seconds += rows.prefill_seconds
                for index, reply in self._decode(rows, settings):
                    replies[index] = reply
        self.statistics.replies += len(requests)
        self.statistics.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        return [reply for reply in replies if reply is not None]

    def rows(self, waiting: Sequence[Prompt], new_tokens: int) -> PaddedRows | TreeRows:
        """The next rows to decode together, prefilled: as a tree where what they share is worth it."""
        core = self.policy.core
        total = sum(len(prompt.ids) * len(prompt.requests) for prompt in waiting)
        distinct = distinct_prefixes([prompt.ids for prompt in waiting])
        worth_it = distinct <= WORTH_A_TREE * total or self.kv.coded  # coded rows are read without decoding keys
        if core.rows_because is not None or not worth_it:
            return PaddedRows(
                core, waiting, prefill_tokens=self.prefill_tokens, cache_bytes=self.cache_bytes, new_tokens=new_tokens,
                kv=self.kv,
            )  # fmt: skip
        rows = TreeRows(
            core, waiting, prefill_tokens=self.prefill_tokens, cache_bytes=self.cache_bytes, new_tokens=new_tokens,
            kv=self.kv, past=self._past,
        )  # fmt: skip
        self._past = rows.past() if self.remember else None
        return rows

    def _decode(self, state: PaddedRows | TreeRows, settings: SamplingSettings) -> list[tuple[int, Reply]]:
        """Decode until every row has ended or run out; returns (request's index, reply)."""
        started = time.perf_counter()
        decoding = Decoding(self.policy, state, settings)
        while decoding.step():
            pass
        replies = decoding.replies()
        self.statistics.reply_tokens += sum(len(reply.token_ids) for _, reply in replies)
        self.statistics.decode_seconds += time.perf_counter() - started
        return replies


class Decoding:
    """Rows that are decoded together, a token a step; inside ``inference_mode`` and ``policy.activated()``.

    Args:
        policy: Whose weights they are.
        state: The rows, prefilled.
        settings: Of all rows.
        limits: Longest reply of each row, in the order of the rows; None: ``settings.max_new_tokens`` of all.
    """

    def __init__(
        self,
        policy: CausalLM,
        state: PaddedRows | TreeRows,
        settings: SamplingSettings,
        limits: Sequence[int] | None = None,
    ) -> None:
        device = policy.core.device
        self.policy, self.state, self.settings = policy, state, settings
        self.steps = settings.max_new_tokens
        keys = [key for prompt in state.prompts for key in prompt.keys]
        self._uniforms = torch.from_numpy(np.stack([row_uniforms(key, self.steps) for key in keys])).to(device)
        self.tokens = torch.zeros((len(keys), self.steps), dtype=torch.int64, device=device)
        self.log_probs = torch.zeros((len(keys), self.steps), device=device)
        self.counts = torch.zeros(len(keys), dtype=torch.int64, device=device)
        self._ends = torch.tensor(sorted(policy.chat.end_ids), device=device)
        self._limits = torch.tensor(limits, device=device) if limits is not None else None
        self.rows = torch.arange(len(keys), device=device)
        """Which reply each row of the state belongs to."""
        self.alive = torch.ones(len(keys), dtype=torch.bool, device=device)
        self._logits = state.logits
        self.done_steps = 0

    def step(self) -> bool:
        """One more token for each row that has not ended; False when it was the last."""
        step, rows = self.done_steps, self.rows
        chosen, chosen_log_probs = choose(self._logits, self._uniforms[rows, step], self.settings)
        self.tokens[rows, step] = chosen
        self.log_probs[rows, step] = chosen_log_probs
        self.counts[rows] += self.alive
        self.alive = self.alive & ~torch.isin(chosen, self._ends)
        if self._limits is not None:
            self.alive = self.alive & (self.counts[rows] < self._limits[rows])
        self.done_steps += 1
        running = int(self.alive.sum())
        if running == 0 or self.done_steps == self.steps:
            return False
        if running <= _COMPACT_BELOW * len(self.alive):
            keep = self.alive.nonzero().squeeze(-1)
            self.rows, chosen, self.alive = rows[keep], chosen[keep], self.alive[keep]
            self.state.keep(keep)
        self._logits = self.policy.core.logits(self.state.forward(chosen, step))
        return True

    def cancel(self, reply: int) -> None:
        """Nobody waits for this reply any more: its row ends."""
        self.alive = self.alive & (self.rows != reply)

    def indices(self) -> list[int]:
        """The request that each reply answers, in the order of the replies."""
        return [index for prompt in self.state.prompts for index in prompt.requests]

    def replies(self) -> list[tuple[int, Reply]]:
        """(Request's index, reply) of all rows, as far as they have come."""
        ids, values, lengths = self.tokens.tolist(), self.log_probs.tolist(), self.counts.tolist()
        return [
            (
                index,
                Reply(
                    token_ids=tuple(ids[row][: lengths[row]]), log_probs=tuple(values[row][: lengths[row]]),
                    truncated=ids[row][lengths[row] - 1] not in self.policy.chat.end_ids, version=self.policy.version,
                ),
            )
            for row, index in enumerate(self.indices())
        ]  # fmt: skip


def as_sampler(sampler: InProcessSampler) -> Sampler:
    """The same object; here so that the type checker holds the class to its contract."""
    return sampler


def row_uniforms(key: tuple[int, ...], count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A row's random numbers: shape (count,), in [0, 1), the same for a key wherever and with whomever it is sampled.

    >>> bool((row_uniforms((1, 2), 3)[:2] == row_uniforms((1, 2), 2)).all())
    True
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)


def draw(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token of each row by the inverse of its cumulative distribution in fp64.

    Args:
        log_probs: fp32 (N, V), -inf outside the support.
        uniforms: fp64 (N,), in [0, 1).

    Returns:
        int64 (N,). Never a token of probability 0.
    """
    cumulative = log_probs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = torch.minimum(uniforms.unsqueeze(-1) * total, total * (1.0 - 1e-15))
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)


def choose(logits: Tensor, uniforms: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Token of each row (int64, (N,)), and its log-prob (fp32, (N,), nats); logits (N, V), uniforms fp64 (N,)."""
    distribution = log_distribution(logits, settings.temperature, settings.top_p)
    if settings.temperature == 0.0:
        chosen = logits.argmax(dim=-1)
    else:
        chosen = draw(distribution, uniforms)
    return chosen, distribution.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
