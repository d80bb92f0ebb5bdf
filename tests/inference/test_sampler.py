from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model_fixtures import save_model
from sparring.errors import PromptError
from sparring.inference.sampler import InProcessSampler, draw
from sparring.policies.causal_lm import CausalLM, LoraSettings
from sparring.policies.contract import SampleRequest, ScoreRow
from sparring.types import PolicyVersion, Reply, SamplingSettings

SETTINGS = [
    SamplingSettings(max_new_tokens=24),
    SamplingSettings(temperature=0.7, max_new_tokens=24),
    SamplingSettings(temperature=0.7, top_p=0.9, max_new_tokens=24),
    SamplingSettings(temperature=0.0, max_new_tokens=24),
]


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def policy(directory: Path) -> CausalLM:
    return CausalLM.load(directory)


def requests(count: int = 12) -> list[SampleRequest]:
    generator = np.random.default_rng(5)
    made = []
    for index in range(count):
        length = 3 + (index * 7) % 23
        prompt = generator.integers(0, 320, length).tolist()  # end and pad ids among them: they are only tokens here
        made.append(SampleRequest(prompt_ids=tuple(prompt), key=(1, 0, index, 4)))
    return made


def rows(asked: list[SampleRequest], replies: list[Reply]) -> list[ScoreRow]:
    return [
        ScoreRow(
            token_ids=request.prompt_ids + reply.token_ids,
            positions=tuple(range(len(request.prompt_ids), len(request.prompt_ids) + len(reply.token_ids))),
        )
        for request, reply in zip(asked, replies, strict=True)
    ]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_log_probs_equal_the_learners_t2_t5(policy: CausalLM, settings: SamplingSettings) -> None:
    replies = InProcessSampler(policy, prefill_tokens=64).sample(requests(), settings)
    sampled = torch.tensor([value for reply in replies for value in reply.log_probs])
    with torch.no_grad():
        learned = policy.log_probs(rows(requests(), replies), temperature=settings.temperature, top_p=settings.top_p)
    assert (torch.exp(learned - sampled) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_batch_order_and_company_change_nothing_t1(policy: CausalLM, settings: SamplingSettings) -> None:
    asked = requests()
    whole = InProcessSampler(policy, prefill_tokens=64).sample(asked, settings)
    order = np.random.default_rng(0).permutation(len(asked))
    mixed = InProcessSampler(policy, prefill_tokens=4096).sample([asked[i] for i in order], settings)
    assert [mixed[list(order).index(i)].token_ids for i in range(len(asked))] == [r.token_ids for r in whole]
    alone = [InProcessSampler(policy).sample([request], settings)[0].token_ids for request in asked]
    assert alone == [reply.token_ids for reply in whole]
    crowded = InProcessSampler(policy, cache_bytes=60_000).sample(asked, settings)
    assert [reply.token_ids for reply in crowded] == [reply.token_ids for reply in whole]


def test_greedy_equals_generate(policy: CausalLM) -> None:
    settings = SamplingSettings(temperature=0.0, max_new_tokens=24)
    for request, reply in zip(requests(), InProcessSampler(policy).sample(requests(), settings), strict=True):
        ids = torch.tensor([request.prompt_ids])
        out = policy.core.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=1
        )
        assert tuple(out[0, len(request.prompt_ids) :].tolist()) == reply.token_ids


def test_the_end_token_is_in_the_reply_and_pads_never(policy: CausalLM) -> None:
    asked = [SampleRequest(prompt_ids=(5, 1, 7), key=(i,)) for i in range(300)]
    replies = InProcessSampler(policy).sample(asked, SamplingSettings(temperature=2.0, max_new_tokens=16))
    ended = [reply for reply in replies if not reply.truncated]
    assert ended and len(ended) < len(replies)
    for reply in replies:
        assert (reply.token_ids[-1] == 1) == (not reply.truncated)
        assert 1 not in reply.token_ids[:-1]
        assert len(reply.token_ids) == len(reply.log_probs) <= 16
        assert reply.truncated == (len(reply.token_ids) == 16 and reply.token_ids[-1] != 1)


