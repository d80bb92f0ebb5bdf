"""The panel gives every player the same situations and the same luck; cloning learns from the best fifth of each team."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from loop_toys import random_model, small
from sparring.agents.personas import assign
from sparring.config import EvalConfig
from sparring.envs.contract import Env
from sparring.envs.load import load_env
from sparring.envs.market.bots import BOTS
from sparring.envs.market.records import MarketObservation
from sparring.envs.market.situations import MarketSituation, MarketSuite
from sparring.errors import CheckpointError, ConfigError
from sparring.evaluation.cloning import best_replies
from sparring.evaluation.evaluate import evaluate_run, suite_of
from sparring.evaluation.panel import play_bot, play_policy
from sparring.files import compress_frame
from sparring.inference.sampler import InProcessSampler
from sparring.loops.shared import train_shared
from sparring.runs import load_policy
from sparring.types import SamplingSettings


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model(tmp_path_factory.mktemp("model"))


def suite() -> list[MarketSituation]:
    return list(MarketSuite().situations(count=20, seed=5))


# Panel


def test_twins_are_one_world_and_one_persona() -> None:
    by_key: dict[str, list[MarketSituation]] = {}
    for situation in suite():
        by_key.setdefault(situation.key, []).append(situation)
    pairs = [pair for pair in by_key.values() if len(pair) == 2]
    assert len(pairs) >= 7
    for pair in pairs:
        assert {situation.kind for situation in pair} == {"attack", "honest"} and pair[0].team == pair[1].team
        seen = []
        for situation in pair:
            env, agent = situation.begin()
            observation = env.observe()[agent]
            assert isinstance(observation, MarketObservation) and len(observation.inbox) == 1
            seen.append(
                (observation.handle, observation.cash, observation.vault, observation.secret, observation.values)
            )
        assert seen[0] == seen[1]
    first = pairs[0]
    personas = {assign(s.team, 1, rng=Random(f"3/{s.key}")) for s in first}
    assert len(personas) == 1


def test_a_situation_plays_out_the_same_way_every_time() -> None:
    for bot in ("honest", "careless", "attacker"):
        assert play_bot(BOTS[bot], suite(), seed=1) == play_bot(BOTS[bot], suite(), seed=1)


def test_every_policy_draws_the_same_numbers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Any]] = []
    real = InProcessSampler.sample

    def spy(self: InProcessSampler, requests: Any, settings: SamplingSettings) -> Any:
        asked.append(list(requests))
        return real(self, requests, settings)

    monkeypatch.setattr(InProcessSampler, "sample", spy)
    policy, situations = load_policy(model, training=False), suite()
    settings = SamplingSettings(max_new_tokens=4)
    one = play_policy(policy, situations, settings, seed=2)
    with torch.no_grad():
        for tensor in policy.core.model.parameters():
            tensor.add_(0.01)
    play_policy(policy, suite(), settings, seed=2)
    assert asked[0] == asked[1]  # prompts, personas and keys, whatever the weights
    assert len({request.key for request in asked[0]}) == len(situations) == len(one)


def test_an_environment_without_a_suite_says_so(model: str) -> None:
    env: Env = load_env("loop_toys:LateEnv")
    with pytest.raises(ConfigError, match="late declares no evaluation suite"):
        suite_of(env)


# Cloning


def write_transcript(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / "episodes").mkdir(parents=True)
    data = b"".join(
        msgspec.json.encode({"policy": "shared", "tick": 1, "prompt_ids": [1, 2], **row}) + b"\n" for row in rows
    )
    (run / "episodes" / "000000.jsonl.zst").write_bytes(compress_frame(data))


def test_cloning_takes_the_best_fifth_of_each_team(tmp_path: Path) -> None:
    rows = [{"team": "red", "reward": float(i), "reply_ids": [i]} for i in range(10)]
    rows += [{"team": "blue", "reward": -float(i), "reply_ids": [100 + i]} for i in range(5)]
    rows += [{"team": "gray", "reward": 1.0, "reply_ids": [200 + i]} for i in range(4)]  # equal: the first
    rows += [
        {"team": "red", "reward": None, "reply_ids": [300]},
        {"team": "red", "reward": 99.0, "reply_ids": [301], "policy": "frozen:x"},
    ]
    write_transcript(tmp_path / "run", rows)
    best, count = best_replies(tmp_path / "run", "shared")
    assert count == 19
    assert [row.token_ids[2:] for row in best] == [(100,), (200,), (9,), (8,)]
    assert all(row.positions == (2,) for row in best)
    late = [{"team": "red", "reward": 50.0, "reply_ids": [400], "tick": 3}]
    write_transcript(tmp_path / "later", rows + late)
    assert best_replies(tmp_path / "later", "shared", until=2) == (best, count)
    assert best_replies(tmp_path / "later", "shared")[1] == 20
    with pytest.raises(CheckpointError, match="no transcripts of policy 'other'"):
        best_replies(tmp_path / "run", "other")


# The whole evaluation


@pytest.mark.parametrize(
    "settings",
    [{}, {"adapters": "per_team", "players": {"gray": "bot:honest"}, "trainable": ("blue",), "min_batch": 2}],
    ids=["shared", "adapters-and-a-bot"],
)
def test_a_run_is_evaluated_whole(settings: dict[str, Any], model: str) -> None:
    run = train_shared(small(model, ticks=3, **settings)).run
    report = evaluate_run(EvalConfig(run=run, situations=20, quiet=True))
    assert {"start", "cloned", "trained", "bot_honest"} <= set(report.estimates)
    row = report.flat()
    for name in ("blue_loss_start", "blue_loss_cloned", "blue_loss_trained", "service_start", "service_trained"):
        assert {name, f"{name}_low", f"{name}_high"} <= set(row)
    assert report.cloning is not None and report.cloning.chosen >= 1
    assert "trained - start" in report.render()
    again = evaluate_run(EvalConfig(run=run, situations=20, quiet=True))
    assert str(again.estimates) == str(report.estimates)


def test_the_worst_opponent_is_found_among_start_trained_past_and_named_ones(model: str) -> None:
    run = train_shared(small(model, ticks=3, adapters="per_team", min_batch=2, checkpoint={"every": 1, "keep": 3})).run
    with pytest.raises(ConfigError, match="has the policies blue, gray, red"):
        evaluate_run(EvalConfig(run=run, situations=20, quiet=True, cloning=False, opponents=(run,)))
    named = f"{run}#red"
    report = evaluate_run(EvalConfig(run=run, situations=20, quiet=True, cloning=False, opponents=(named,)))
    past = ["past_step-000001", "past_step-000002"]
    assert list(report.headline) == ["scripted", "start", "trained", *past, named]
    assert list(report.duels) == list(report.headline)[1:]
    assert report.duels[named] == report.duels["trained"]  # the same weights, under two names
    for side in ("start", "trained"):
        assert report.headline["scripted"][side] == report.estimates[side]["safety_service"]
        opponent, worst = report.worst(side)
        assert worst.value == min(found[side].value for found in report.headline.values())
        assert report.flat()[f"headline_{side}_opponent"] == opponent
    assert "worst" in report.render() and named in report.render()
    assert evaluate_run(EvalConfig(run=run, situations=20, quiet=True, cloning=False, step=2)).headline.keys() == {
        "scripted", "start", "trained", "past_step-000001",
    }  # fmt: skip
