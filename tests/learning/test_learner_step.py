"""The step: gradient equals brute force, nothing dropped is computed, nothing bad moves a weight, order is nothing."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learning_toys import V1, ToyPolicy, behaviour, experience, settlement
from torch import Tensor

from sparring.errors import ConfigError, TrainingError
from sparring.learning.advantages import BaselineState, credit
from sparring.learning.batch import to_experiences
from sparring.learning.gate import Gate
from sparring.learning.optimizers import NamedOptimizer, optimizer_state
from sparring.learning.settings import AdvantageSettings, GateSettings, LossSettings, OptimizerSettings
from sparring.learning.step import learner_step, read_bad_batch, supervised_step
from sparring.policies.contract import ScoreRow
from sparring.types import Experience, PolicyVersion, SamplingSettings, SkipReason

PLAIN = LossSettings()


def make_optimizer(policy: ToyPolicy, **more: object) -> NamedOptimizer:
    values: dict[str, object] = {"learning_rate": 0.01, "max_grad_norm": None}
    chosen = OptimizerSettings(**(values | more))  # type: ignore[arg-type]
    return NamedOptimizer(policy.trainable_parameters(), policy.matrix_names(), chosen, seed=0)


def make_batch(policy: ToyPolicy, *, count: int = 12, seed: int = 0, whole: bool = False) -> list[Experience]:
    """Replies under slightly older weights, with advantages of both signs and a gate that keeps about a third."""
    dice = random.Random(seed)
    older = ToyPolicy(seed=99)
    batch = []
    for number in range(count):
        prompt, reply = dice.randint(1, 5), dice.randint(1, 6)
        tokens = [dice.randrange(11) for _ in range(prompt + reply)]
        if whole:
            weights = [dice.choice([0.0, 1.0])] * reply
        else:
            weights = [dice.choice([0.0, 0.0, 1.0, 0.5]) for _ in range(reply)]
        mixed = behaviour(older, tokens, prompt)
        batch.append(experience(number, tokens, prompt, dice.gauss(0, 1), weights, mixed))
    return batch


def snapshot(policy: ToyPolicy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


class Recorded:
    """Catches gradients instead of stepping."""

    def __init__(self, optimizer: NamedOptimizer, policy: ToyPolicy) -> None:
        self.gradients: dict[str, Tensor] = {}

        def step() -> None:
            self.gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}

        optimizer.step = step  # type: ignore[method-assign]


def brute_force(policy: ToyPolicy, batch: Sequence[Experience], chosen: LossSettings) -> dict[str, Tensor]:
    """Gradient token by token, from the definitions, every row alone and in full."""
    total = {name: torch.zeros_like(p) for name, p in policy.named_parameters()}
    denominator = sum(sum(e.loss_mask) for e in batch)
    for e in batch:
        for i, (on, weight) in enumerate(zip(e.loss_mask, e.weights, strict=True)):
            if not on or weight == 0.0:
                continue
            row = ScoreRow(token_ids=e.token_ids, positions=(i,))
            log_prob = policy.log_probs([row], temperature=e.sampling.temperature)[0]
            ratio = math.exp(log_prob.item() - e.behaviour_log_probs[i])
            if chosen.kind == "policy_gradient":
                slope = weight * min(ratio, chosen.ratio_cap) * e.advantages[i]
            else:
                low, high = 1 - chosen.clip_low, 1 + chosen.clip_high
                held = (e.advantages[i] > 0 and ratio > high) or (e.advantages[i] < 0 and ratio < low)
                slope = 0.0 if held or ratio > chosen.ratio_cap else weight * ratio * e.advantages[i]
            if chosen.kl_coefficient:
                reference = policy.reference_log_probs([row], temperature=1.0)[0].item()
                slope += chosen.kl_coefficient * (math.exp(reference - log_prob.item()) - 1.0)
            policy.zero_grad()
            (-slope * log_prob / denominator).backward()
            for name, p in policy.named_parameters():
                total[name] += p.grad  # type: ignore[operator]
    policy.zero_grad()
    return total


@pytest.mark.parametrize("micro_batch_tokens", [1, 17, 100000])
@pytest.mark.parametrize(
    "chosen", [PLAIN, LossSettings(kind="clipped"), LossSettings(kl_coefficient=0.3)], ids=["pg", "clipped", "kl"]
)
def test_gradient_equals_brute_force(chosen: LossSettings, micro_batch_tokens: int, tmp_path: Path) -> None:
    policy = ToyPolicy()
    with torch.no_grad():
        policy.head.weight.mul_(1.3)  # away from the reference
    batch = make_batch(policy, whole=chosen.needs_whole_replies)
    expected = brute_force(policy, batch, chosen)
    optimizer = make_optimizer(policy)
    recorded = Recorded(optimizer, policy)
    chosen = dataclasses.replace(chosen, micro_batch_tokens=micro_batch_tokens)
    report = learner_step(policy, batch, chosen, optimizer, bad_batch_dir=tmp_path)
    norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in expected.values()))
    assert norm > 0
    for name, wanted in expected.items():
        assert torch.allclose(recorded.gradients[name], wanted, rtol=1e-4, atol=1e-6 * max(1.0, norm)), name
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)


def test_reply_ratio_is_the_geometric_mean(tmp_path: Path) -> None:
    """GSPO's gradient: the reply's ratio times the sum of its tokens' gradients."""
    policy = ToyPolicy()
    tokens = [1, 2, 3, 4]
    log_probs = behaviour(policy, tokens, 1)
    shifted = (0.0, log_probs[1] - 0.3, log_probs[2] + 0.1, log_probs[3] - 0.1)  # mean log ratio 0.1
    optimizer = make_optimizer(policy)
    recorded = Recorded(optimizer, policy)
    chosen = LossSettings(kind="clipped", ratio="reply")
    batch = [experience(0, tokens, 1, 2.0, [1.0] * 3, shifted)]
    learner_step(policy, batch, chosen, optimizer, bad_batch_dir=tmp_path)
    rows = [ScoreRow(token_ids=tuple(tokens), positions=(1, 2, 3))]
    loss = -math.exp(0.1) * 2.0 * policy.log_probs(rows, temperature=1.0).sum() / 3
    for name, p in policy.named_parameters():
        assert torch.allclose(recorded.gradients[name], torch.autograd.grad(loss, p, retain_graph=True)[0], atol=1e-5)


