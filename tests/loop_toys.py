"""What the tests of the loops share: a random small Llama, rewards that any reply earns, an environment that settles
late, and runs compared to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from model_fixtures import make_model, make_tokenizer
from sparring.checkpoints import latest, read_checkpoint
from sparring.config import SharedConfig
from sparring.errors import EnvError
from sparring.files import read_jsonl
from sparring.settings_io import from_settings
from sparring.types import Outcome, PromptParts, Seat, StepOutcome, Turn, TurnId

TIMES = ("seconds", "tokens_per_second")
SMALL: dict[str, Any] = {
    "ticks": 6,
    "worlds": 2,
    "agents_per_team": 1,
    "min_batch": 4,
    "sampling": {"max_new_tokens": 6},
    "optimizer": {"learning_rate": 1e-2},
    "reward": "loop_toys:reply_reward",
    "quiet": True,
}
"""A run of a second or two that makes a real step in every tick."""


def random_model(directory: Path, seed: int = 0) -> str:
    """A model directory: the fixtures' Llama, with room for the market's prompts."""
    model = make_model(seed)
    model.config.max_position_embeddings = 2048
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return str(directory)


def small(model: str, **settings: Any) -> SharedConfig:
    return from_settings(SharedConfig, {"model": model, **SMALL, **settings})


# Rewards, found as ``loop_toys:name``


def reply_reward(turn: Turn, outcome: Outcome) -> float:
    """Even ids earn: it differs from reply to reply, whatever the reply says."""
    return sum(token % 2 == 0 for token in turn.reply_ids) / len(turn.reply_ids)


def equal_reward(turn: Turn, outcome: Outcome) -> float:
    return 0.1


def judge_fails_on_blue(turn: Turn, outcome: Outcome) -> float:
    if turn.team == "blue":
        raise RuntimeError("the judge is asleep")
    return reply_reward(turn, outcome)


# An environment whose turns settle two ticks later, and all at the end


class Say(msgspec.Struct, frozen=True, tag_field="action", tag="say"):
    text: str


class Seen(msgspec.Struct, frozen=True):
    tick: int


class Late(msgspec.Struct, frozen=True):
    delay: int


def quiet(observation: object, rng: object) -> Say:
    return Say("hush")


class LateEnv:
    name = "late"
    teams = ("red", "blue")
    rules = "Say something."
    team_rules: Mapping[str, str] = {"red": "Red.", "blue": "Blue."}
    action_type: object = Say
    facts_type = Late
    bots: Mapping[str, Any] = {"quiet": quiet}

    def __init__(self, *, delay: int = 2, length: int = 5) -> None:
        self.delay, self.length = delay, length

    def reset(self, *, seats: Sequence[Seat], seed: int, episode: int) -> None:
        self.state: dict[str, Any] = {
            "agents": [seat.agent for seat in seats], "episode": episode, "tick": 0, "open": []
        }  # fmt: skip

    def observe(self) -> Mapping[str, object]:
        tick = self.state["tick"]
        return {agent: Seen(tick) for agent in self.state["agents"]} if tick < self.length else {}

    def render(self, observation: object, *, newest: int | None = None) -> PromptParts:
        return PromptParts(shared=f"Tick {observation.tick}", private="")  # type: ignore[attr-defined]

    def step(self, actions: Mapping[str, object]) -> StepOutcome:
        state = self.state
        if set(actions) != set(self.observe()):
            raise EnvError("one action of every agent")
        state["open"] += [[agent, state["tick"]] for agent in state["agents"]]
        state["tick"] += 1
        done = state["tick"] == self.length
        ripe = [turn for turn in state["open"] if done or state["tick"] - turn[1] > self.delay]
        state["open"] = [turn for turn in state["open"] if turn not in ripe]
        return StepOutcome(
            outcomes=tuple(
                Outcome(
                    turn=TurnId(episode=state["episode"], agent=agent, tick=tick), facts=Late(state["tick"] - tick),
                    settled_at=state["tick"],
                )
                for agent, tick in ripe
            ),
            done=done,
        )  # fmt: skip

    def snapshot(self) -> bytes:
        return json.dumps(self.state).encode()

    def restore(self, data: bytes) -> None:
        self.state = json.loads(data)


class CapitalTeam(LateEnv):
    """No persona covers its team."""

    teams = ("purple",)
    team_rules: Mapping[str, str] = {"purple": "Purple."}


# Runs compared


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint: weights, moments, gate history."""
    newest = latest(run / "checkpoints")
    assert newest is not None
    return {
        f"{file}/{name}": tensor
        for file, group in read_checkpoint(newest).tensors.items()
        for name, tensor in group.items()
    }


def final_state(run: Path) -> dict[str, Any]:
    """The newest checkpoint's ``state.json``, without times and without how often the run was started."""
    newest = latest(run / "checkpoints")
    assert newest is not None
    state = json.loads(read_checkpoint(newest).documents["state.json"])
    return _plain(state)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        timeless = {key: item for key, item in value.items() if key != "incarnation" and not _is_time(key)}
        return {key: _plain(item) for key, item in timeless.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _is_time(name: str) -> bool:
    return any(word in name for word in TIMES)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl`` without times."""
    return [
        {name: value for name, value in row.items() if not _is_time(name)} for row in read_jsonl(run / "metrics.jsonl")
    ]


def transcripts(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of every transcript, by file; versions without the incarnation."""
    return {
        file.name: [{**row, "version": str(row["version"]).partition(".")[2]} for row in read_jsonl(file)]
        for file in sorted((run / "episodes").iterdir())
    }


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, moments, gate, state, metrics and transcripts of both, to the bit."""
    mine, theirs = final_tensors(one), final_tensors(other)
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs"
    for read in (final_state, metrics, transcripts):
        found = differences(read(one), read(other))
        assert not found, f"{read.__name__}: " + "\n".join(found[:10])


def differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two documents differ, for the message of a failed test."""
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        return [found for key in mine for found in differences(mine[key], theirs[key], f"{path}.{key}")]
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [found for number, (a, b) in pairs for found in differences(a, b, f"{path}[{number}]")]
    return [] if mine == theirs else [f"{path}: {str(mine)[:200]} != {str(theirs)[:200]}"]
