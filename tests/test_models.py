from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from model_fixtures import save_model
from sparring import models
from sparring.errors import ConfigError, ModelError
from sparring.inference.sampler import InProcessSampler
from sparring.policies.causal_lm import CausalLM, LoraSettings
from sparring.policies.contract import SampleRequest, ScoreRow
from sparring.tokens.chat import ChatMessage
from sparring.types import SamplingSettings

ROWS = [ScoreRow(token_ids=tuple(range(4, 30)), positions=tuple(range(3, 26)))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def shake(policy: CausalLM) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.add_(0.1 * torch.randn_like(parameter))


def test_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path))
    assert models.resolve("org/model") == "org/model"
    assert {entry.name for entry in models.list_models()} == {"tiny", "smollm2"}
    with pytest.raises(ModelError, match="sparring models add smollm2"):
        models.resolve("smollm2")
    with pytest.raises(ModelError, match="did you mean 'smollm2'"):
        models.load("smolm2")
    save_model(tmp_path / "models" / "smollm2")
    assert models.resolve("smollm2") == str(tmp_path / "models" / "smollm2")
    lines: list[str] = []
    assert models.add_smollm2(lines.append) == tmp_path / "models" / "smollm2" and "already" in lines[0]
    monkeypatch.setattr(models, "TINY_DIRECTORY", tmp_path / "none")
    with pytest.raises(ModelError, match="tiny should ship"):
        models.resolve("tiny")


def test_export_hf_reloads_equal(directory: Path, tmp_path: Path) -> None:
    policy = CausalLM.load(directory)
    shake(policy)
    out = models.export(policy, "hf", tmp_path / "out")
    again = CausalLM.load(out)
    assert torch.equal(again.log_probs(ROWS, temperature=1.0), policy.log_probs(ROWS, temperature=1.0))
    assert again.chat.encode([ChatMessage("user", "buy")]) == policy.chat.encode([ChatMessage("user", "buy")])
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_export_peft_and_merged_reload_equal(directory: Path, tmp_path: Path) -> None:
    policy = CausalLM.load(directory, lora=LoraSettings(rank=4), adapters=("red", "blue"))
    red = policy.adapter("red")
    shake(red)
    want = red.log_probs(ROWS, temperature=1.0).detach()
    merged = CausalLM.load(models.export(red, "merged", tmp_path / "merged"))
    torch.testing.assert_close(merged.log_probs(ROWS, temperature=1.0).detach(), want, rtol=1e-4, atol=1e-4)
    out = models.export(red, "peft", tmp_path / "peft")
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, out).eval()
    table = torch.log_softmax(model(torch.tensor([ROWS[0].token_ids])).logits[0], dim=-1)
    got = torch.stack([table[p - 1, ROWS[0].token_ids[p]] for p in ROWS[0].positions]).detach()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(red.log_probs(ROWS, temperature=1.0).detach(), want)


def test_export_refuses_what_does_not_fit(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CausalLM.load(directory)
    several = CausalLM.load(directory, lora=LoraSettings(rank=2), adapters=("red", "blue"))
    for policy, kind, words in (
        (whole, "peft", "format hf"),
        (whole, "merged", "format hf"),
        (several, "merged", "red, blue"),
        (several.adapter("red"), "hf", "as peft, or as merged"),
        (whole, "hff", "did you mean 'hf'"),
    ):
        with pytest.raises(ConfigError, match=words):
            models.export(policy, kind, tmp_path / "out")  # type: ignore[arg-type]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty directory"):
        models.export_hf(whole, tmp_path / "full")

    def full_disk(directory: Path) -> None:
        (directory / "half").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole, "save_model", full_disk)
    with pytest.raises(ConfigError, match="No space left"):
        models.export_hf(whole, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["full"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_is_added_and_talks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path))
    started = time.perf_counter()
    models.add_smollm2(print)
    print(f"added in {time.perf_counter() - started:.1f} s")
    started = time.perf_counter()
    policy = models.load("smollm2", micro_batch_tokens=2048)
    print(f"loaded in {time.perf_counter() - started:.1f} s; {policy.parameter_count:,} numbers; {policy.estimate}")
    tokenizer = policy.chat.tokenizer
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert policy.chat.end_ids == {tokenizer.eos_token_id} and not policy.chat.merges_system
    prompt = policy.chat.encode([ChatMessage("user", "What is the capital of France?")])
    assert prompt[0] == tokenizer.bos_token_id and prompt[1] != tokenizer.bos_token_id
    sampler = InProcessSampler(policy)
    settings = SamplingSettings(temperature=0.0, max_new_tokens=48)
    reply = sampler.sample([SampleRequest(prompt_ids=prompt, key=(0,))], settings)[0]
    text = policy.chat.decode(reply.token_ids)
    print(repr(text), sampler.statistics, f"{sampler.statistics.tokens_per_second:.1f} tokens/s")
    assert "Paris" in text and not reply.truncated
    row = ScoreRow(
        token_ids=prompt + reply.token_ids, positions=tuple(range(len(prompt), len(prompt) + len(reply.token_ids)))
    )
    with torch.no_grad():
        learned = policy.log_probs([row], temperature=0.0)
    assert (torch.exp(learned - torch.tensor(reply.log_probs)) - 1).abs().max() < 1e-3