def test_dropped_tokens_get_no_gradient_and_are_not_forwarded(tmp_path: Path) -> None:
    policy = ToyPolicy()
    batch = [
        experience(0, [1, 2, 3, 4, 5, 6], 2, 1.0, [0.0, 1.0, 0.0, 0.0], behaviour(policy, [1, 2, 3, 4, 5, 6], 2)),
        experience(1, [7, 8, 9, 10], 2, -1.0, [0.0, 0.0], behaviour(policy, [7, 8, 9, 10], 2)),
    ]
    optimizer = make_optimizer(policy)
    recorded = Recorded(optimizer, policy)
    report = learner_step(policy, batch, PLAIN, optimizer, bad_batch_dir=tmp_path)
    assert policy.forwarded == [3] and report.forwarded_tokens == 3  # tokens 1, 2, 3 predict token 4; no other row
    touched = recorded.gradients["embed.weight"].abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [1, 2, 3]
    assert (report.eligible_replies, report.kept_replies) == (2, 1)
    assert (report.eligible_tokens, report.graded_tokens) == (6, 1)
    row = [ScoreRow(token_ids=(1, 2, 3, 4), positions=(3,))]
    log_prob = policy.log_probs(row, temperature=1.0)[0].item()
    assert report.loss == pytest.approx(-log_prob / 6, rel=1e-5)  # over all six eligible tokens
    assert (report.mean_ratio, report.max_ratio) == (pytest.approx(1.0, abs=1e-5), pytest.approx(1.0, abs=1e-5))


