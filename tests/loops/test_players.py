"""Who plays, who learns, and what becomes of every turn."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from loop_toys import differences, final_tensors, metrics, small, transcripts
from sparring.checkpoints import list_checkpoints
from sparring.cli import main
from sparring.errors import ModelError
from sparring.learning import settings as learning_settings
from sparring.loops import shared
from sparring.loops.shared import train_shared
from sparring.rundir import find_run
from sparring.runs import load_policy, run_config
from sparring.types import Experience, Outcome, Turn

LATE: dict[str, Any] = {"env": "loop_toys:LateEnv", "agents_per_team": 2}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Experience]:
    """Everything that reaches the learner, in order."""
    seen: list[Experience] = []
    real = shared.learner_step

    def spy(policy: Any, experiences: Any, *arguments: Any, **keywords: Any) -> Any:
        seen.extend(experiences)
        return real(policy, experiences, *arguments, **keywords)

    monkeypatch.setattr(shared, "learner_step", spy)
    return seen


def start_of(model: str) -> dict[str, torch.Tensor]:
    return load_policy(model).state()


def moved(run: str | Path, start: dict[str, torch.Tensor], policy: str = "shared") -> bool:
    end = final_tensors(Path(run))
    return any(not torch.equal(end[f"policy-{policy}.safetensors/{name}"], tensor) for name, tensor in start.items())


# What trains


@pytest.mark.parametrize("settings", [LATE, {}], ids=["late", "market"])
def test_settled_turns_train_once_each_and_nothing_else_does(
    settings: dict[str, Any], model: str, trained: list[Experience]
) -> None:
    config = small(model, min_batch=1, checkpoint={"every": 100}, **settings)
    run = Path(train_shared(replace(config, ticks=4, run="a")).run)
    train_shared(replace(config, ticks=9, run="a"), resume=run)
    times = Counter(experience.source for experience in trained)
    assert set(times.values()) == {1}
    settled = {
        (row["episode"], row["agent"], row["env_tick"]): row["reward"]
        for rows in transcripts(run).values()
        for row in rows
    }
    assert {(source.episode, source.agent, source.tick) for source in times} == set(settled)
    sampled = sum(sum(value for name, value in row.items() if name.startswith("replies/")) for row in metrics(run))
    assert len(settled) <= sampled and (settings or len(settled) == sampled)
    if settings:  # two episodes of 4 agents and 5 ticks are over but for the last tick; what is open did not train
        assert len(settled) < sampled


def test_a_turn_that_no_judge_scored_does_not_train(model: str, trained: list[Experience]) -> None:
    report = train_shared(small(model, reward="loop_toys:judge_fails_on_blue"))
    assert {experience.team for experience in trained} == {"red", "gray"}
    assert report.unscored == {"RuntimeError": 12} and "blue" not in report.reward_mean


def test_only_trainable_teams_train_a_policy_that_others_share(model: str, trained: list[Experience]) -> None:
    report = train_shared(small(model, trainable=("blue",), min_batch=2))
    assert {experience.team for experience in trained} == {"blue"} and len(trained) == 12
    assert report.replies == 36 and moved(report.run, start_of(model))


def test_stale_turns_are_left_out_and_counted(model: str, trained: list[Experience]) -> None:
    report = train_shared(small(model, **LATE, ticks=10, min_batch=1, loss={"max_version_lag": 1}))
    assert report.stale_replies > 0 and report.stale_replies + len(trained) <= report.replies
    assert {experience.version.step for experience in trained} != {0}
    everything = train_shared(small(model, **LATE, ticks=10, min_batch=1))
    assert everything.stale_replies == 0 and everything.trained_replies == report.trained_replies + report.stale_replies


def test_min_batch_is_counted_for_each_policy(model: str, trained: list[Experience]) -> None:
    train_shared(small(model, adapters="per_team", players={"gray": "bot:honest"}, worlds=1, min_batch=3, ticks=7))
    assert Counter(experience.policy for experience in trained) == {"red": 6, "blue": 6}


# The step


def test_equal_rewards_make_no_step_and_the_run_says_so(model: str) -> None:
    report = train_shared(small(model, reward="loop_toys:equal_reward"))
    assert report.steps == {"shared": 0} and not moved(report.run, start_of(model))
    assert {row["skipped/shared"] for row in metrics(Path(report.run))} == {"equal_rewards"}


def test_the_order_in_which_turns_settle_changes_no_bit(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train_shared(small(model, **LATE, run="plain"))
    real = shared.advance

    def backwards(*arguments: Any) -> list[tuple[Turn, Outcome]]:
        return real(*arguments)[::-1]

    monkeypatch.setattr(shared, "advance", backwards)
    other = train_shared(small(model, **LATE, run="backwards"))
    mine, theirs = final_tensors(Path(plain.run)), final_tensors(Path(other.run))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert moved(plain.run, start_of(model))


def test_the_order_of_tables_and_of_what_was_decided_changes_no_bit(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train_shared(small(model, run="plain"))
    real = shared.decide

    def backwards(tables: Any, *arguments: Any, **keywords: Any) -> Any:
        decided = real(tables[::-1], *arguments, **keywords)[::-1]
        return [replace(one, actions=dict(reversed(one.actions.items())), turns=one.turns[::-1]) for one in decided]

    monkeypatch.setattr(shared, "decide", backwards)
    other = train_shared(small(model, run="backwards"))
    mine, theirs = final_tensors(Path(plain.run)), final_tensors(Path(other.run))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_on_policy_the_learner_scores_what_the_sampler_sampled(model: str) -> None:
    for number, settings in enumerate((
        {}, {"adapters": "shared"}, {"sampling": {"temperature": 0.7, "top_p": 0.8, "max_new_tokens": 6}}
    )):  # fmt: skip
        report = train_shared(small(model, **settings, run=f"r{number}"))
        rows = [row for row in metrics(Path(report.run)) if "skipped/shared" not in row]
        assert len(rows) >= 4 and {row["version_lag"] for row in rows} == {0.0}
        assert all(abs(row["mean_ratio"] - 1) < 1e-3 and abs(row["max_ratio"] - 1) < 1e-3 for row in rows)


def test_off_policy_the_ratio_is_not_one(model: str) -> None:
    rows = metrics(Path(train_shared(small(model, **LATE, min_batch=1, ticks=10)).run))
    assert any(row.get("version_lag", 0.0) > 0.5 and abs(row["max_ratio"] - 1) > 1e-3 for row in rows)


def test_coded_keys_and_values_are_known_to_the_ratio(model: str) -> None:
    """On-policy, yet what was sampled is the coded model's: the ratio is near 1 and not 1."""
    rows = metrics(Path(train_shared(small(model, kv={"key_bits": 4, "value_bits": 3})).run))
    ratios = [row["mean_ratio"] for row in rows if "skipped/shared" not in row]
    assert len(ratios) >= 4 and all(0.5 < ratio < 2.0 for ratio in ratios)  # heads of 8 numbers
    assert any(abs(ratio - 1) > 1e-4 for ratio in ratios)


