"""Adapters of Gymnasium and PettingZoo, copies, autoreset, the joint state, and coming back to where one was."""

from __future__ import annotations

from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from sparring.envs.agents import ArrayEnv, Copies, JointState
from sparring.envs.gymnasium import GymnasiumEnv, VectorCopies, flattener, spaces_of, to_action
from sparring.envs.load_agents import load_array_env
from sparring.errors import ConfigError, EnvError
from sparring.types import ActionKind


class Count(gymnasium.Env):  # type: ignore[type-arg]
    """Observes how many steps were taken; ends at 3 (terminated) in even episodes, at 2 (truncated) in odd ones."""

    observation_space, action_space = spaces.Box(0, 100, (1,), np.float32), spaces.Discrete(2)

    def __init__(self) -> None:
        self.episode = -1

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        odd = self.episode % 2 == 1
        return np.array([self.t], np.float32), float(self.t), self.t == 3 and not odd, self.t == 2 and odd, {}


def act(env: ArrayEnv, rng: np.random.Generator) -> None:
    """Random allowed actions."""
    chosen = []
    for group in env.groups:
        shape = group.acting.shape
        if not group.spaces.choices:
            chosen.append(rng.uniform(-1, 1, (*shape, group.spaces.action_size)).astype(np.float32))
            continue
        parts, start = [], 0
        for count in group.spaces.choices:
            allowed = group.masks[..., start : start + count]
            parts.append((rng.random((*shape, count)) * allowed).argmax(-1))
            start += count
        chosen.append(np.stack(parts, axis=-1))
    env.step(chosen)


def history(env: ArrayEnv, ticks: int) -> list[Any]:
    """For the one agent in the one copy: whether it acts on what, what came of it."""
    env.reset()
    group, rows = env.groups[0], []
    for _ in range(ticks):
        acting, seen = bool(group.acting[0, 0]), float(group.observations[0, 0, 0])
        env.step([np.zeros((1, env.copies, 1), np.int64)])
        if acting:
            end = "T" if group.terminated[0, 0] else "t" if group.truncated[0, 0] else ""
            final = float(group.finals[0, 0, 0]) if end == "t" else None
            rows.append((seen, float(group.rewards[0, 0]), end, final))
    return rows


EXPECTED = [(0.0, 1.0, "", None), (1.0, 2.0, "", None), (2.0, 3.0, "T", None), (0.0, 1.0, "", None),
            (1.0, 2.0, "t", 2.0), (0.0, 1.0, "", None), (1.0, 2.0, "", None)]  # fmt: skip


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_gives_the_same_transitions(mode: AutoresetMode) -> None:
    """The final observation is the episode's own, and the step that only begins anew is nobody's."""
    vector = SyncVectorEnv([Count], autoreset_mode=mode)
    assert history(VectorCopies(vector, seed=0), 9)[:7] == EXPECTED
    assert history(Copies(lambda: GymnasiumEnv(Count()), 1, seed=0), 7) == EXPECTED


def test_spaces_become_flat_arrays_and_back() -> None:
    mixed = spaces.Dict(
        {
            "box": spaces.Box(-1, 1, (2, 2), np.float64),
            "one": spaces.Discrete(3, start=1),
            "many": spaces.MultiDiscrete([2, 3]),
            "bits": spaces.MultiBinary(2),
            "pair": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (1,)))),
        }
    )
    found = spaces_of(mixed, spaces.MultiDiscrete([2, 4]))
    sizes = {part.name: part.size for part in found.parts}
    assert sizes == {"bits": 2, "box": 4, "many": 5, "one": 3, "pair": 3} and found.observation_size == 17
    seen = {
        "box": np.array([[1, 2], [3, 4]]), "one": 3, "many": np.array([1, 0]), "bits": np.array([0, 1]),
        "pair": (1, np.array([0.5])),
    }  # fmt: skip
    flat = flattener(mixed)(seen)
    by_part = {part.name: flat[part.start : part.start + part.size].tolist() for part in found.parts}
    assert by_part == {
        "box": [1, 2, 3, 4], "one": [0, 0, 1], "many": [0, 1, 1, 0, 0], "bits": [0, 1], "pair": [0, 1, 0.5]
    }  # fmt: skip
    assert flat.dtype == np.float32 and found.choices == (2, 4)
    assert spaces_of(spaces.Discrete(2), spaces.MultiBinary(3)).choices == (2, 2, 2)
    box = spaces_of(spaces.Discrete(2), spaces.Box(-2, 2, (2, 1)))
    assert box.action is ActionKind.CONTINUOUS and box.low == (-2.0, -2.0) and box.action_size == 2
    assert to_action(spaces.Discrete(3, start=5))(np.array([1])) == 6
    assert to_action(spaces.Box(-2, 2, (2, 1)))(np.array([1.0, 2.0])).shape == (2, 1)
    with pytest.raises(EnvError, match="only Discrete"):
        spaces_of(spaces.Discrete(2), spaces.Text(3))