def test_on_policy_ratio_is_one_also_when_warm(tmp_path: Path) -> None:
    policy = ToyPolicy()
    row = ScoreRow(token_ids=(1, 2, 3, 4), positions=(2, 3))
    with torch.no_grad():
        sampled = policy.log_probs([row], temperature=0.6).tolist()
    warm = SamplingSettings(temperature=0.6)
    batch = [experience(0, [1, 2, 3, 4], 2, 1.0, [1.0, 1.0], (0.0, 0.0, *sampled), sampling=warm)]
    report = learner_step(policy, batch, PLAIN, make_optimizer(policy), bad_batch_dir=tmp_path)
    assert (report.mean_ratio, report.max_ratio) == (pytest.approx(1.0, abs=1e-5), pytest.approx(1.0, abs=1e-5))


@pytest.mark.parametrize("kind", ["adamw", "apollo"])
def test_permutation_changes_not_one_bit(kind: str, tmp_path: Path) -> None:
    batch = make_batch(ToyPolicy(), count=20)
    chosen = LossSettings(micro_batch_tokens=20)
    results = []
    for order in range(4):
        policy = ToyPolicy()
        optimizer = make_optimizer(policy, kind=kind)
        shuffled = random.Random(order).sample(batch, len(batch))
        report = learner_step(policy, shuffled, chosen, optimizer, bad_batch_dir=tmp_path)
        results.append((snapshot(policy), dataclasses.replace(report, seconds=0.0)))
    for weights, report in results[1:]:
        assert same(weights, results[0][0])
        assert report == results[0][1]


def test_a_real_step_bumps_the_version_and_learns(tmp_path: Path) -> None:
    policy = ToyPolicy()
    tokens = [1, 2, 3]
    optimizer = make_optimizer(policy)
    for step in range(20):
        batch = [
            experience(0, tokens, 2, 1.0, [1.0], behaviour(policy, tokens, 2), version=policy.version),
            experience(1, [1, 2, 5], 2, -1.0, [1.0], behaviour(policy, [1, 2, 5], 2), version=V1),
        ]
        before = behaviour(policy, tokens, 2)[-1]
        report = learner_step(policy, batch, PLAIN, optimizer, bad_batch_dir=tmp_path)
        assert behaviour(policy, tokens, 2)[-1] > before
        assert report.version == policy.version == PolicyVersion(incarnation=1, step=step + 1)
        assert report.mean_version_lag == step / 2
    assert optimizer.steps == 20


