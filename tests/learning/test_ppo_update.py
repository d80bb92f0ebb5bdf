"""A whole update: equal to rivals', equal to separate learners, blind to padding, and harmless when it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_fixtures import CONTINUOUS, DISCRETE, MULTI, random_rollout
from sparring.learning import ppo_update
from sparring.learning.ppo import gae
from sparring.learning.ppo_batch import by_policy, by_rollout, collate, successors
from sparring.learning.ppo_update import StackLearner, update
from sparring.learning.settings import PPOSettings
from sparring.policies.actor_critic import ActorCriticStack, Shape
from sparring.types import ActionKind, PolicyVersion, Rollout, Spaces, UpdateReport

RIVALS = Path(__file__).parent / "rivals"
START = PolicyVersion(incarnation=1, step=0)


def learner(*names: str, spaces: Spaces = DISCRETE, dtype: Any = torch.float64, state_size: int = 0,
            hidden: tuple[int, ...] = (8, 8), squash: bool = False, **settings: Any) -> StackLearner:  # fmt: skip
    stack = ActorCriticStack(Shape(spaces=spaces, hidden=hidden, state_size=state_size, squash=squash), dtype=dtype)
    made = StackLearner.of(
        stack, PPOSettings(**{"minibatch": 8, "epochs": 3, **settings}), sizes=(spaces.observation_size, state_size)
    )
    for name in names:
        stack.add(name, seed=0)
        made.join(START)
    return made


def run(made: StackLearner, data: Mapping[str, list[Rollout]], **other: Any) -> dict[str, UpdateReport]:
    return update(made, data, **{"algorithm": "ppo", "progress": 0.0, "seed": 0, **other})


def state(made: StackLearner, row: int) -> list[Any]:
    own = made.normalizers[row]
    return [
        made.policies.parameters[row], made.first[row], made.second[row],
        torch.from_numpy(made.steps[row].copy()),
        *(torch.from_numpy(m.mean) for m in (own.observations, own.states, own.returns)),
        *(torch.from_numpy(m.squares) for m in (own.observations, own.states, own.returns)),
    ]  # fmt: skip


# Rivals


class Orders:
    """Hands out a rival's own orders of steps."""

    def __init__(self, orders: Any) -> None:
        self.left = list(orders)

    def permutation(self, count: int) -> Any:
        return self.left.pop(0)


def sb3_weights(found: Mapping[str, Any], continuous: bool) -> torch.Tensor:
    """stable-baselines3's weights in the order of our row; a Linear there is (out, in), our hidden layers (in, out)."""
    parts = []
    for layer in (0, 2):
        towers = [found[f"mlp_extractor.{net}_net.{layer}.weight"].T for net in ("policy", "value")]
        biases = [found[f"mlp_extractor.{net}_net.{layer}.bias"] for net in ("policy", "value")]
        parts += [np.stack(towers), np.stack(biases)]
    for head in ("action_net", "value_net"):
        parts += [found[f"{head}.weight"], found[f"{head}.bias"]]
    parts += [found["log_std"]] if continuous else []
    return torch.from_numpy(np.concatenate([part.ravel() for part in parts]))


def sb3_rollouts(case: Mapping[str, Any]) -> list[Rollout]:
    out = []
    for env in range(case["rewards"].shape[1]):
        term, trunc = case["terminated"][:, env], case["truncated"][:, env]
        finals = [case["finals"][t, env] for t in range(len(term) - 1) if trunc[t] and not term[t]]
        if not term[-1]:
            finals.append(case["finals"][-1, env] if trunc[-1] else case["observations"][-1, env])
        out.append(Rollout(
            agent="a", environment=env, episode=0, version=START, observations=case["observations"][:-1, env],
            actions=case["actions"][:, env], log_probs=case["log_probs"][:, env], rewards=case["rewards"][:, env],
            terminated=term, truncated=trunc,
            final_observations=np.stack(finals) if finals else np.zeros((0, 4), np.float32),
        ))  # fmt: skip
    return out


