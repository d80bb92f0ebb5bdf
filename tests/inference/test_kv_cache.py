"""Coded keys and values: written once, independent of company, close to the full ones, as small as promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_tree_rows import market
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from model_fixtures import make_tokenizer
from sparring.errors import ConfigError
from sparring.inference import tree_rows
from sparring.inference.kv_cache import CodedColumns, CodedRows, before_window
from sparring.inference.sampler import InProcessSampler
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest, ScoreRow
from sparring.policies.tree_attention import NodeStore, Span
from sparring.types import KeyValueSettings, Reply, SamplingSettings

WARM = SamplingSettings(max_new_tokens=30)
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 1, "initializer_range": 0.15,
}  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load(tmp_path_factory.mktemp("llama"), LlamaForCausalLM(LlamaConfig(**SIZES)))


def load(directory: Path, model: torch.nn.Module) -> CausalLM:
    torch.manual_seed(0)
    model.save_pretrained(directory)  # type: ignore[operator]
    make_tokenizer().save_pretrained(directory)
    made = CausalLM.load(directory)
    made.chat.end_ids = frozenset(range(1, 320, 40))  # so that rows end at many times
    return made


def coded(key_bits: float, value_bits: float, window: int = 6) -> KeyValueSettings:
    return KeyValueSettings(key_bits=key_bits, value_bits=value_bits, window=window)


def learned(policy: CausalLM, asked: list[SampleRequest], replies: list[Reply]) -> torch.Tensor:
    rows = [
        ScoreRow(
            token_ids=a.prompt_ids + r.token_ids,
            positions=tuple(range(len(a.prompt_ids), len(a.prompt_ids) + len(r.token_ids))),
        )
        for a, r in zip(asked, replies, strict=True)
    ]
    with torch.no_grad():
        return policy.log_probs(rows, temperature=1.0)


def sampled(replies: list[Reply]) -> torch.Tensor:
    return torch.tensor([value for reply in replies for value in reply.log_probs])


@pytest.mark.parametrize("worth", [1, 10_000], ids=["shared", "nothing-shared"])
def test_a_reply_does_not_depend_on_its_company(policy: CausalLM, worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fan-out, shared segments, rows that end early, batches: all as each prompt alone (4 and 3 bits)."""
    monkeypatch.setattr(tree_rows, "WORTH_SHARING", worth)
    asked = market(5)
    how = coded(4, 3)
    together = InProcessSampler(policy, kv=how).sample(asked, WARM)
    alone = [InProcessSampler(policy, kv=how).sample([request], WARM)[0] for request in asked]
    assert [reply.token_ids for reply in together] == [reply.token_ids for reply in alone]
    for one, other in zip(together, alone, strict=True):
        assert np.allclose(one.log_probs, other.log_probs, rtol=1e-3, atol=1e-3)
    assert len({len(reply.token_ids) for reply in together}) > 2
    cut = InProcessSampler(policy, kv=how, prefill_tokens=16, cache_bytes=60_000).sample(asked, WARM)
    assert [reply.token_ids for reply in cut] == [reply.token_ids for reply in together]


def test_log_probs_are_of_the_coded_model_and_near_the_full_one(policy: CausalLM) -> None:
    """They differ from the learner's (the ratios know it), less so with more bits; a window over all is exact."""
    asked = market(2)
    gaps = {}
    for bits in (2.0, 3.0, 3.5, 4.0):
        replies = InProcessSampler(policy, kv=coded(bits, bits)).sample(asked, WARM)
        gaps[bits] = (learned(policy, asked, replies) - sampled(replies)).square().mean().sqrt().item()
    assert 0.0 < gaps[4.0] < gaps[3.0] < gaps[2.0]
    assert gaps[4.0] < gaps[3.5] < gaps[2.0]
    replies = InProcessSampler(policy, kv=coded(2, 2, window=250)).sample(asked, WARM)
    assert (learned(policy, asked, replies) - sampled(replies)).abs().max() < 1e-3