def test_skips_leave_everything_alone(tmp_path: Path) -> None:
    policy = ToyPolicy()
    optimizer = make_optimizer(policy)
    learner_step(policy, make_batch(policy), PLAIN, optimizer, bad_batch_dir=tmp_path)
    before, moments, version = snapshot(policy), optimizer_state(optimizer)[0], policy.version
    tokens = [1, 2, 3]
    log_probs = behaviour(policy, tokens, 2)
    cases = {
        SkipReason.NO_EXPERIENCE: [],
        SkipReason.EQUAL_REWARDS: [experience(0, tokens, 2, 0.0, [1.0], log_probs)],
        SkipReason.NOTHING_KEPT: [experience(0, tokens, 2, 1.0, [0.0], log_probs)],
        # equal and opposite lessons on one token
        SkipReason.ZERO_GRADIENT: [
            experience(0, tokens, 2, 1.0, [1.0], log_probs),
            experience(1, tokens, 2, -1.0, [1.0], log_probs),
        ],
    }
    for reason, batch in cases.items():
        policy.forwarded.clear()
        report = learner_step(policy, batch, PLAIN, optimizer, bad_batch_dir=tmp_path)
        assert (report.skipped, report.version, report.grad_norm) == (reason, version, 0.0)
        assert bool(policy.forwarded) == (reason is SkipReason.ZERO_GRADIENT)
        assert same(snapshot(policy), before)
        assert all(torch.equal(moments[name], t) for name, t in optimizer_state(optimizer)[0].items())
    assert supervised_step(policy, [], optimizer, bad_batch_dir=tmp_path).skipped is SkipReason.NO_EXPERIENCE


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_not_finite_saves_the_batch_and_moves_nothing(where: str, tmp_path: Path) -> None:
    policy = ToyPolicy()
    optimizer = make_optimizer(policy)
    batch = make_batch(policy)
    if where == "loss":
        broken = tuple(math.nan if advantage else advantage for advantage in batch[3].advantages)
        batch[3] = dataclasses.replace(batch[3], advantages=broken, weights=(1.0,) * len(batch[3].weights))
    else:
        policy.embed.weight.register_hook(lambda gradient: gradient * math.inf)
    before = snapshot(policy)
    message = r"weights are untouched, the batch is in .*bad-batch-shared-v1\.0\.json"
    with pytest.raises(TrainingError, match=message) as error:
        learner_step(policy, batch, PLAIN, optimizer, bad_batch_dir=tmp_path / "new")
    assert where in str(error.value)
    assert same(snapshot(policy), before)
    assert (policy.version, optimizer_state(optimizer)[0]) == (V1, {})
    assert all(p.grad is None for p in policy.parameters())
    saved = read_bad_batch(tmp_path / "new" / "bad-batch-shared-v1.0.json")
    assert repr(sorted(saved.experiences, key=lambda e: e.source)) == repr(batch)  # NaN too, to the bit
    assert not list((tmp_path / "new").glob("*.tmp"))


def test_clipping_reports_the_norm_before(tmp_path: Path) -> None:
    policy = ToyPolicy()
    optimizer = make_optimizer(policy, max_grad_norm=1e-3)
    recorded = Recorded(optimizer, policy)
    report = learner_step(policy, make_batch(policy), PLAIN, optimizer, bad_batch_dir=tmp_path)
    clipped = math.sqrt(sum(float(g.pow(2).sum()) for g in recorded.gradients.values()))
    assert clipped == pytest.approx(1e-3, rel=1e-2) and report.grad_norm > 1e-2


def test_whole_reply_terms_refuse_a_cut_reply(tmp_path: Path) -> None:
    policy = ToyPolicy()
    cut = [experience(0, [1, 2, 3, 4], 2, 1.0, [1.0, 0.0], behaviour(policy, [1, 2, 3, 4], 2))]
    for chosen in (LossSettings(kl_coefficient=0.1), LossSettings(ratio="reply")):
        with pytest.raises(ConfigError, match=r"gate\.unit = 'reply'"):
            learner_step(policy, cut, chosen, make_optimizer(policy), bad_batch_dir=tmp_path)
    narrow = SamplingSettings(top_p=0.9)
    full = [experience(0, [1, 2, 3], 2, 1.0, [1.0], behaviour(policy, [1, 2, 3], 2), sampling=narrow)]
    with pytest.raises(ConfigError, match="top_p"):
        learner_step(policy, full, LossSettings(kl_coefficient=0.1), make_optimizer(policy), bad_batch_dir=tmp_path)
    with pytest.raises(ValueError, match="'other'"):
        foreign = [dataclasses.replace(full[0], policy="other")]
        learner_step(policy, foreign, PLAIN, make_optimizer(policy), bad_batch_dir=tmp_path)


