"""Small policies: distributions equal torch's own, masks in all of them, numpy's acting equals torch's learning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import AffineTransform, TanhTransform

from rollout_fixtures import CONTINUOUS, DISCRETE, MULTI
from sparring.errors import ConfigError
from sparring.policies import heads
from sparring.policies.acting import MaskError, act, draw_noise, for_environment
from sparring.policies.actor_critic import ActorCriticStack, Shape
from sparring.policies.contract import StepBatch
from sparring.types import ActionKind, PolicyVersion, Spaces

START = PolicyVersion(incarnation=1, step=0)


def stack(spaces: Spaces, *names: str, dtype: Any = torch.float64, **shape: Any) -> ActorCriticStack:
    made = ActorCriticStack(Shape(spaces=spaces, **{"hidden": (8, 8), **shape}), dtype=dtype)
    for name in names:
        made.add(name, seed=0)
    return made


def test_masked_choices_are_torchs_on_the_reduced_set() -> None:
    """Trap 19: log-prob, entropy and gradient know nothing of what is forbidden."""
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    masks = torch.tensor([[True, False, True, True, False]] * 6)
    actions = torch.tensor([[0], [2], [3], [3], [2], [0]])
    log_prob, entropy = heads.choices(logits, actions, (5,), masks)
    reduced = Categorical(logits=logits[:, [0, 2, 3]])
    place = {0: 0, 2: 1, 3: 2}
    taken = torch.tensor([place[a] for a in actions.squeeze(1).tolist()])
    torch.testing.assert_close(log_prob, reduced.log_prob(taken), atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, reduced.entropy(), atol=1e-12, rtol=0)
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    assert (gradient[:, [1, 4]] == 0).all() and gradient[:, [0, 2, 3]].abs().min() > 0
    only = torch.tensor([[False, True, False, False, False]])
    log_prob, entropy = heads.choices(torch.randn(1, 5), torch.tensor([[1]]), (5,), only)
    assert log_prob.item() == 0.0 and entropy.item() == 0.0


def test_several_choices_add_up() -> None:
    logits, actions = torch.randn(4, 5, dtype=torch.float64), torch.tensor([[0, 2], [1, 0], [1, 1], [0, 0]])
    log_prob, entropy = heads.choices(logits, actions, (2, 3), None)
    parts = [Categorical(logits=logits[:, :2]), Categorical(logits=logits[:, 2:])]
    torch.testing.assert_close(log_prob, sum(p.log_prob(actions[:, i]) for i, p in enumerate(parts)))
    torch.testing.assert_close(entropy, sum(p.entropy() for p in parts))


def test_gaussian_and_squashed_are_torchs() -> None:
    """Trap 20: a density with gradients; squashed, that of the action in its bounds."""
    means = torch.randn(50, 2, dtype=torch.float64, requires_grad=True)
    log_stds = torch.tensor([[-0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    u = torch.randn(50, 2, dtype=torch.float64)
    base = Independent(Normal(means, log_stds.exp().expand_as(means)), 1)
    log_prob, entropy = heads.gaussian(means, log_stds, u)
    torch.testing.assert_close(log_prob, base.log_prob(u))
    torch.testing.assert_close(entropy, base.entropy())
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(log_prob.sum(), (means, log_stds)))
    widths = torch.tensor([1.0, 2.0], dtype=torch.float64)
    squashed = TransformedDistribution(base, [TanhTransform(), AffineTransform(0.0, widths, event_dim=1)])
    log_prob, entropy = heads.squashed(means, log_stds, u, widths)
    torch.testing.assert_close(log_prob, squashed.log_prob(torch.tanh(u) * widths), atol=1e-9, rtol=0)
    generator = torch.Generator().manual_seed(0)
    draws = means[:1] + log_stds.exp() * torch.randn(400_000, 2, dtype=torch.float64, generator=generator)
    one = TransformedDistribution(
        Independent(Normal(means[:1], log_stds.exp()), 1), [TanhTransform(), AffineTransform(0.0, widths, event_dim=1)]
    )
    assert entropy[0].item() == pytest.approx(-one.log_prob(torch.tanh(draws) * widths).mean().item(), abs=0.01)


PLAIN: dict[str, Any] = {}
RELU: dict[str, Any] = {"activation": "relu", "state_size": 4}


@pytest.mark.parametrize(
    ("spaces", "how"),
    [(DISCRETE, PLAIN), (DISCRETE, RELU), (MULTI, PLAIN), (CONTINUOUS, PLAIN), (CONTINUOUS, {"squash": True})],
)
def test_acting_says_what_learning_evaluates(spaces: Spaces, how: dict[str, Any]) -> None:
    """Behaviour log-probs from numpy are the learner's, mask, several parts, normaliser, squashing and all."""
    made = stack(spaces, "a", "b", dtype=torch.float32, **how)
    made.parameters += 0.1 * torch.randn(made.parameters.shape, generator=torch.Generator().manual_seed(1))
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(2, 40, 3)).astype(np.float32)
    mean, scale = rng.normal(size=(2, 3)), rng.uniform(0.5, 2.0, size=(2, 3))
    masks = None
    if spaces is not CONTINUOUS:
        masks = rng.random((2, 40, spaces.mask_size)) < 0.5
        masks[..., np.cumsum(spaces.choices) - 1] = True
    weights = made.acting([START, START], mean, scale)
    actions, log_probs = act(weights, seen, masks, draw_noise(spaces, rng, (2, 40)))
    batch = StepBatch(
        observations=torch.from_numpy(((seen - mean[:, None]) / scale[:, None]).astype(np.float32)),
        actions=torch.from_numpy(actions), masks=None if masks is None else torch.from_numpy(masks),
        states=torch.zeros(2, 40, 4) if how.get("state_size") else None,
    )  # fmt: skip
    found, _, _ = made.evaluate(made.parameters, batch)
    np.testing.assert_allclose(log_probs, found.detach().numpy(), atol=2e-6)
    if masks is not None:
        starts = np.cumsum(spaces.choices) - spaces.choices
        assert np.take_along_axis(masks, actions + starts, -1).all()
    else:
        played = for_environment(weights, actions)
        assert (np.abs(played) <= np.array([1.0, 2.0], np.float32)).all()
    twice = weights.rows(np.array([1, 0, 1]))
    again, _ = act(twice, seen[[1, 0, 1]], None if masks is None else masks[[1, 0, 1]], None)
    greedy, _ = act(weights, seen, masks, None)
    assert np.array_equal(again, greedy[[1, 0, 1]])