# Players


def test_bots_and_frozen_models_play_and_do_not_learn(model: str, trained: list[Experience]) -> None:
    players = {"red": "bot:attacker", "gray": f"frozen:{model}"}
    report = train_shared(small(model, players=players, min_batch=2))
    assert {experience.team for experience in trained} == {"blue"}
    assert report.replies == 24  # of blue and gray
    again = train_shared(small(model, players={"red": f"frozen:{report.run}", "gray": "bot:honest"}, min_batch=2))
    assert {experience.team for experience in trained} == {"blue"} and again.replies == 24  # red's too


class Chat(BaseHTTPRequestHandler):
    """An OpenAI chat endpoint that refuses the first message it was sent."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body)
        content = '{"action":"wait"}' if self.path == "/v1/chat/completions" else ""
        answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    Chat.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_remote_model_plays_by_http_and_is_told_the_full_rules(
    endpoint: str, model: str, trained: list[Experience]
) -> None:
    report = train_shared(small(model, players={"red": f"openai:{endpoint}#big"}, ticks=3, worlds=1, min_batch=2))
    assert len(Chat.asked) == 3 and {body["model"] for body in Chat.asked} == {"big"}
    system, user = Chat.asked[0]["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert '"action":"wait"' in system["content"] and "You are red" in user["content"]
    assert {experience.team for experience in trained} == {"blue", "gray"} and report.replies == 6


def test_an_endpoint_that_fails_in_the_middle_loses_nothing(
    endpoint: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"players": {"red": f"openai:{endpoint}#big"}, "ticks": 5, "worlds": 1, "min_batch": 2}
    right = Chat.do_POST

    def fails(self: Chat) -> None:
        if len(Chat.asked) == 3:
            self.send_error(503)
        else:
            right(self)

    monkeypatch.setattr(Chat, "do_POST", fails)
    with pytest.raises(ModelError, match="503"):
        train_shared(small(model, run="broken", **settings))
    run = find_run("broken")
    assert [place.name for place in list_checkpoints(run / "checkpoints")] == ["step-000003"]
    monkeypatch.setattr(Chat, "do_POST", right)
    resumed = train_shared(run_config(run), resume=run)
    whole = train_shared(small(model, run="whole", **settings))
    assert resumed.ticks == whole.ticks == 5
    states = [load_policy(name, training=False).state() for name in ("broken", "whole")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(("settings", "rate"), [({}, 4e-4), ({"optimizer": {"learning_rate": 0.02}}, 0.02)])
def test_a_small_model_learns_at_its_own_rate_and_the_run_says_so(
    settings: dict[str, Any], rate: float, model: str
) -> None:
    report = train_shared(small(model, ticks=1, **({"optimizer": {}} | settings)))
    assert run_config(find_run(report.run)).optimizer.learning_rate == rate


@pytest.mark.parametrize(("adapters", "rate"), [("none", 1e-5), ("shared", 1e-4), ("per_team", 1e-4)])
def test_a_large_model_learns_more_slowly(
    adapters: str, rate: float, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_settings, "SMALL_MODEL", 1)
    report = train_shared(small(model, ticks=1, adapters=adapters, optimizer={}))
    assert run_config(find_run(report.run)).optimizer.learning_rate == rate


# Errors: one line, exit code 2, nothing half written

TRAIN = ("train", "shared", "--ticks", "2", "--worlds", "1", "--quiet", "true")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--env", "loop_toys:CapitalTeam", "--reward", "loop_toys:reply_reward"), "no persona covers team 'purple'"),
        (("--players.bleu", "bot:honest"), "did you mean 'blue'"),
        (("--trainable", "bleu"), "did you mean 'blue'"),
        (("--players.red", "bot:atacker"), "did you mean 'attacker'"),
        (
            ("--players.red", "bot:honest", "--players.blue", "bot:honest", "--players.gray", "bot:honest"),
            "nothing to train",
        ),
        (("--players.red", "frozen:no/such/model"), "no/such/model"),
        (("--players.red", "openai:http://127.0.0.1:9/v1#x"), "cannot be reached"),
        (("--model", "no/such/model/there"), "does not exist"),
        (("--env", "no_module:Env"), "there is no module no_module"),
        (("--env", "loop_toys:NoEnv"), "has no NoEnv"),
        (("--reward", "loop_toys:nothing"), "has no 'nothing'"),
        (("--env", "loop_toys:LateEnv", "--env-settings.delay", "0"), "reads the market's facts"),
        (("--env-settings.tickz", "3"), "tickz"),
        (("--kv.key-bits", "4"), "kv.value_bits is not set"),
        (("--kv.key-bits", "5", "--kv.value-bits", "3"), "kv.key_bits is 5: choose 2, 3, 3.5 or 4"),
        (("--kv.key-bits", "3.5", "--kv.value-bits", "3"), "the model's heads have 8 numbers, not a multiple of 16"),
        (("--kv.window", "8"), "nothing is coded"),
        (("--resume", "nowhere"), "no run 'nowhere'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--model" in arguments or "--resume" in arguments else (*arguments, "--model", model)
    assert main([*TRAIN, *given]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("sparring: ")]
    assert len(lines) == 1 and message in lines[0], captured.err
    assert not list(Path("runs").glob("*/checkpoints/step-*"))


def test_a_damaged_checkpoint_and_another_model_are_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from model_fixtures import make_tokenizer

    train_shared(small(model, run="a", ticks=2))

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["train", "shared", "--resume", "a", "--ticks", "4", *arguments]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sparring: ")]
        assert len(errors) == 1
        return errors[0]

    other = LlamaForCausalLM(LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=2048, tie_word_embeddings=True,
    ))  # fmt: skip
    other.save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    assert "shape" in refused("--model", str(tmp_path / "other"))
    weights = Path("runs/a/checkpoints/step-000002/policy-shared.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "policy-shared.safetensors" in refused()
    weights.unlink()
    assert "policy-shared.safetensors" in refused()
    weights.write_bytes(content)
    state = Path("runs/a/checkpoints/step-000002/state.json")
    state.write_bytes(state.read_bytes().replace(b'"tick":2', b'"tick":1', 1))
    assert "state.json" in refused()
    assert differences(metrics(Path("runs/a")), metrics(Path("runs/a"))) == [] and len(metrics(Path("runs/a"))) == 2