@pytest.mark.parametrize("window", [0, 5, 40])
def test_rows_and_columns_are_one_method(policy: CausalLM, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes no trees decodes its keys whole; one that does turns its queries: the same numbers."""
    asked = [SampleRequest(prompt_ids=tuple(range(3, 12 + 5 * i)), key=(i, 7)) for i in (1, 6, 3, 3)]
    how = coded(4, 3, window)
    by_tree = InProcessSampler(policy, kv=how).sample(asked, WARM)
    monkeypatch.setattr(policy.core, "rows_because", "told so by a test")
    by_row = InProcessSampler(policy, kv=how).sample(asked, WARM)
    assert [reply.token_ids for reply in by_tree] == [reply.token_ids for reply in by_row]
    assert torch.allclose(sampled(by_tree), sampled(by_row), rtol=1e-3, atol=1e-3)


def test_sliding_windows_keep_their_own_cache(tmp_path: Path) -> None:
    """All of this model's layers slide, so nothing is coded and the learner agrees exactly."""
    policy = load(tmp_path, MistralForCausalLM(MistralConfig(sliding_window=6, **SIZES)))
    asked = [SampleRequest(prompt_ids=tuple(range(3, 12 + i)), key=(i,)) for i in range(3)]
    replies = InProcessSampler(policy, kv=coded(2, 2, window=0)).sample(asked, WARM)
    assert (learned(policy, asked, replies) - sampled(replies)).abs().max() < 1e-3


def vectors(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_over(table: torch.Tensor, new_tokens: int, how: KeyValueSettings) -> CodedRows:
    """One row that holds all nodes of ``table`` (heads, N, d), one layer."""
    store = NodeStore(table.shape[1])
    store.write(0, 0, table, table + 1.0)
    width = table.shape[1]
    mask = torch.zeros(1, 1, 1, width + new_tokens)
    return CodedRows(store, [], 0, torch.arange(width)[None], mask, new_tokens=new_tokens, settings=how)


def test_codes_are_written_once() -> None:
    """The error of the prompt's vectors after 64 steps is that after one: to the bit, for rows and for columns."""
    table = vectors(0, 2, 100, 64)
    rows = rows_over(table, 64, coded(3, 3, window=16))
    columns = CodedColumns(table[None], table[None] + 1.0, coded(3, 3, window=16))
    first = rows.keys[0].own[:, :, :84].clone()
    first_columns = columns.records[0].clone()
    assert rows.coded == first_columns.shape[2] == 84
    for step in range(64):
        key, value = vectors(step + 1, 1, 2, 1, 64), vectors(step + 101, 1, 2, 1, 64)
        rows.attend(0, vectors(step + 201, 1, 4, 1, 64), key, value, 0.125)
        rows.advance()
        columns.append(key, value)
    assert torch.equal(rows.keys[0].own[:, :, :84], first)
    assert torch.equal(columns.records[0][:, :, :84], first_columns)
    assert rows.coded == 84 + 64 and rows.length == 164
    wanted = torch.cat([table[None], *[vectors(step + 1, 1, 2, 1, 64) for step in range(64)]], dim=2)
    decoded = rows.keys[0].codec.decode(rows.keys[0].own[:, :, : rows.coded])
    old = (decoded[:, :, :84] - wanted[:, :, :84]).square().sum() / wanted[:, :, :84].square().sum()
    new = (decoded[:, :, 84:] - wanted[:, :, 84:148]).square().sum() / wanted[:, :, 84:148].square().sum()
    assert old == pytest.approx(0.034, rel=0.1) and new == pytest.approx(0.034, rel=0.1)
    assert torch.equal(rows.keys[0].recent[:, :, :16], wanted[:, :, 148:])


@pytest.mark.parametrize(("bits", "bytes_"), [(3.0, 52), (3.5, 60), (4.0, 68)])
def test_allocated_bytes(bits: float, bytes_: int) -> None:
    """Of 900 vectors of 128 numbers and a window of 16 (with room for 8 more)."""
    rows = rows_over(vectors(0, 2, 916, 128), 0, coded(bits, bits, window=16))
    assert rows.bytes - 2 * 2 * 24 * 512 == pytest.approx(2 * 2 * 900 * bytes_, rel=0.05)


def test_rows_are_dropped_and_repeated_among_records(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_over(vectors(0, 2, 40, 64), 8, coded(4, 4, window=8))
    columns = CodedColumns(vectors(0, 3, 2, 40, 64), vectors(1, 3, 2, 40, 64), coded(4, 4, window=8))
    kept = columns.records[0][[2, 0, 0]].clone()
    for name in ("decode", "decode_turned", "encode"):
        monkeypatch.setattr("sparring.inference.quantiser.Codec." + name, None)
    columns.select(torch.tensor([2, 0, 0]))
    assert torch.equal(columns.records[0], kept)
    own = rows.keys[0].own[:, :, 3:].clone()
    rows.keep(torch.tensor([0]), [], 3)
    assert torch.equal(rows.keys[0].own, own) and (rows.coded, rows.length) == (29, 37)


def test_spans_end_before_every_window() -> None:
    span = Span(start=0, stop=2, first_node=4, column=3, length=10)
    assert [s.length for s in before_window([span], [20, 14, 5], 4)] == [7]
    assert before_window([span], [20, 7, 5], 4) == []


def test_heads_that_cannot_be_coded_are_said(policy: CausalLM) -> None:
    with pytest.raises(ConfigError, match=r"kv\.key_bits is 3\.5.*24"):
        from sparring.inference.kv_cache import check_head_size

        check_head_size(24, coded(3.5, 4))