def test_samples_follow_the_distribution() -> None:
    """200,000 draws of four choices, one of them forbidden, within four standard errors."""
    made = stack(DISCRETE, "a")
    made.parameters[:] = 0.0
    made.named(made.parameters)["actor.bias"][0, :, 0] = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    count = 200_000
    masks = np.broadcast_to(np.array([True, True, False, True]), (1, count, 4))
    noise = draw_noise(DISCRETE, np.random.default_rng(0), (1, count))
    actions, log_probs = act(made.acting([START]), np.zeros((1, count, 3), np.float32), masks, noise)
    total = sum(math.exp(i) for i in (0, 1, 3))
    for choice in range(4):
        expected = 0.0 if choice == 2 else math.exp(choice) / total
        error = math.sqrt(expected * (1 - expected) / count)
        assert abs((actions == choice).mean() - expected) <= 4 * error
        if expected:
            assert log_probs[actions[..., 0] == choice][0] == pytest.approx(math.log(expected), abs=1e-5)


def test_a_mask_that_forbids_everything_is_an_error_not_a_nan() -> None:
    """Trap 19."""
    masks = np.ones((1, 2, 5), np.bool_)
    masks[0, 1, 2:] = False
    with pytest.raises(MaskError, match="part 1 of an action forbids everything"):
        act(stack(MULTI, "a").acting([START]), np.zeros((1, 2, 3), np.float32), masks, None)


def test_weights_depend_on_seed_and_name_alone_and_scale_as_they_should() -> None:
    """Trap 1: every policy is made anew, whoever was before; trap 36: from its own seed."""
    one, other = stack(DISCRETE, "a", "b"), stack(DISCRETE, "b")
    assert torch.equal(one.parameters[1], other.parameters[0]) and not torch.equal(one.parameters[0], one.parameters[1])
    weights = one.named(one.parameters)
    hidden = weights["both.1.weight"][0, 0]
    torch.testing.assert_close(hidden @ hidden.T, 2.0 * torch.eye(8, dtype=torch.float64), atol=1e-9, rtol=0)
    assert weights["actor.weight"].norm(dim=-1).max().item() == pytest.approx(0.01)
    assert weights["critic.weight"][0].norm().item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="'a' is in this stack"):
        one.add("a", seed=0)


def test_squashing_without_bounds_is_refused() -> None:
    unbounded = Spaces(observation_size=1, action=ActionKind.CONTINUOUS, low=(-math.inf,), high=(1.0,))
    with pytest.raises(ConfigError, match=r"net\.squash is true"):
        Shape(spaces=unbounded, hidden=(4,), squash=True)
    with pytest.raises(ConfigError, match=r"net\.hidden"):
        Shape(spaces=unbounded, hidden=())


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("state_size", [0, 4])
def test_a_stacks_network_is_the_plain_one(activation: str, state_size: int) -> None:
    """A second implementation, layer by layer; and gradients by differences."""
    made = stack(DISCRETE, "a", "b", activation=activation, state_size=state_size)
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(2, 6, 3, dtype=torch.float64, generator=generator)
    states = torch.randn(2, 6, 4, dtype=torch.float64, generator=generator) if state_size else None
    batch = StepBatch(observations=seen, actions=torch.zeros(2, 6, 1, dtype=torch.int64), states=states)
    log_probs, _, values = made.evaluate(made.parameters, batch)
    weights, nonlinear = made.named(made.parameters), getattr(torch, activation)
    for row in range(2):
        heads_out = []
        for tower, x in enumerate((seen[row], seen[row] if states is None else states[row])):
            for layer in range(2):
                prefix = ("actor", "critic")[tower] if state_size else "both"
                weight, bias = weights[f"{prefix}.{layer}.weight"][row], weights[f"{prefix}.{layer}.bias"][row]
                x = nonlinear(x @ (weight if state_size else weight[tower]) + (bias if state_size else bias[tower]))
            name = ("actor", "critic")[tower]
            heads_out.append(x @ weights[f"{name}.weight"][row].T + weights[f"{name}.bias"][row].T)
        torch.testing.assert_close(log_probs[row], torch.log_softmax(heads_out[0], -1)[:, 0], atol=1e-12, rtol=0)
        torch.testing.assert_close(values[row], heads_out[1].squeeze(-1), atol=1e-12, rtol=0)
    assert torch.equal(made.values(made.parameters, seen if states is None else states), values)

    def total(parameters: torch.Tensor) -> torch.Tensor:
        log_prob, entropy, value = made.evaluate(parameters, batch)
        return (log_prob + 0.3 * entropy + value.square()).sum()

    parameters = made.parameters.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(parameters), parameters)
    for index in range(0, parameters.shape[1], 37):
        step = torch.zeros_like(parameters)
        step[1, index] = 1e-6
        with torch.no_grad():
            slope = (total(parameters + step) - total(parameters - step)) / 2e-6
        assert gradient[1, index].item() == pytest.approx(slope.item(), abs=1e-6)
