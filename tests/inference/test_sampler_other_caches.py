"""Models whose layers do not all see their whole past: these keep their own cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from model_fixtures import make_tokenizer
from sparring.inference.sampler import InProcessSampler
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest, ScoreRow
from sparring.types import SamplingSettings

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize("kind", ["sliding window", "logit cap"])
def test_sampler_equals_learner(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    if kind == "sliding window":
        MistralForCausalLM(MistralConfig(sliding_window=6, **SIZES)).save_pretrained(tmp_path)
    else:
        Gemma2ForCausalLM(Gemma2Config(sliding_window=6, **SIZES)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    policy = CausalLM.load(tmp_path)
    assert policy.core.plain_head == (kind == "sliding window")
    asked = [SampleRequest(prompt_ids=tuple(range(3, 6 + i)), key=(i % 3, i)) for i in (1, 9, 4, 4, 12)]
    replies = InProcessSampler(policy).sample(asked, SamplingSettings(max_new_tokens=20))
    rows = [
        ScoreRow(
            token_ids=a.prompt_ids + r.token_ids,
            positions=tuple(range(len(a.prompt_ids), len(a.prompt_ids) + len(r.token_ids))),
        )
        for a, r in zip(asked, replies, strict=True)
    ]
    sampled = torch.tensor([value for reply in replies for value in reply.log_probs])
    with torch.no_grad():
        learned = policy.log_probs(rows, temperature=1.0)
    assert (torch.exp(learned - sampled) - 1).abs().max() < 1e-3