SB3 = {
    "discrete": {"minibatch": 20, "epochs": 3, "learning_rate": 1e-2, "entropy_coefficient": 0.01},
    "continuous": {
        "minibatch": 24, "epochs": 2, "learning_rate": 1e-2, "entropy_coefficient": 0.02, "max_grad_norm": 0.3
    },
    "stopped": {
        "minibatch": 24, "epochs": 6, "learning_rate": 3e-2, "target_kl": 0.02, "normalize_advantages": "none",
        "kl_window": "minibatch",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(SB3))
def test_an_update_is_stable_baselines3s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages, returns and, after the same minibatches, weights and figures; terminations, truncations, open ends."""
    file = np.load(RIVALS / "from_sb3.npz")
    case = {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}
    continuous = name == "continuous"
    spaces = Spaces(observation_size=4, action=ActionKind.DISCRETE, choices=(3,))
    if continuous:
        spaces = Spaces(observation_size=4, action=ActionKind.CONTINUOUS, low=(-1.0, -1.0), high=(1.0, 1.0))
    made = learner("a", spaces=spaces, dtype=torch.float32, gamma=0.97, gae_lambda=0.9, **SB3[name])
    weights = {w: case[f"before/{w}"] for w in (k.removeprefix("before/") for k in case if k.startswith("before/"))}
    made.policies.parameters.copy_(sb3_weights(weights, continuous).unsqueeze(0))
    rollouts = sb3_rollouts(case)

    batch = collate([rollouts], [START], np.float32)
    values = case["values"].T.reshape(1, -1)
    with torch.no_grad():
        finals = made.policies.values(made.policies.parameters, torch.from_numpy(batch.finals)).numpy()
    columns = [batch.rewards, values, successors(batch, values, finals), batch.terminated, batch.ended]
    advantages = gae(*(by_rollout(batch, each) for each in columns), gamma=0.97, lam=0.9)
    np.testing.assert_allclose(advantages, case["advantages"], atol=1e-5)
    np.testing.assert_allclose(by_policy(batch, advantages)[0], case["advantages"].T.ravel(), atol=1e-5)

    monkeypatch.setattr(ppo_update, "_order", lambda *_: Orders(case["orders"]))
    report = run(made, {"a": rollouts})["a"]
    after = {w: case[f"after/{w}"] for w in weights}
    torch.testing.assert_close(made.policies.parameters[0], sb3_weights(after, continuous), atol=1e-5, rtol=1e-5)
    assert report.stopped == (name == "stopped") and report.passes == len(case["orders"])
    assert name != "stopped" or 1 < report.passes < 6


def test_a_step_is_cleanrls() -> None:
    """Three full-batch steps in float64: clipped values, 1/2 on the value loss, unbiased normalisation, Adam's eps."""
    found = np.load(RIVALS / "from_torchrl.npz")
    data = {key.removeprefix("cleanrl/"): found[key] for key in found.files if key.startswith("cleanrl/")}

    def row(when: str) -> torch.Tensor:
        own = {n: data[f"{when}/{n}"] for n in ("aw", "ab", "cw", "cb", "al", "alb", "cl", "clb")}
        parts = [np.stack([own["aw"].T, own["cw"].T]), np.stack([own["ab"], own["cb"]])]
        parts += [own[n] for n in ("al", "alb", "cl", "clb")]
        return torch.from_numpy(np.concatenate([part.ravel() for part in parts]))

    spaces = Spaces(observation_size=3, action=ActionKind.DISCRETE, choices=(4,))
    made = learner(
        "a", spaces=spaces, hidden=(6,), minibatch=None, epochs=3, shuffle=False, learning_rate=1e-2, clip_value=0.2,
        value_coefficient=0.25, entropy_coefficient=0.01,
    )  # fmt: skip
    parameters = row("before").unsqueeze(0)
    count = len(data["x"])
    steps = ppo_update._Steps(
        batch=ppo_update.StepBatch(
            observations=torch.from_numpy(data["x"])[None], actions=torch.from_numpy(data["actions"])[None, :, None]
        ),
        finals=torch.zeros(1, 1, 3),
    )
    given = {n: torch.from_numpy(data[n])[None] for n in ("old_log_probs", "advantages", "returns", "old_values")}
    credit = ppo_update._Credit(
        anchors=given["old_log_probs"], advantages=given["advantages"], importance=None, targets=given["returns"],
        old_values=given["old_values"], returns=data["returns"][None], returns_moments=[], mismatch=np.zeros(1),
    )  # fmt: skip
    work = ppo_update._Work(
        parameters=parameters, first=torch.zeros_like(parameters), second=torch.zeros_like(parameters),
        steps=np.zeros((1, 1)),
    )  # fmt: skip
    batch = collate([[random_rollout(0, count, spaces, dtype=np.float64)]], [START], np.float64)
    passes = ppo_update._epochs(
        made.policies, made.settings, work, steps, credit, batch, [None], algorithm="ppo", progress=0.0
    )
    torch.testing.assert_close(work.parameters[0], row("after"), atol=1e-10, rtol=0)
    for when, figures in ((0, passes.first[0]), (2, passes.last[0])):
        theirs = dict(
            zip(("policy_loss", "value_loss", "entropy", "kl", "grad_norm"), data[f"figures/{when}"], strict=True)
        )
        ours = dict(zip(ppo_update.FIGURES, figures, strict=True))
        assert ours["value_loss"] / 2 == pytest.approx(theirs.pop("value_loss"), abs=1e-10)
        assert all(ours[n] == pytest.approx(value, abs=1e-10) for n, value in theirs.items())


# Stacked is separate


def own_log_probs(made: StackLearner, name: str, rollout: Rollout) -> Rollout:
    """The rollout as if the policy itself had acted."""
    row = made.policies.names.index(name)
    masks = None if rollout.masks is None else torch.from_numpy(rollout.masks)[None]
    batch = ppo_update.StepBatch(
        observations=torch.from_numpy(rollout.observations)[None], actions=torch.from_numpy(rollout.actions)[None],
        masks=masks,
    )  # fmt: skip
    log_probs, _, _ = made.policies.evaluate(made.policies.parameters[row : row + 1], batch)
    return replace(rollout, log_probs=log_probs[0].numpy())


RAGGED = {
    "plain": {},
    "whole batch": {"minibatch": None},
    "stops": {"target_kl": 0.004, "learning_rate": 2e-2},
    "stops by minibatch": {"target_kl": 0.02, "learning_rate": 2e-2, "kl_window": "minibatch"},
    "normalised": {"normalize_observations": True, "normalize_values": True, "normalize_advantages": "batch"},
    "vtrace": {"correction": "vtrace", "max_version_lag": 5},
    "truncated": {"correction": "truncated", "max_version_lag": 5, "clip_value": 0.2, "entropy_coefficient": 0.01},
    "no clip": {"max_grad_norm": None, "shuffle": False, "normalize_advantages": "none"},
}


CASES = [(how, DISCRETE, torch.float64) for how in RAGGED]
CASES += [
    ("truncated", MULTI, torch.float64),
    ("truncated", CONTINUOUS, torch.float64),
    ("plain", DISCRETE, torch.float32),
]


@pytest.mark.parametrize(("how", "spaces", "dtype"), CASES)
def test_a_stack_learns_what_its_policies_would_alone(how: str, spaces: Spaces, dtype: torch.dtype) -> None:
    """Ragged: 37, 8, 3 and no steps, so minibatches differ in number and length; masks differ, one agent has none."""
    names, kind = ["a", "b", "c", "idle"], np.float64 if dtype == torch.float64 else np.float32
    masked = spaces is not CONTINUOUS
    together = learner(*names, spaces=spaces, dtype=dtype, **RAGGED[how])
    alone = {name: learner(name, spaces=spaces, dtype=dtype, **RAGGED[how]) for name in names}
    for turn in range(2):
        data = {
            "a": [random_rollout(turn, 30, spaces, masked=masked, dtype=kind), random_rollout(9 + turn, 7, spaces, dtype=kind)],
            "b": [random_rollout(20 + turn, 8, spaces, dtype=kind)],
            "c": [random_rollout(30 + turn, 3, spaces, masked=masked, dtype=kind)],
        }  # fmt: skip
        if "stops" in how:
            data = {n: [own_log_probs(together, n, each) for each in own] for n, own in data.items()}
        both = run(together, data)
        for name in names:
            one = run(alone[name], {name: data[name]}) if name in data else {}
            ours, theirs = state(together, names.index(name)), state(alone[name], 0)
            for x, y in zip(ours, theirs, strict=True):
                torch.testing.assert_close(
                    x, y, atol=1e-10 if dtype == torch.float64 else 1e-5, rtol=0 if dtype == torch.float64 else 1e-5
                )
            if name in data:
                for field in fields(UpdateReport):
                    if field.name not in ("seconds", "policy"):
                        x, y = getattr(both[name], field.name), getattr(one[name], field.name)
                        if isinstance(x, float):
                            x, y = pytest.approx(x, abs=1e-4), y
                        assert x == y, (name, field.name)
    assert set(both) == {"a", "b", "c"} and together.versions[3] == START
    if "stops" in how:
        assert both["a"].stopped and 0 < together.steps[0].item() < 2 * 3 * 5


def test_agents_join_and_leave_and_the_others_keep_everything() -> None:
    whole, kept = learner("a", "b", "c"), learner("a", "c")
    data = {name: [random_rollout(i, 20, dtype=np.float64)] for i, name in enumerate("abcd")}
    run(whole, {n: data[n] for n in "abc"})
    run(kept, {n: data[n] for n in "ac"})
    whole.leave(whole.policies.names.index("b"))
    whole.policies.remove("b")  # type: ignore[attr-defined]
    for made in (whole, kept):
        made.policies.add("d", seed=0)  # type: ignore[attr-defined]
        made.join(START)
        run(made, {n: data[n] for n in "acd"})
    assert whole.policies.names == ["a", "c", "d"] and [v.step for v in whole.versions] == [2, 2, 1]
    assert whole.steps.squeeze(1).tolist() == [18.0, 18.0, 9.0]
    for row in range(3):
        for x, y in zip(state(whole, row), state(kept, row), strict=True):
            torch.testing.assert_close(x, y, atol=1e-12, rtol=0)


# Traps


def test_garbage_in_padding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands where a policy has no step is in no loss, no gradient and no statistic."""
    made = [learner("a", "b", normalize_observations=True, normalize_values=True) for _ in range(2)]
    data = {"a": [random_rollout(0, 21, masked=True, dtype=np.float64)], "b": [random_rollout(1, 5, dtype=np.float64)]}
    run(made[0], data)
    real = ppo_update.collate

    def dirty(*arguments: Any) -> Any:
        batch = real(*arguments)
        rng = np.random.default_rng(0)
        for name in ("observations", "log_probs", "rewards"):
            getattr(batch, name)[~batch.valid] = 1e6 * rng.normal()
        batch.finals[1, 1:] = 1e6
        return batch

    monkeypatch.setattr(ppo_update, "collate", dirty)
    run(made[1], data)
    for row in range(2):
        for x, y in zip(state(made[0], row), state(made[1], row), strict=True):
            assert torch.equal(x, y)


def test_the_behaviours_own_log_probs_are_what_ratios_are_taken_against() -> None:
    """Trap 9: data of another policy shows in KL and clipping from the first step on; they are never recomputed away."""
    made = learner("a", epochs=1, minibatch=None, dtype=torch.float32)
    data = random_rollout(0, 200)
    report = run(made, {"a": [data]})["a"]
    assert report.kl > 0.05 and report.clip_fraction > 0.3 and report.mismatch > 0.1


def test_divergence_is_that_of_the_whole_pass_and_stops_before_the_step() -> None:
    """Trap 13: the mean over the pass, logged as such; a policy that stops is left where it was before the step."""
    data = {"a": [random_rollout(0, 64, dtype=np.float64)]}
    first = learner("a", minibatch=16, epochs=1, learning_rate=1e-2)
    kl = run(first, data)["a"].kl
    assert kl > 0.0
    stopping = learner("a", minibatch=16, epochs=5, target_kl=kl / 100)
    before = stopping.policies.parameters.clone()
    report = run(stopping, data)["a"]
    assert report.stopped and report.passes == 1 and report.kl > 1.5 * kl / 100
    assert torch.equal(stopping.policies.parameters, before) and stopping.steps.item() == 0


def test_values_are_denormalised_before_credit() -> None:
    """Trap 11: with returns of mean 100 and deviation 10, a head that says 0 means a value of 100."""
    made = learner("a", normalize_values=True, normalize_advantages="none", epochs=1, minibatch=None, gamma=0.0)
    made.policies.parameters.zero_()
    from sparring.learning.ppo import Moments

    made.normalizers[0] = replace(
        made.normalizers[0], returns=Moments(count=10**9, mean=np.array([100.0]), squares=np.array([1e11]))
    )
    data = random_rollout(0, 50, dtype=np.float64, rewards=np.full(50, 100.0))
    report = run(made, {"a": [data]})["a"]
    assert report.value_loss == pytest.approx(0.0, abs=1e-9)  # target (100 - 100) / 10
    off = learner("a", epochs=1, minibatch=None, gamma=0.0)
    off.policies.parameters.zero_()
    assert run(off, {"a": [data]})["a"].value_loss == pytest.approx(100.0**2)  # trap 12: off is off


def test_statistics_change_between_updates_only() -> None:
    """Trap 33: an actor that normalises as the learner will has a ratio of 1, so divergence begins at 0."""
    made = learner("a", normalize_observations=True, dtype=torch.float32, epochs=1, minibatch=None)
    run(made, {"a": [random_rollout(0, 50)]})
    from sparring.policies.acting import act, draw_noise

    weights = made.policies.acting(made.versions, *made.scales("observations"))  # type: ignore[attr-defined]
    data = random_rollout(1, 50)
    noise = draw_noise(DISCRETE, np.random.default_rng(0), (1, 50))
    actions, log_probs = act(weights, data.observations[None], None, noise)
    acted = replace(data, actions=actions[0], log_probs=log_probs[0], version=made.versions[0])
    report = run(made, {"a": [acted]})["a"]
    assert report.kl < 1e-10 and report.mismatch < 1e-6 and report.version_lag == 0.0


def test_order_of_steps_is_new_for_every_pass_and_policy() -> None:
    """Trap 22."""
    settings = PPOSettings()
    generators = [ppo_update._order(settings, 20, 0, name, 0) for name in ("a", "b", "a")]
    a, b, again = ([g.permutation(20).tolist() for _ in range(2)] for g in generators if g is not None)
    assert a == again and a != b and a[0] != a[1]
    assert ppo_update._order(replace(settings, shuffle=False), 20, 0, "a", 0) is None


def test_a_policy_whose_numbers_blow_up_is_put_back_and_the_others_learn() -> None:
    """Trap 35: no state is lost, and the report says it."""
    made = learner("a", "b")
    made.policies.parameters[0] *= 1e200
    before = [x.clone() for x in state(made, 0)]
    data = {name: [random_rollout(i, 20, dtype=np.float64)] for i, name in enumerate("ab")}
    with np.errstate(all="ignore"):
        reports = run(made, data)
    assert reports["a"].failed and reports["a"].version.step == 0 and not reports["b"].failed
    assert all(torch.equal(x, y) for x, y in zip(before, state(made, 0), strict=True))
    assert reports["b"].version.step == 1 and made.steps[1].item() == 9


def test_an_error_in_the_middle_leaves_the_learner_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = learner("a")
    before, count = [x.clone() for x in state(made, 0)], 0
    real = ppo_update.adam_step

    def fails(*arguments: Any, **keywords: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("out of memory")
        real(*arguments, **keywords)

    monkeypatch.setattr(ppo_update, "adam_step", fails)
    with pytest.raises(RuntimeError):
        run(made, {"a": [random_rollout(0, 40, dtype=np.float64)]})
    assert all(torch.equal(x, y) for x, y in zip(before, state(made, 0), strict=True))
    assert made.versions == [START] and not made.policies.parameters.requires_grad


def test_late_data_is_corrected_by_truncated_weights() -> None:
    """Importance weights min(pi / mu, cap) multiply advantages, and ratios are then against the learner's own."""
    data = random_rollout(0, 100, version=PolicyVersion(incarnation=1, step=0))
    made = learner("a", correction="truncated", dtype=torch.float32, epochs=1, minibatch=None)
    made.versions[0] = PolicyVersion(incarnation=1, step=3)
    report = run(made, {"a": [data]})["a"]
    assert report.version_lag == 3.0 and report.kl == pytest.approx(0.0, abs=1e-9) and report.mismatch == 0.0


def test_reinforce_is_the_gradient_of_log_prob_times_advantage() -> None:
    """By hand, from torch's own distribution; one pass, whatever epochs says."""
    made = learner("a", epochs=9, minibatch=None, gae_lambda=1.0, normalize_advantages="none", max_grad_norm=None)
    data = random_rollout(0, 30, dtype=np.float64)
    before = made.policies.parameters.clone().requires_grad_()
    batch = collate([[data]], [START], np.float64)
    minibatch = ppo_update.StepBatch(
        observations=torch.from_numpy(batch.observations), actions=torch.from_numpy(batch.actions)
    )
    log_probs, _, values = made.policies.evaluate(before, minibatch)
    with torch.no_grad():
        finals = made.policies.values(before, torch.from_numpy(batch.finals)).numpy()
    now = values.detach().numpy()
    columns = [batch.rewards, now, successors(batch, now, finals), batch.terminated, batch.ended]
    advantages = torch.from_numpy(gae(*(by_rollout(batch, c) for c in columns), gamma=0.99, lam=1.0).T.copy())
    loss = -(log_probs * advantages).mean() + 0.5 * (values - (advantages + values.detach())).square().mean()
    loss.backward()
    report = run(made, {"a": [data]}, algorithm="reinforce")["a"]
    assert report.passes == 1 and made.steps.item() == 1
    assert before.grad is not None
    torch.testing.assert_close(made.first, 0.1 * before.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 0.1), (0.25, 0.075), (1.0, 0.0), (2.0, 0.0)])
def test_schedules_are_linear(progress: float, expected: float) -> None:
    assert ppo_update._scheduled(0.1, 0.0, progress) == pytest.approx(expected)
    assert ppo_update._scheduled(0.1, None, progress) == 0.1


def test_a_centralised_critic_learns_from_states_the_actor_never_sees() -> None:
    made = learner("a", state_size=2, epochs=1, minibatch=None, gamma=0.0)
    data = random_rollout(0, 40, state_size=2, dtype=np.float64)
    first = run(made, {"a": [data]})["a"]
    blind = learner("a", state_size=2, epochs=1, minibatch=None, gamma=0.0)
    other = replace(data, states=data.states + 1.0)
    second = run(blind, {"a": [other]})["a"]
    assert first.value_loss != second.value_loss and first.entropy == second.entropy
    names = made.policies.named(made.first)  # type: ignore[attr-defined]
    assert names["critic.0.weight"].shape == (1, 2, 8) and names["critic.0.weight"].abs().sum() > 0
