from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model_fixtures import make_model, make_tokenizer, save_model
from sparring.errors import CheckpointError, ConfigError, ModelError
from sparring.policies import memory
from sparring.policies.causal_lm import CausalLM, LoraSettings
from sparring.policies.contract import ScoreRow
from sparring.policies.distribution import log_distribution, token_log_probs
from sparring.policies.memory import available_memory, memory_estimate, refuse_if_too_large


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def rows(count: int = 7, seed: int = 3) -> list[ScoreRow]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = 6 + 5 * ((index * 3) % count)
        ids = torch.randint(0, 320, (length,), generator=generator).tolist()  # pad and end ids among them
        made.append(ScoreRow(token_ids=tuple(ids), positions=tuple(range(length // 2, length, 1 + index % 2))))
    return made


def by_hand(model: torch.nn.Module, row: ScoreRow, temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([row.token_ids])).logits[0].float() / temperature
    table = torch.log_softmax(logits, dim=-1)
    return torch.stack([table[p - 1, row.token_ids[p]] for p in row.positions])


@pytest.mark.parametrize("budget", [1, 64, 8192])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padded_batches_equal_single_rows(directory: Path, budget: int, temperature: float) -> None:
    policy = CausalLM.load(directory, micro_batch_tokens=budget)
    got = policy.log_probs(rows(), temperature=temperature)
    want = torch.cat([by_hand(policy.core.model, row, temperature) for row in rows()])
    assert got.dtype == torch.float32 and got.requires_grad
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_permutation_and_empty_rows_change_nothing(directory: Path) -> None:
    policy = CausalLM.load(directory)
    given = rows()
    got = policy.log_probs([given[2], ScoreRow(token_ids=(1, 2), positions=()), given[0]], temperature=1.0)
    want = torch.cat([policy.log_probs([given[i]], temperature=1.0) for i in (2, 0)])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert policy.log_probs([], temperature=1.0).shape == (0,)


def test_nothing_after_the_last_wanted_position_is_forwarded(directory: Path) -> None:
    policy = CausalLM.load(directory)
    seen: list[int] = []
    policy.core.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    policy.log_probs([ScoreRow(token_ids=tuple(range(50)), positions=(3, 8))], temperature=1.0)
    assert seen == [8]


def test_positions_are_checked_t10(directory: Path) -> None:
    policy = CausalLM.load(directory)
    for positions in ((0,), (5,), (3, 2), (2, 2)):
        with pytest.raises(ValueError, match="positions"):
            policy.log_probs([ScoreRow(token_ids=(1, 2, 3, 4, 5), positions=positions)], temperature=1.0)


def test_gradients_agree_with_checkpointing_and_chunked_head(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CausalLM.load(directory)
    plain.log_probs(rows(), temperature=0.7).sum().backward()
    monkeypatch.setattr("sparring.policies.language_model._LOGIT_CHUNK_BYTES", 4 * 320 * 8)
    lean = CausalLM.load(directory, gradient_checkpointing=True, micro_batch_tokens=64)
    lean.log_probs(rows(), temperature=0.7).sum().backward()
    for name, parameter in plain.trainable_parameters().items():
        other = lean.trainable_parameters()[name]
        assert parameter.grad is not None and other.grad is not None
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-3, atol=1e-4)


def test_nucleus_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    table = log_distribution(logits, 1.0, 0.7).exp()
    torch.testing.assert_close(table, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    inside = token_log_probs(logits, torch.tensor([1]), 1.0, 0.7).exp()
    torch.testing.assert_close(inside, torch.tensor([0.375]))
    outside = token_log_probs(logits, torch.tensor([3]), 1.0, 0.7).exp()  # left the support: still finite
    torch.testing.assert_close(outside, torch.tensor([0.05 / 0.85]))
    torch.testing.assert_close(log_distribution(logits, 0.0, 0.5).exp(), logits.exp())
    with pytest.raises(ValueError, match="top_p"):
        log_distribution(logits, 1.0, 0.0)


# LoRA


def train_once(policy: CausalLM) -> None:
    parameters = list(policy.trainable_parameters().values())
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        policy.log_probs(rows(), temperature=1.0).mean().neg().backward()
        optimizer.step()


def test_adapters_are_independent_and_start_as_the_base(directory: Path) -> None:
    base = CausalLM.load(directory)
    want = base.log_probs(rows(), temperature=1.0).detach()
    policy = CausalLM.load(directory, lora=LoraSettings(rank=4), adapters=("red", "blue"))
    red, blue = policy.adapter("red"), policy.adapter("blue")
    assert (red.name, blue.name) == ("red", "blue") and red.core is blue.core and policy.adapter("red") is red
    assert torch.equal(red.log_probs(rows(), temperature=1.0).detach(), want)
    before = blue.log_probs(rows(), temperature=1.0).detach()
    train_once(red)
    assert torch.equal(blue.log_probs(rows(), temperature=1.0).detach(), before)
    assert torch.equal(policy.log_probs(rows(), temperature=1.0).detach(), want)  # no adapter: the base
    assert (red.log_probs(rows(), temperature=1.0).detach() - want).abs().max() > 1e-3
    assert not set(map(id, red.trainable_parameters().values())) & set(map(id, blue.trainable_parameters().values()))
    assert not policy.trainable_parameters()
    assert set(red.state()) == set(blue.state())  # an adapter's state fits any other


def test_a_backward_pass_finds_its_own_adapter(directory: Path) -> None:
    """Forward red, forward blue, then both backward passes: with recomputed layers too."""
    wanted = {}
    for checkpointing in (False, True):
        policy = CausalLM.load(
            directory, lora=LoraSettings(rank=4), adapters=("red", "blue"), gradient_checkpointing=checkpointing
        )
        for name in ("red", "blue"):
            train_once(policy.adapter(name))
            for parameter in policy.adapter(name).trainable_parameters().values():
                parameter.grad = None
        losses = [policy.adapter(name).log_probs(rows(), temperature=1.0).sum() for name in ("red", "blue")]
        for loss in losses:
            loss.backward()
        grads = {
            f"{name}/{key}": parameter.grad
            for name in ("red", "blue")
            for key, parameter in policy.adapter(name).trainable_parameters().items()
        }
        assert all(grad is not None and grad.abs().sum() > 0 for grad in grads.values())
        if not wanted:
            wanted = grads
        for key, grad in grads.items():
            torch.testing.assert_close(grad, wanted[key], rtol=1e-3, atol=1e-4)


def test_one_shared_adapter_and_a_frozen_copy(directory: Path) -> None:
    policy = CausalLM.load(directory, lora=LoraSettings(rank=4))
    assert policy.adapter_name == "shared" and policy.trainable_count < policy.parameter_count
    assert all("lora_" in name for name in policy.matrix_names())
    train_once(policy)
    frozen = policy.add_adapter("opponent", trainable=False, state=policy.state())
    now = policy.log_probs(rows(), temperature=1.0).detach()
    assert not frozen.trainable_parameters()
    train_once(policy)
    assert torch.equal(frozen.log_probs(rows(), temperature=1.0).detach(), now)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_reference_is_the_first_weights(directory: Path, lora: LoraSettings | None) -> None:
    policy = CausalLM.load(directory, lora=lora)
    with pytest.raises(ConfigError, match="keep_reference"):
        policy.reference_log_probs(rows(), temperature=1.0)
    policy.keep_reference()
    first = policy.log_probs(rows(), temperature=1.0).detach()
    train_once(policy)
    loss = policy.log_probs(rows(), temperature=1.0).sum()
    reference = policy.reference_log_probs(rows(), temperature=1.0)
    assert torch.equal(reference, first) and not reference.requires_grad
    assert not torch.equal(loss.detach(), first.sum())
    loss.backward()  # the graph made before the reference ran is whole
    other = CausalLM.load(directory, lora=lora)
    state = policy.reference_state()
    assert state is not None
    other.load_reference(state)
    assert torch.equal(other.reference_log_probs(rows(), temperature=1.0), first)


# State


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_state_round_trip(directory: Path, lora: LoraSettings | None) -> None:
    policy = CausalLM.load(directory, lora=lora)
    train_once(policy)
    state = policy.state()
    other = CausalLM.load(directory, lora=lora, seed=9)
    other.load_state(state)
    assert torch.equal(other.log_probs(rows(), temperature=1.0), policy.log_probs(rows(), temperature=1.0))
    train_once(policy)
    assert all(torch.equal(state[name], tensor) for name, tensor in other.state().items())  # it was a copy


def test_load_state_names_the_first_mismatch_and_changes_nothing(directory: Path) -> None:
    policy = CausalLM.load(directory)
    before = policy.state()
    norm = "model.norm.weight"
    for wrong, words in (
        ({**before, norm: torch.zeros(3)}, r"model.norm.weight has shape \(3,\), the model needs \(32,\)"),
        ({**before, norm: before[norm].half()}, "model.norm.weight is torch.float16"),
        ({**before, "extra": torch.zeros(1)}, "has extra"),
        ({name: tensor for name, tensor in before.items() if name != norm}, "lacks model.norm.weight"),
    ):
        wrong = {name: tensor + 1 for name, tensor in wrong.items()}
        with pytest.raises(CheckpointError, match=words):
            policy.load_state(wrong)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state().items())


def test_matrix_names(directory: Path) -> None:
    policy = CausalLM.load(directory)
    names = policy.matrix_names()
    assert len(names) == 2 * 7 and "model.embed_tokens.weight" not in names
    assert all(policy.trainable_parameters()[name].ndim == 2 for name in names)


def test_dropout_is_off(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    policy = CausalLM.load(tmp_path, gradient_checkpointing=True)
    first = policy.log_probs(rows(), temperature=1.0)
    assert torch.equal(first, policy.log_probs(rows(), temperature=1.0))


# Loading


def test_loading_errors_are_clear(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        CausalLM.load(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"no config\.json"):
        CausalLM.load(tmp_path)
    pickled = save_model(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle"):
        CausalLM.load(pickled)
    cut = save_model(tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"weights of .* cannot be read"):
        CausalLM.load(cut)
    with pytest.raises(ConfigError, match="lora"):
        CausalLM.load(directory, adapters=("red",))


def test_weights_of_the_wrong_shape_or_missing_are_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(ModelError, match="weights of"):
        CausalLM.load(model)
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lack model\.layers\.2"):
        CausalLM.load(model)


def test_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    make_model(vocab_size=300).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="belongs to another model"):
        CausalLM.load(tmp_path)


def test_memory_is_estimated_and_refused_before_loading(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = CausalLM.load(directory)
    config = policy.core.model.config
    full = memory_estimate(config, micro_batch_tokens=1024)
    assert full.parameters == policy.parameter_count
    assert full.weights == 4 * full.parameters and full.optimizer == 2 * full.weights
    assert memory_estimate(config, gradient_checkpointing=True).activations < memory_estimate(config).activations
    assert memory_estimate(config, lora_rank=2).optimizer < full.optimizer
    assert memory_estimate(config, training=False).gradients == 0
    assert (available_memory() or 0) > 0
    with pytest.raises(ModelError, match=r"needs about .* LoRA"):
        refuse_if_too_large(full, full.total - 1, model="m", device="cpu")
    monkeypatch.setattr("sparring.policies.loading.available_memory", lambda device: 1000)
    with pytest.raises(ModelError, match="even its weights do not fit"):
        CausalLM.load(directory)
    assert memory.count_parameters(config)[0] == full.parameters


def test_half_precision_files_become_fp32_master_weights(directory: Path, tmp_path: Path) -> None:
    model = make_model()
    model.half().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == torch.float16
    policy = CausalLM.load(tmp_path)
    assert {tensor.dtype for tensor in policy.state().values()} == {torch.float32}