@pytest.mark.parametrize(
    "name",
    [
        "CartPole-v1", "Pendulum-v1", "agent_toys:Crowd", "pettingzoo:mpe2.simple_speaker_listener_v4",
        "pettingzoo:mpe2.simple_spread_v3#aec", "pettingzoo:pettingzoo.classic.tictactoe_v3",
    ],
)  # fmt: skip
def test_an_environment_comes_back_to_where_it_was(name: str) -> None:
    """Trap 36: every copy and episode has its own seed; and the open episodes can be played again from it."""
    env, rng = load_array_env(name, 3, seed=7), np.random.default_rng(0)
    env.reset()
    assert len(
        {group.observations[a, e].tobytes() for group in env.groups[:1] for a in (0,) for e in range(3)}
    ) > 1 or ("tictactoe" in name or "Crowd" in name)
    for _ in range(40):
        act(env, rng)
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(env.snapshot()))
    other, state = load_array_env(name, 3, seed=7), rng.bit_generator.state
    other.restore(saved)
    again = np.random.default_rng(0)
    again.bit_generator.state = state
    for _ in range(40):
        act(env, rng)
        act(other, again)
        assert env.episodes.tolist() == other.episodes.tolist()
        for one, two in zip(env.groups, other.groups, strict=True):
            for field in ("acting", "rewards", "terminated", "truncated", "masks"):
                assert np.array_equal(getattr(one, field), getattr(two, field)), field
            assert np.array_equal(one.observations[one.acting], two.observations[two.acting])


def test_one_that_does_not_repeat_itself_says_so() -> None:
    env, rng = load_array_env("agent_toys:Forgetful", 2, seed=0), np.random.default_rng(0)
    env.reset()
    for _ in range(20):
        act(env, rng)
    with pytest.raises(EnvError, match="does not come back to where it was"):
        for _ in range(5):
            load_array_env("agent_toys:Forgetful", 2, seed=0).restore(env.snapshot() or [])


def test_agents_die_join_and_take_turns() -> None:
    """Who acts when; what an agent earns between its turns is its own."""
    env, rng = load_array_env("agent_toys:Crowd", 1, seed=0), np.random.default_rng(0)
    env.reset()
    assert [group.agents for group in env.groups] == [("a", "b"), ("c",), ("d",)]
    acted: dict[str, list[int]] = {name: [] for name in "abcd"}
    earned = 0.0
    for t in range(9):
        for group in env.groups:
            for a in np.flatnonzero(group.acting[:, 0]).tolist():
                acted[group.agents[a]].append(t)
        act(env, rng)
        earned += float(env.groups[2].rewards[0, 0])
    assert acted["a"] == list(range(9)) and acted["c"] == list(range(2, 9)) and acted["d"] == [0, 2, 4, 6, 8]
    assert 3 <= len(acted["b"]) <= 6 and earned == pytest.approx(9 * 0.25)
    assert env.groups[0].truncated[:, 0].tolist() == [True, False] and env.groups[2].terminated[0, 0]
    assert env.episodes.tolist() == [1] and env.masked


def test_the_joint_state_is_of_all_who_are_in_the_game() -> None:
    """Dead or absent agents are zeros with a 0 bit; the state after the end is that before the next beginning."""
    env, rng = load_array_env("agent_toys:Crowd", 2, seed=3), np.random.default_rng(0)
    env.reset()
    joint = JointState(env, own_state=False)
    assert joint.now[0].shape == (2, 2, (3 + 1) * 2 + 2 + 3 + 4)
    for t in range(9):
        state = joint.now[0][0]
        for e in range(2):
            np.testing.assert_array_equal(state[e, :3], env.groups[0].observations[0, e])
            assert state[e, 3] == 1.0
            alive_b, alive_c = bool(env.groups[0].acting[1, e]), t >= 2
            assert state[e, 7] == alive_b and (alive_b or not state[e, 4:7].any())
            assert state[e, 9] == alive_c
        np.testing.assert_array_equal(joint.now[0][1][:, -4:], [[0, 1, 0, 0]] * 2)
        act(env, rng)
        joint.advance(env)
    assert env.episodes.tolist() == [1, 1]
    final = joint.final[0][0]
    np.testing.assert_array_equal(final[:, :3], 0.0)  # a's final observation
    assert final[:, 3].tolist() == [1.0, 1.0] and final[:, 7].tolist() == [0.0, 0.0] and final[:, 9].tolist() == [0, 0]
    own = JointState(env, own_state=True)
    for _ in range(9):
        act(env, rng)
        own.advance(env)
    assert own.final[0][0][:, 0].tolist() == [9.0, 9.0] and own.now[0][0][:, 0].tolist() == [0.0, 0.0]


def test_pettingzoos_agents_and_spaces() -> None:
    env = load_array_env("pettingzoo:mpe2.simple_speaker_listener_v4", 1, seed=0)
    assert [(g.agents, g.spaces.observation_size, g.spaces.choices) for g in env.groups] == [
        (("speaker_0",), 3, (3,)), (("listener_0",), 11, (5,))
    ]  # fmt: skip
    turns = load_array_env("pettingzoo:pettingzoo.classic.tictactoe_v3", 1, seed=0)
    turns.reset()
    assert turns.masked and turns.groups[0].acting[:, 0].tolist() == [True, False]
    rng, ends = np.random.default_rng(0), []
    for _ in range(60):
        act(turns, rng)
        over = turns.groups[0].terminated[:, 0]
        assert over.all() or not over.any()
        if over.any():
            ends.append(turns.groups[0].rewards[:, 0].tolist())
    assert ends and all(sum(end) == 0 for end in ends) and any(end != [0, 0] for end in ends)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPole-v99", "Gymnasium cannot make it"), ("nothing:Here", "no module nothing"),
        ("agent_toys:Mach", r"agent_toys has no Mach \(did you mean 'Match'"),
        ("pettingzoo:mpe2.nothing", "no module mpe2.nothing"), ("pettingzoo:mpe2.simple_v3#x", "write aec or parallel"),
        ("agent_toys:Nothing", "is no environment: it lacks"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_is_named(name: str, message: str) -> None:
    with pytest.raises((ConfigError, EnvError), match=message):
        load_array_env(name, 1, seed=0)
