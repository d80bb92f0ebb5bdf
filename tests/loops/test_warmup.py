"""The supervised start: the prompts of rollout, replies with their end, a model that can be trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from loop_toys import LateEnv, quiet, small
from sparring.agents.agent import parse_action
from sparring.cli import main
from sparring.config import SharedConfig, WarmupConfig
from sparring.envs.load import load_env
from sparring.errors import ConfigError, ModelError
from sparring.loops import warmup as module
from sparring.loops.rollout import BotPlayer, PolicyPlayer, decide, open_table
from sparring.loops.shared import train_shared
from sparring.loops.warmup import bot_play, warmup
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import ScoreRow
from sparring.runs import load_policy
from sparring.types import ParseFailure, SamplingSettings


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VALIDITY_PROMPTS", 8)
    monkeypatch.setattr(module, "HELD_OUT", 4)
    monkeypatch.setattr(module, "LEAST_EPISODES", 1)


def brief(model: str, **settings: Any) -> WarmupConfig:
    defaults: dict[str, Any] = {
        "out": "warm", "env": "loop_toys:LateEnv", "examples": 16, "epochs": 20, "batch_size": 4, "learning_rate": 1e-2,
        "quiet": True,
    }  # fmt: skip
    return WarmupConfig(model=model, **{**defaults, **settings})


@pytest.mark.parametrize("adapters", ["none", "shared"])
def test_a_model_learns_to_play_and_train_shared_takes_it(adapters: Any, model: str) -> None:
    report = warmup(brief(model, adapters=adapters, epochs=20 if adapters == "none" else 40))
    assert report.held_out_loss_before is not None and report.held_out_loss_after is not None
    assert report.held_out_loss_after < (0.2 if adapters == "none" else 1.0) < 2.0 < report.held_out_loss_before
    assert report.valid_share is not None and report.valid_share == 1 - sum(report.failures.values()) / 8
    assert (report.examples, report.batch_size, report.source) == (16, 4, "bots of late")
    assert sorted(path.name for path in Path().iterdir()) == ["warm"]
    assert (Path("warm/adapter/adapter_model.safetensors").is_file()) == (adapters == "shared")
    assert json.loads(Path("warm/warmup.json").read_text())["valid_share"] == report.valid_share
    state = load_policy("warm").state()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    run = train_shared(small("warm", env="loop_toys:LateEnv", sampling={"max_new_tokens": 40}, ticks=3))
    if adapters == "none":
        assert report.valid_share >= 0.6 and run.valid_share >= 0.5


def test_prompts_are_those_of_rollout_and_the_reply_ends(model: str) -> None:
    env, config = load_env("market"), WarmupConfig(out="x", agents_per_team=1)
    policy = load_policy(model, name="warmup")
    play = bot_play(policy, env, config, first_episode=3)
    shown = [example for _, example in (next(play) for _ in range(9))]
    env = load_env("market")
    table = open_table(env, number=0, episode=3, seed=10_000_000, agents_per_team=1)
    players: dict[str, Any] = dict.fromkeys(env.teams, PolicyPlayer.of(policy, trained=False))
    (decided,) = decide([table], players, SamplingSettings(max_new_tokens=2), seed=0)
    assert [turn.prompt_ids for turn in decided.turns] == [example.prompt_ids for example in shown[:3]]
    for example in shown:
        row = module._row(policy, example)
        start = row.positions[0]
        assert row.token_ids[:start] == example.prompt_ids == policy.chat.encode(example.messages)
        assert row.positions == tuple(range(start, len(row.token_ids)))
        assert row.token_ids[-1] in policy.chat.end_ids and policy.chat.decode(row.token_ids[start:]) == example.reply
        action = parse_action(example.reply, env.action_type, truncated=False)
        assert not isinstance(action, ParseFailure)


def test_other_worlds_than_those_of_training_and_one_seed_is_one_result(model: str) -> None:
    one, same, other = (
        warmup(brief(model, out=out, seed=seed, epochs=1)) for out, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one.held_out_loss_after == same.held_out_loss_after != other.held_out_loss_after
    first, second = load_policy("a").state(), load_policy("b").state()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_settings_that_are_left_out_follow_from_the_size(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(model)
    config = WarmupConfig(out="x")
    assert module._by_size(config, policy) == module._Chosen(examples=8000, batch_size=32, learning_rate=1e-3)
    monkeypatch.setattr(CausalLM, "parameter_count", 135_000_000)
    assert module._by_size(config, policy) == module._Chosen(examples=400, batch_size=4, learning_rate=2e-4)
    lora = module._by_size(replace(config, adapters="shared", examples=7), policy)
    assert lora == module._Chosen(examples=7, batch_size=4, learning_rate=1e-3)


def test_demonstrators_have_shares_and_must_exist() -> None:
    class Shown(LateEnv):
        demonstrators: ClassVar[Any] = {"red": (("quiet", 0.5),), "blue": (("quiet", 1.0),)}

    assert module._casts(Shown()) == {"red": ([quiet], [0.5]), "blue": ([quiet], [1.0])}
    assert module._casts(LateEnv()) == {"red": ([quiet], [1.0]), "blue": ([quiet], [1.0])}
    Shown.demonstrators = {"red": (("quite", 0.5),), "blue": (("quiet", 1.0),)}
    with pytest.raises(ConfigError, match="no bot 'quite'"):
        module._casts(Shown())
    Shown.demonstrators = {"red": (("quiet", 1.0),)}
    with pytest.raises(ConfigError, match="leave out team 'blue'"):
        module._casts(Shown())
    Shown.bots = {}
    with pytest.raises(ConfigError, match="has no bots to copy"):
        module._casts(Shown())
    assert BotPlayer(name="quiet", bot=quiet)


# Chats

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello there"}


def chats(*lines: Any) -> Path:
    path = Path("chats.jsonl")
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps({"messages": line}) for line in lines))
    return path


def test_every_turn_of_the_assistant_is_learned(model: str) -> None:
    bye = {"role": "assistant", "content": "Bye"}
    file = chats(*[[{"role": "system", "content": "Be kind."}, HI, HELLO, HI, bye]] * 3, "")
    policy = load_policy(model)
    learned, held_out = module._from_chats(file, policy, limit=None, seed=0)
    assert (len(learned), len(held_out)) == (4, 2)
    replies = [policy.chat.decode([row.token_ids[i] for i in row.positions]) for row in learned]
    assert replies == ["Hello there", "Bye"] * 2
    assert all(row.token_ids[-1] in policy.chat.end_ids for row in learned)
    report = warmup(brief(model, chats=file, examples=None, epochs=30, env="market"))
    assert report.held_out_loss_after is not None and report.held_out_loss_after < 0.5
    assert report.valid_prompts == 8 and report.valid_share == 0.0  # it has never seen an action
    alone = warmup(brief(model, out="alone", chats=chats([HI, HELLO]), examples=None, epochs=1))
    assert alone.held_out_loss_before is None and "nothing was held out" in alone.notices[-1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"chats.jsonl:2: "),
        ('{"messages": "x"}', r"chats.jsonl:2: .*messages"),
        ([{"role": "user"}], r"chats.jsonl:2: .*content"),
        ([HI], r"chats.jsonl:2: no message with role 'assistant'"),
        ([HELLO], r"chats.jsonl:2: the chat begins with the assistant"),
        ([{"role": "user", "content": "x" * 9000}, HELLO], r"chats.jsonl:2: the prompt has .* tokens"),
    ],
)
def test_a_bad_line_is_named(line: Any, message: str, model: str) -> None:
    with pytest.raises(ConfigError, match=message):
        warmup(brief(model, chats=chats([HI, HELLO], line)))
    assert not Path("warm").exists()


# Errors


def test_errors_come_before_the_work(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").mkdir()
    Path("taken/x").write_text("")
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        warmup(brief(model, out="taken"))
    with pytest.raises(ModelError, match="does not exist"):
        warmup(brief("no/such/model/there"))
    with pytest.raises(ConfigError, match="cannot read nowhere"):
        warmup(brief(model, chats=Path("nowhere")))
    empty = Path("empty.jsonl")
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="holds no chats"):
        warmup(brief(model, chats=empty))
    assert main(["warmup", "--out", "taken", "--model", model]) == 2
    assert "sparring: taken exists" in capsys.readouterr().err
    assert SharedConfig(model="tiny").model


def test_nothing_is_left_where_the_writing_fails(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CausalLM, "save_model", full)
    with pytest.raises(ConfigError, match="cannot write warm: No space left"):
        warmup(brief(model, epochs=1))
    assert not list(Path().iterdir())


def test_progress_is_shown_in_lines_off_a_terminal(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    warmup(brief(model, epochs=1, quiet=False))
    assert "warm-up: step 4/4  loss " in capsys.readouterr().err
    rows = [ScoreRow(token_ids=(1, 2), positions=(1,))]
    assert module._loss(load_policy(model), rows) is not None and module._loss(load_policy(model), []) is None
