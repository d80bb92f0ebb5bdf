"""Each distinct prefix once, and the same numbers as row by row: log-probs, gradients, counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model_fixtures import make_model, save_model
from sparring.policies import tree_attention
from sparring.policies.causal_lm import CausalLM, LoraSettings
from sparring.policies.contract import ScoreRow
from sparring.policies.language_model import LanguageModel
from sparring.policies.tree_flex import subtree_ends
from sparring.tokens.prefix_tree import distinct_prefixes, merge


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def words(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(320) for _ in range(length))


def ragged(seed: int = 0, *, groups: int = 2) -> list[ScoreRow]:
    """Rules, teams, private parts and several replies to each: four levels, ragged, with gaps in what is wanted."""
    rng = random.Random(seed)
    rows = []
    for _ in range(groups):
        rules = words(rng, 9)
        for _ in range(2):
            team = (*rules, *words(rng, rng.randrange(1, 6)))
            for _ in range(3):
                private = (*team, *words(rng, rng.randrange(1, 12)))
                for _ in range(rng.randrange(1, 4)):
                    reply = words(rng, rng.randrange(1, 9))
                    positions = [len(private) + i for i in range(len(reply)) if i == 0 or rng.random() < 0.6]
                    rows.append(ScoreRow(token_ids=(*private, *reply), positions=tuple(positions)))
    rows.append(rows[0])  # the same reply twice
    rows.append(ScoreRow(token_ids=rows[1].token_ids[:12], positions=(11,)))  # a beginning of another row
    rng.shuffle(rows)
    return rows


def chat() -> list[ScoreRow]:
    """A conversation trained at every reply: each row is the beginning of the next."""
    rng = random.Random(5)
    ids: tuple[int, ...] = ()
    rows = []
    for _ in range(4):
        ids = (*ids, *words(rng, 7))
        rows.append(ScoreRow(token_ids=(*ids, *words(rng, 4)), positions=tuple(range(len(ids), len(ids) + 4))))
        ids = rows[-1].token_ids
    return rows


def gradients(
    policy: CausalLM, rows: Sequence[ScoreRow], weights: torch.Tensor, *, temperature: float = 0.8
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    for parameter in policy.trainable_parameters().values():
        parameter.grad = None
    found = policy.log_probs(rows, temperature=temperature)
    (found * weights).sum().backward()
    return found.detach(), {
        name: parameter.grad.clone()
        for name, parameter in policy.trainable_parameters().items()
        if parameter.grad is not None
    }


def by_rows(policy: CausalLM) -> CausalLM:
    policy.core.rows_because = "told so by a test"
    return policy


def assert_equal(policy_of: Any, rows: list[ScoreRow]) -> None:
    count = sum(len(row.positions) for row in rows)
    weights = torch.randn(count, generator=torch.Generator().manual_seed(1))
    weights[::5] = 0.0
    tree, plain = policy_of(), by_rows(policy_of())
    assert tree.core.rows_because is None
    found, mine = gradients(tree, rows, weights)
    wanted, theirs = gradients(plain, rows, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert mine.keys() == theirs.keys()
    error = sum(float((mine[n] - theirs[n]).double().square().sum()) for n in mine) ** 0.5
    norm = sum(float(theirs[n].double().square().sum()) for n in theirs) ** 0.5
    assert norm > 0 and error <= 1e-5 * norm
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-3, atol=1e-5 * norm)


@pytest.mark.parametrize("rows", [ragged(0), ragged(1, groups=3), chat()], ids=["ragged", "groups", "chat"])
@pytest.mark.parametrize("budget", [8192, 70], ids=["one-pack", "packs"])
def test_gradients_and_log_probs_equal_row_by_row(directory: Path, rows: list[ScoreRow], budget: int) -> None:
    assert_equal(lambda: CausalLM.load(directory, micro_batch_tokens=budget), rows)


def test_with_gradient_checkpointing(directory: Path) -> None:
    assert_equal(lambda: CausalLM.load(directory, gradient_checkpointing=True, micro_batch_tokens=90), ragged(2))


def test_with_adapters_each_a_tree_of_its_own(directory: Path) -> None:
    def policy_of() -> CausalLM:
        policy = CausalLM.load(directory, lora=LoraSettings(rank=4), adapters=("red", "blue"))
        for name in ("red", "blue"):
            generator = torch.Generator().manual_seed(len(name))
            for parameter in policy.adapter(name).trainable_parameters().values():
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        return policy

    for name in ("red", "blue"):
        assert_equal(lambda name=name: policy_of().adapter(name), ragged(3))


@pytest.mark.parametrize("small_blocks", [False, True])
def test_siblings_attend_together_or_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: bool
) -> None:
    if small_blocks:
        monkeypatch.setattr(tree_attention, "BLOCK_TOKENS", 1)
    tree = merge([row.token_ids for row in ragged(4)])
    blocks = tree_attention.plan(tree, torch.device("cpu")).blocks
    assert (len(blocks) == len(tree.segments)) == small_blocks
    assert [s for block in blocks for s in block.own] == list(range(len(tree.segments)))
    assert_equal(lambda: CausalLM.load(directory), ragged(4))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rows", [ragged(4), ragged(5, groups=9), chat()], ids=["ragged", "long", "chat"])
def test_one_kernel_over_the_whole_tree_gives_what_blocks_give(directory: Path, rows: list[ScoreRow]) -> None:
    """What runs on GPUs; torch gives no gradients of it on a CPU, so that here only the forward pass is compared."""
    core, cpu = CausalLM.load(directory).core, torch.device("cpu")
    tree = merge([row.token_ids for row in rows])
    with torch.no_grad():
        blocks = core.tree_hidden(tree_attention.plan(tree, cpu))
        whole = core.tree_hidden(tree_attention.whole_plan(tree, cpu))
    torch.testing.assert_close(whole, blocks, rtol=1e-5, atol=1e-5)
    assert tree_attention.learner_plan(tree, cpu).whole_mask is None  # a CPU goes by blocks


def test_a_node_sees_its_ancestors_and_itself() -> None:
    rows = [row.token_ids for row in ragged(6)]
    tree = merge(rows)
    ends = subtree_ends(tree)
    seen = [{k for k in range(q + 1) if q < ends[k]} for q in range(tree.size)]
    for number in range(len(rows)):
        path = [int(node) for node in tree.nodes(number)]
        for depth, node in enumerate(path):
            assert seen[node] == set(path[: depth + 1])


def test_every_distinct_prefix_goes_forward_once(directory: Path) -> None:
    policy = CausalLM.load(directory)
    seen: list[int] = []
    policy.core.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    rows = ragged(0)
    policy.log_probs(rows, temperature=1.0)
    distinct = len({row.token_ids[:n] for row in rows for n in range(1, row.positions[-1] + 1)})
    assert seen == [distinct] and policy.positions(rows) == distinct
    assert distinct < 0.6 * sum(row.positions[-1] for row in rows)
    seen.clear()
    by_rows(policy).log_probs(rows, temperature=1.0)
    assert sum(seen) >= policy.positions(rows) == sum(row.positions[-1] for row in rows)


def test_packs_keep_to_the_budget(directory: Path) -> None:
    policy = CausalLM.load(directory, micro_batch_tokens=60)
    seen: list[int] = []
    policy.core.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    rows = ragged(6)
    policy.log_probs(rows, temperature=1.0)
    assert len(seen) >= 3 and max(seen) <= 60 and sum(seen) == policy.positions(rows)
    assert sum(seen) >= distinct_prefixes([row.token_ids[: row.positions[-1]] for row in rows])


def test_rows_that_share_nothing_are_padded_as_before(directory: Path) -> None:
    policy = CausalLM.load(directory)
    seen: list[tuple[int, ...]] = []
    policy.core.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    policy.log_probs([ScoreRow(token_ids=(n, 5, 6), positions=(2,)) for n in range(4)], temperature=1.0)
    assert seen == [(4, 2)]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"attention_dropout": 0.1}, "dropout"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "length of the row"),
        ({"sliding_window": 8}, "window of 8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_models_that_cannot_go_row_by_row_and_say_why(settings: dict[str, Any], reason: str) -> None:
    model = make_model()
    for name, value in settings.items():
        setattr(model.config, name, value)
    core = LanguageModel(model)
    assert core.rows_because is not None and reason in core.rows_because
    rows = ragged(0)
    assert core.positions(rows) == sum(row.positions[-1] for row in rows)
    assert core.log_probs(rows, temperature=1.0, top_p=1.0).shape == (sum(len(row.positions) for row in rows),)


def test_attention_that_is_not_ours_to_plug_into() -> None:
    model = make_model()
    model.set_attn_implementation("eager")
    assert LanguageModel(model).rows_because == "its attention is eager, not sdpa"
