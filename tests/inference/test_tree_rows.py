"""Prompts that share beginnings: prefilled once, attended together, and the same replies as each alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_fixtures import save_model
from sparring.inference import sampler as sampler_module
from sparring.inference import tree_rows
from sparring.inference.padded_rows import PaddedRows
from sparring.inference.sampler import InProcessSampler
from sparring.inference.tree_rows import TreeRows, chunks, shared_spans, split_long
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest, ScoreRow
from sparring.tokens.prefix_tree import expand, merge
from sparring.types import SamplingSettings

GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=20)
WARM = SamplingSettings(max_new_tokens=20)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    made = CausalLM.load(save_model(tmp_path_factory.mktemp("tiny")))
    made.chat.end_ids = frozenset(range(1, 320, 12))  # so that rows end at many times
    return made


@pytest.fixture(autouse=True)
def share_whatever_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_rows, "WORTH_SHARING", 1)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[type]]:
    """Which rows were made."""
    made: list[type] = []
    for kind in (TreeRows, PaddedRows):

        def make(*arguments: Any, kind: Any = kind, **keywords: Any) -> Any:
            made.append(kind)
            return kind(*arguments, **keywords)

        monkeypatch.setattr(sampler_module, kind.__name__, make)
    yield made


def market(seed: int = 0, repeats: int = 2) -> list[SampleRequest]:
    """Rules, teams, private parts of all lengths, some asked several times; one prompt begins others."""
    rng = random.Random(seed)
    words = lambda n: tuple(rng.randrange(320) for _ in range(n))  # noqa: E731
    rules = words(31)
    prompts = [rules]
    for _ in range(3):
        team = (*rules, *words(rng.randrange(1, 9)))
        prompts += [(*team, *words(rng.randrange(1, 25))) for _ in range(4)]
    asked = [prompt for prompt in prompts for _ in range(rng.randrange(1, repeats + 1))]
    rng.shuffle(asked)
    return [SampleRequest(prompt_ids=prompt, key=(seed, number)) for number, prompt in enumerate(asked)]


def by_rows(policy: CausalLM, asked: list[SampleRequest], how: SamplingSettings) -> list[Any]:
    before, policy.core.rows_because = policy.core.rows_because, "told so by a test"
    try:
        return InProcessSampler(policy).sample(asked, how)
    finally:
        policy.core.rows_because = before


@pytest.mark.parametrize("how", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("worth", [1, 64, 10_000], ids=["all-shared", "default", "nothing-shared"])
def test_replies_are_those_of_each_prompt_alone(
    policy: CausalLM, how: SamplingSettings, worth: int, kinds: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_rows, "WORTH_SHARING", worth)
    asked = market()
    together = InProcessSampler(policy).sample(asked, how)
    assert kinds == [TreeRows]
    apart = [by_rows(policy, [request], how)[0] for request in asked]
    assert [reply.token_ids for reply in together] == [reply.token_ids for reply in apart]
    for one, other in zip(together, apart, strict=True):
        assert np.allclose(one.log_probs, other.log_probs, rtol=1e-4, atol=1e-4)
    assert len({len(reply.token_ids) for reply in together}) > 1  # rows ended and left


@pytest.mark.parametrize(("prefill", "memory"), [(7, 1 << 30), (16, 60_000), (1536, 30_000), (1, 1 << 30)])
def test_chunks_and_batches_change_nothing(policy: CausalLM, prefill: int, memory: int, kinds: list[type]) -> None:
    asked = market(3)
    whole = InProcessSampler(policy).sample(asked, WARM)
    cut = InProcessSampler(policy, prefill_tokens=prefill, cache_bytes=memory).sample(asked, WARM)
    assert [reply.token_ids for reply in cut] == [reply.token_ids for reply in whole]
    assert (len(kinds) > 2) == (memory < 1 << 30)


def test_greedy_equals_generate_token_for_token(policy: CausalLM) -> None:
    asked = market(1)
    for request, reply in zip(asked, InProcessSampler(policy).sample(asked, GREEDY), strict=True):
        ids = torch.tensor([request.prompt_ids])
        out = policy.core.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=1,
            eos_token_id=sorted(policy.chat.end_ids),
        )
        assert tuple(out[0, len(request.prompt_ids) :].tolist()) == reply.token_ids


def test_log_probs_are_the_learners(policy: CausalLM) -> None:
    asked = market(2)
    replies = InProcessSampler(policy).sample(asked, WARM)
    rows = [
        ScoreRow(
            token_ids=request.prompt_ids + reply.token_ids,
            positions=tuple(range(len(request.prompt_ids), len(request.prompt_ids) + len(reply.token_ids))),
        )
        for request, reply in zip(asked, replies, strict=True)
    ]
    with torch.no_grad():
        learned = policy.log_probs(rows, temperature=1.0)
    sampled = torch.tensor([value for reply in replies for value in reply.log_probs])
    assert (torch.exp(learned - sampled) - 1).abs().max() < 1e-3


def test_every_distinct_prefix_is_prefilled_once(policy: CausalLM) -> None:
    seen: list[int] = []
    handle = policy.core.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()) if "tree" in kwargs else None,
        with_kwargs=True,
    )
    try:
        asked = market(4)
        sampler = InProcessSampler(policy, prefill_tokens=20)
        sampler.sample(asked, WARM)
    finally:
        handle.remove()
    distinct = len({request.prompt_ids[:n] for request in asked for n in range(1, len(request.prompt_ids) + 1)})
    assert sum(seen) == sampler.statistics.prefilled_tokens == distinct and max(seen) <= 20
    assert sampler.statistics.prompt_tokens == sum(len(request.prompt_ids) for request in asked) > 2 * distinct


def test_what_was_shared_is_not_computed_again_while_the_weights_stand(policy: CausalLM) -> None:
    first, second = market(4), market(4, repeats=3)[::-1]
    sampler = InProcessSampler(policy, remember=True)
    sampler.sample(first, GREEDY)
    whole = sampler.statistics.prefilled_tokens
    sampler.reset_statistics()
    again = sampler.sample(second, GREEDY)
    assert 0 < sampler.statistics.prefilled_tokens < whole / 2
    alone = InProcessSampler(policy).sample(second, GREEDY)
    assert [reply.token_ids for reply in again] == [reply.token_ids for reply in alone]
    for one, other in zip(again, alone, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    for change in (sampler.forget, lambda: policy.load_state(policy.state())):
        change()
        sampler.reset_statistics()
        sampler.sample(second, GREEDY)
        assert sampler.statistics.prefilled_tokens == whole


def test_other_prompts_take_over_what_they_have_in_common(policy: CausalLM) -> None:
    asked = market(4)
    sampler = InProcessSampler(policy, prefill_tokens=20, remember=True)
    sampler.sample(asked, GREEDY)
    shorter = [SampleRequest(prompt_ids=(*r.prompt_ids[:-1], 7, 9), key=r.key) for r in asked if len(r.prompt_ids) > 1]
    sampler.reset_statistics()
    found = sampler.sample(shorter, GREEDY)
    alone = InProcessSampler(policy).sample(shorter, GREEDY)
    assert sampler.statistics.prefilled_tokens < sum(len(r.prompt_ids) for r in shorter) / 4
    assert [reply.token_ids for reply in found] == [reply.token_ids for reply in alone]


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=10, unique=True)


@given(ROWS, st.integers(1, 6))
@settings(max_examples=200)
def test_split_segments_are_the_same_tree(rows: list[tuple[int, ...]], budget: int) -> None:
    tree = split_long(merge(rows), budget)
    assert expand(tree) == rows
    assert max(segment.length for segment in tree.segments) <= budget
    cut = chunks(tree.segments, budget, fresh=[True] * len(tree.segments))
    assert [s for chunk in cut for s in chunk] == list(range(len(tree.segments)))
    assert all(sum(tree.segments[s].length for s in chunk) <= budget for chunk in cut)


@given(ROWS)
@settings(max_examples=200)
def test_spans_are_whole_segments_of_the_rows_below(rows: list[tuple[int, ...]]) -> None:
    ordered = sorted(rows)
    tree = merge(ordered)
    for span in shared_spans(tree, range(len(ordered))):
        nodes = list(range(span.first_node, span.first_node + span.length))
        for row in range(len(ordered)):
            mine = tree.nodes(row).tolist()
            assert (mine[span.column : span.column + span.length] == nodes) == (span.start <= row < span.stop)