def test_kl_is_reported(tmp_path: Path) -> None:
    policy = ToyPolicy()
    batch = make_batch(policy, whole=True)
    chosen = LossSettings(kl_coefficient=0.1)
    optimizer = make_optimizer(policy)
    first = learner_step(policy, batch, chosen, optimizer, bad_batch_dir=tmp_path)
    second = learner_step(policy, batch, chosen, optimizer, bad_batch_dir=tmp_path)
    assert first.kl_to_reference == pytest.approx(0.0, abs=1e-6)
    assert second.kl_to_reference is not None and second.kl_to_reference > 1e-6
    plain = learner_step(policy, batch, PLAIN, make_optimizer(policy), bad_batch_dir=tmp_path)
    assert plain.kl_to_reference is None


def test_supervised_step_is_mean_cross_entropy(tmp_path: Path) -> None:
    rows = [
        ScoreRow(token_ids=(1, 2, 3, 4, 9, 9), positions=(2, 3)),
        ScoreRow(token_ids=(5, 6, 7), positions=(1, 2)),
        ScoreRow(token_ids=(5, 6, 7), positions=()),
    ]
    results = []
    for budget in (1, 10000):
        policy = ToyPolicy()
        with torch.no_grad():
            expected = -policy.log_probs(rows[:2], temperature=1.0).mean().item()
        policy.forwarded.clear()
        optimizer = make_optimizer(policy)
        report = supervised_step(policy, rows, optimizer, bad_batch_dir=tmp_path, micro_batch_tokens=budget)
        assert report.loss == pytest.approx(expected, rel=1e-5)
        assert (report.eligible_tokens, report.graded_tokens, report.eligible_replies) == (4, 4, 2)
        assert sum(policy.forwarded) == report.forwarded_tokens == 3 + 2
        assert policy.version.step == 1
        results.append(snapshot(policy))
    assert all(torch.allclose(results[0][name], results[1][name], atol=1e-6) for name in results[0])
    policy = ToyPolicy()
    optimizer = make_optimizer(policy, learning_rate=0.05)
    losses = [supervised_step(policy, rows, optimizer, bad_batch_dir=tmp_path).loss for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]


@given(seed=st.integers(0, 10**6), count=st.integers(1, 15), budget=st.integers(1, 200))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_micro_batches_change_no_gradient(seed: int, count: int, budget: int, tmp_path: Path) -> None:
    gradients = []
    for tokens in (budget, 10**6):
        policy = ToyPolicy()
        optimizer = make_optimizer(policy)
        recorded = Recorded(optimizer, policy)
        chosen = LossSettings(micro_batch_tokens=tokens)
        learner_step(policy, make_batch(policy, count=count, seed=seed), chosen, optimizer, bad_batch_dir=tmp_path)
        gradients.append(recorded.gradients)
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        assert torch.allclose(gradients[0][name], gradients[1][name], rtol=1e-4, atol=1e-6), name


def test_the_whole_path_is_blind_to_order(tmp_path: Path) -> None:
    """Settlements to weights: a permutation of every batch changes neither weights nor reports, over several ticks."""
    results = []
    for order in range(3):
        policy, state, dice = ToyPolicy(), BaselineState(), random.Random(0)
        optimizer = make_optimizer(policy)
        gate = Gate(GateSettings(warmup_replies=20), seed=1)
        reports = []
        for tick in range(6):
            batch = [
                settlement(
                    i, dice.random(), team="rgb"[i % 3], log_probs=[-dice.random() for _ in range(5)], tick=tick,
                    violation=i == 4,
                )
                for i in range(12)
            ]  # fmt: skip
            random.Random(order * 100 + tick).shuffle(batch)
            credits, state = credit(batch, AdvantageSettings(kind="running"), state)
            decision = gate.weigh(credits.turns)
            experiences = to_experiences(decision.turns, policy="shared")
            report = learner_step(policy, experiences, PLAIN, optimizer, bad_batch_dir=tmp_path)
            reports.append((dataclasses.replace(report, seconds=0.0), decision.reports))
        results.append((snapshot(policy), reports))
    for weights, reports in results[1:]:
        assert same(weights, results[0][0])
        assert reports == results[0][1]
    assert any(report.skipped is None for report, _ in results[0][1])