def test_equal_prompts_are_prefilled_once_and_answered_apart(policy: CausalLM) -> None:
    sampler = InProcessSampler(policy)
    asked = [SampleRequest(prompt_ids=(5, 6, 7), key=(i,)) for i in range(6)] + requests(2)
    replies = sampler.sample(asked, SamplingSettings(max_new_tokens=12))
    assert sampler.statistics.prefilled_tokens == 3 + sum(len(r.prompt_ids) for r in requests(2))
    assert sampler.statistics.prompt_tokens == 18 + sum(len(r.prompt_ids) for r in requests(2))
    assert sampler.statistics.reply_tokens == sum(len(reply.token_ids) for reply in replies)
    assert len({reply.token_ids for reply in replies[:6]}) > 1
    same = InProcessSampler(policy).sample([asked[0]], SamplingSettings(max_new_tokens=12))[0]
    assert same.token_ids == replies[0].token_ids


def test_the_distribution_is_the_models(policy: CausalLM) -> None:
    asked = [SampleRequest(prompt_ids=(9, 8, 7, 6), key=(i, 3)) for i in range(4000)]
    settings = SamplingSettings(temperature=0.7, top_p=0.9, max_new_tokens=1)
    replies = InProcessSampler(policy, cache_bytes=1 << 40).sample(asked, settings)
    counts = np.bincount([reply.token_ids[0] for reply in replies], minlength=320)
    ids = torch.tensor([[9, 8, 7, 6]])
    probabilities = torch.softmax(policy.core.model(ids).logits[0, -1].detach() / 0.7, dim=-1).numpy().astype(float)
    order = np.argsort(-probabilities)
    inside = order[: int(np.searchsorted(np.cumsum(probabilities[order]), 0.9)) + 1]
    expected = np.zeros(320)
    expected[inside] = probabilities[inside] / probabilities[inside].sum()
    assert counts[expected == 0].sum() == 0
    assert np.abs(counts / 4000 - expected).max() < 0.035  # over four standard errors at p = 1/2


def test_draw_never_takes_the_impossible() -> None:
    log_probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).log().repeat(4, 1)
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 1.0 - 2**-53], dtype=torch.float64)
    assert draw(log_probs, uniforms).tolist() == [1, 1, 3, 3]


def test_adapter_views_sample_their_own_weights_and_stamp_their_version(directory: Path) -> None:
    policy = CausalLM.load(directory, lora=LoraSettings(rank=4), adapters=("red", "blue"))
    red, blue = policy.adapter("red"), policy.adapter("blue")
    with torch.no_grad():
        for name, parameter in red.trainable_parameters().items():
            if "lora_B" in name:
                parameter.add_(0.3)
    red.version = PolicyVersion(incarnation=1, step=7)
    settings = SamplingSettings(max_new_tokens=16)
    replies = {view.name: InProcessSampler(view).sample(requests(), settings) for view in (red, blue)}
    assert replies["red"][0].version.step == 7 and replies["blue"][0].version.step == 0
    assert [r.token_ids for r in replies["red"]] != [r.token_ids for r in replies["blue"]]
    for view in (red, blue):
        sampled = torch.tensor([value for reply in replies[view.name] for value in reply.log_probs])
        with torch.no_grad():
            learned = view.log_probs(rows(requests(), replies[view.name]), temperature=1.0)
        assert (torch.exp(learned - sampled) - 1).abs().max() < 1e-3


def test_bad_requests_are_refused(policy: CausalLM) -> None:
    sampler = InProcessSampler(policy)
    with pytest.raises(PromptError, match="empty"):
        sampler.sample([SampleRequest(prompt_ids=(), key=(1,))], SETTINGS[0])
    with pytest.raises(PromptError, match="context of 512"):
        sampler.sample([SampleRequest(prompt_ids=(3,) * 500, key=(1,))], SETTINGS[0])
    with pytest.raises(ValueError, match="top_p"):
        sampler.sample(requests(1), SamplingSettings(top_p=0.0))
    assert sampler.sample([], SETTINGS[0]) == []
