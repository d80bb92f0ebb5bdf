"""APOLLO against its formulas worked out by hand, rows O1 to O5 of spec/market.md 4.3, and exact resume without
pickle."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from sparring.errors import CheckpointError, ConfigError
from sparring.learning import optimizers
from sparring.learning.optimizers import (
    Apollo,
    NamedOptimizer,
    OptimizerState,
    bias_factor,
    learning_rate_at,
    load_optimizer_state,
    optimizer_state,
    projection,
    scaled_gradient,
)
from sparring.learning.settings import OptimizerSettings

FIXTURES = Path(__file__).parent.parent / "fixtures"


def parameters(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"tall": (6, 4), "wide": (4, 6), "embedding": (5, 4), "norm": (4,)}
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def give_gradients(of: dict[str, Parameter], step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in of.values():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def build(of: dict[str, Parameter], **more: object) -> NamedOptimizer:
    values: dict[str, object] = {"kind": "apollo", "learning_rate": 0.01, "rank": 2}
    settings = OptimizerSettings(**(values | more))  # type: ignore[arg-type]
    return NamedOptimizer(of, ["tall", "wide"], settings, seed=3)


def test_scaling_by_hand() -> None:
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])  # tall: one factor a row
    projected, normalised = torch.tensor([[3.0], [4.0], [2.0]]), torch.tensor([[6.0], [2.0], [2.0]])
    assert torch.allclose(
        scaled_gradient(gradient, projected, normalised, "channel"), torch.tensor([[2.0, 4.0], [1.5, 2.0], [5.0, 6.0]])
    )
    assert torch.allclose(  # wide: one factor a column
        scaled_gradient(gradient.T, projected.T, normalised.T, "channel"),
        torch.tensor([[2.0, 1.5, 5.0], [4.0, 2.0, 6.0]]),
    )
    whole = math.sqrt(44 / 29)
    assert torch.allclose(scaled_gradient(gradient, projected, normalised, "tensor"), gradient * whole)


@pytest.mark.parametrize("scaling", ["channel", "tensor"])
def test_first_two_steps_follow_the_paper(scaling: str) -> None:
    """An independent, literal transcription of methods.md 6.1, one matrix of each orientation."""
    of = parameters()
    expected = {name: p.detach().clone().double() for name, p in of.items()}
    optimizer = build(of, scaling=scaling, scale=4.0, weight_decay=0.1)
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    for step in (1, 2):
        give_gradients(of, step)
        for name in expected:
            g = of[name].grad.double()  # type: ignore[union-attr]
            tall = name == "tall"
            if name in ("tall", "wide"):
                p = projection(tuple(g.shape), 2, 3, name, 0).double()  # type: ignore[arg-type]
                r = g @ p if tall else p @ g
            else:
                r = g
            m, v = moments.get(name, (torch.zeros_like(r), torch.zeros_like(r)))
            m, v = 0.9 * m + 0.1 * r, 0.999 * v + 0.001 * r * r
            moments[name] = (m, v)
            n = m / (v.sqrt() + 1e-6)
            update = n
            if name in ("tall", "wide"):
                if scaling == "tensor":
                    update = g * n.norm() / (r.norm() + 1e-8)
                else:
                    axis = 1 if tall else 0
                    update = g * (n.norm(dim=axis) / (r.norm(dim=axis) + 1e-8)).unsqueeze(axis)
                update = update * 2.0
            factor = math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            expected[name] = expected[name] - 0.01 * factor * update
            if g.ndim == 2:
                expected[name] = expected[name] * (1 - 0.01 * 0.1)
        optimizer.step()
    for name in expected:
        assert torch.allclose(of[name].double(), expected[name], atol=1e-6), name


def test_full_rank_identity_projection_has_adams_norm() -> None:
    """Where R = G, tensor scaling gives a step of Adam's length along the raw gradient."""
    gradient = torch.randn(5, 3)
    normalised = gradient / (gradient.abs() + 1e-6)
    assert scaled_gradient(gradient, gradient, normalised, "tensor").norm() == pytest.approx(normalised.norm().item())


def test_projection_is_keyed_and_has_variance_one_over_rank() -> None:
    base = projection((300, 200), 4, 1, "a", 0)
    assert base.shape == (200, 4) and projection((200, 300), 4, 1, "a", 0).shape == (4, 200)
    assert base.var().item() == pytest.approx(0.25, rel=0.15)
    assert torch.equal(base, projection((300, 200), 4, 1, "a", 0))
    for other in (
        projection((300, 200), 4, 2, "a", 0),
        projection((300, 200), 4, 1, "b", 0),
        projection((300, 200), 4, 1, "a", 1),
    ):
        assert not torch.equal(base, other)


def test_projection_changes_after_the_gap_and_moments_stay() -> None:
    of = parameters()
    optimizer = build(of, projection_gap=2)
    seen = []
    for _ in range(5):
        give_gradients(of, 0)  # always the same gradient
        optimizer.step()
        assert isinstance(optimizer.inner, Apollo)
        seen.append(optimizer.inner.moments["tall"].first.clone())
    same = seen[1] / seen[0]
    assert torch.allclose(same, torch.full_like(same, 1.9), rtol=1e-4)  # one projection: m2 = (0.9 + 1) m1
    assert not torch.allclose(seen[2] / seen[0], torch.full_like(same, 2.71), rtol=1e-2)  # a new one, over old moments
    assert seen[2].norm() > 0.5 * seen[1].norm()


# --------------------------------------------------------------------------------------------------------- rows O1 - O5


@pytest.mark.parametrize("limit", [None, 1.01])
def test_o1_a_zero_gradient_freezes_nothing(limit: float | None) -> None:
    of = parameters()
    optimizer = build(of, norm_growth_limit=limit)
    lengths = []
    for step in range(60):
        give_gradients(of, step, 0.0 if step == 50 else 1.0)
        before = of["tall"].detach().clone()
        optimizer.step()
        lengths.append((of["tall"].detach() - before).norm().item())
    assert lengths[50] == 0.0
    assert min(lengths[51:]) > 0.2 * sorted(lengths[:50])[25]  # the original needed some 1,300 steps


@pytest.mark.parametrize(("idle", "limited"), [(0, True), (3, True), (20, False)])
def test_o2_limiter_limits_growth_and_starts_afresh_after_a_gap(idle: int, limited: bool) -> None:
    """The update would grow by more from the first step to the second; the limiter allows 1 %."""
    grown = []
    for limit in (1.01, None):
        optimizer = build(of := parameters(), norm_growth_limit=limit, norm_growth_gap=4, learning_rate=1.0, scale=1.0)
        lengths = []
        for _ in range(2):  # one gradient twice: |N| grows by 1.34
            before = of["tall"].detach().clone()
            of["tall"].grad = torch.ones(6, 4)
            optimizer.step()
            factor = bias_factor(len(lengths) + 1, 0.9, 0.999)
            lengths.append((of["tall"].detach() - before).norm().item() / factor)
            for _ in range(idle):
                optimizer.skip()
        grown.append(lengths[1] / lengths[0])
    assert grown[1] > 1.2
    assert grown[0] == pytest.approx(1.01 if limited else grown[1], rel=1e-3)


def test_o2_limiter_is_off_by_default() -> None:
    assert OptimizerSettings(kind="apollo").norm_growth_limit is None


@pytest.mark.parametrize("kind", ["apollo", "adamw"])
def test_o3_masters_are_fp32(kind: str) -> None:
    low = {"tall": Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))}
    with pytest.raises(ConfigError, match="fp32 master"):
        NamedOptimizer(low, ["tall"], OptimizerSettings(kind=kind, rank=2), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["apollo", "adamw"])
def test_o4_state_is_tensors_and_json_and_resume_is_exact(kind: str, tmp_path: Path) -> None:
    more = {"kind": kind, "projection_gap": 3, "norm_growth_limit": 1.5, "warmup_steps": 4, "weight_decay": 0.01}
    whole, parts = parameters(), parameters()
    one, two = build(whole, **more), build(parts, **more)
    for step in range(12):
        for of, optimizer in ((whole, one), (parts, two)):
            give_gradients(of, step)
            if step % 4 == 1:
                of["norm"].grad = None
            optimizer.step() if step != 5 else optimizer.skip()
        tensors, record = optimizer_state(two)
        save_file(tensors, tmp_path / "optimizer.safetensors")
        text = msgspec.json.encode(record)
        parts = {name: Parameter(p.detach().clone()) for name, p in parts.items()}
        two = build(parts, **more)
        load_optimizer_state(
            two, load_file(tmp_path / "optimizer.safetensors"), msgspec.json.decode(text, type=OptimizerState)
        )
    for name in whole:
        assert torch.equal(whole[name], parts[name]), name
    assert one.steps == two.steps == 11
    assert optimizer_state(one)[1] == optimizer_state(two)[1]


def test_o4_a_foreign_state_is_refused() -> None:
    of = parameters()
    optimizer = build(of)
    give_gradients(of, 0)
    optimizer.step()
    tensors, record = optimizer_state(optimizer)
    with pytest.raises(CheckpointError, match="'apollo'"):
        load_optimizer_state(build(parameters(), kind="adamw"), tensors, record)
    with pytest.raises(CheckpointError, match="shape"):
        load_optimizer_state(build(parameters(), rank=3), tensors, record)
    with pytest.raises(CheckpointError, match="tall/first"):
        load_optimizer_state(build(parameters()), {k: v for k, v in tensors.items() if k != "tall/first"}, record)
    with pytest.raises(CheckpointError, match="not a trainable parameter"):
        fewer = {name: p for name, p in parameters().items() if name != "norm"}
        load_optimizer_state(NamedOptimizer(fewer, ["tall", "wide"], optimizer.settings, seed=3), tensors, record)
    with pytest.raises(CheckpointError, match="seed"):
        other = NamedOptimizer(parameters(), ["tall", "wide"], optimizer.settings, seed=4)
        load_optimizer_state(other, tensors, record)


def test_o5_matrices_are_an_explicit_list_and_memory_is_as_promised() -> None:
    of = parameters()
    optimizer = build(of)
    give_gradients(of, 0)
    optimizer.step()
    # 2 n r for each projected matrix (n the larger side, r = 2); two a number for the embedding's 20 and the norm's 4.
    assert optimizer.state_numbers() == 2 * (2 * 6 * 2) + 2 * 20 + 2 * 4
    settings = OptimizerSettings(kind="apollo", rank=2)
    with pytest.raises(ConfigError, match="w1 is not among"):
        NamedOptimizer(of, ["w1"], settings, seed=0)
    with pytest.raises(ConfigError, match="2-D"):
        NamedOptimizer({"experts": Parameter(torch.zeros(3, 4, 5))}, ["experts"], settings, seed=0)
    with pytest.raises(ConfigError, match=r"optimizer\.rank is 4.*below 4"):
        build(of, rank=4)
    with pytest.raises(ConfigError, match="no trainable"):
        NamedOptimizer({}, [], settings, seed=0)


# --------------------------------------------------------------------------------------------- against another package


@pytest.mark.parametrize("scaling", ["channel", "tensor"])
def test_equals_apollo_of_pytorch_optimizer(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 steps across a change of the projection, limiter on. Made by tests/fixtures/make_references.py.

    Theirs goes back from the projected gradient (U = R s P), the paper and we scale the raw one (U = G s). Given square
    orthogonal projections the two are one; with a lower rank theirs is ours seen through the projection.
    """
    wanted = load_file(FIXTURES / f"apollo_{scaling}.safetensors")
    of = {name: Parameter(wanted[f"0/{name}"].clone()) for name in ("tall", "wide", "norm")}
    values = {"scaling": scaling, "rank": 4, "scale": 1.0, "learning_rate": 0.01, "norm_growth_limit": 1.01}
    settings = OptimizerSettings(kind="apollo", **values)  # type: ignore[arg-type]
    optimizer = Apollo(of, ["tall", "wide"], settings, seed=0)
    step = 0

    def given(shape: tuple[int, int], rank: int, seed: int, name: str, epoch: int) -> Tensor:
        matrix = orthogonal(int(step >= 200), name)
        return matrix if name == "tall" else matrix.T  # they project with the transpose of what they keep

    monkeypatch.setattr(optimizers, "projection", given)
    for step in range(1, 301):  # theirs changes the projection at the 200th step, ours after it
        for name, parameter in of.items():
            parameter.grad = reference_gradient(step, name)
        optimizer.step()
        for name, parameter in of.items():
            if f"{step}/{name}" in wanted:
                assert torch.allclose(parameter, wanted[f"{step}/{name}"], rtol=1e-4, atol=2e-5), (step, name)


def orthogonal(epoch: int, name: str) -> Tensor:
    draw = torch.Generator().manual_seed(100 * epoch + len(name))
    return torch.linalg.qr(torch.randn((4, 4), generator=draw))[0]


def reference_gradient(step: int, name: str) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + ord(name[0]))
    shape = {"tall": (6, 4), "wide": (4, 6), "norm": (4,)}[name]
    return (1.0 + 0.5 * (step % 7)) * torch.randn(shape, generator=draw)


# ---------------------------------------------------------------------------------------------------------------- AdamW


def test_adamw_first_step_by_hand() -> None:
    """The first step of Adam is lr * sign(g); decay touches matrices only; warm-up scales the rate."""
    of = {"w": Parameter(torch.ones(2, 2)), "b": Parameter(torch.ones(2))}
    optimizer = NamedOptimizer(of, [], OptimizerSettings(learning_rate=0.1, weight_decay=0.5, warmup_steps=2), seed=0)
    of["w"].grad, of["b"].grad = torch.full((2, 2), 3.0), torch.full((2,), -2.0)
    optimizer.step()
    assert torch.allclose(of["w"], torch.full((2, 2), 1.0 - 0.05 * 0.5 - 0.05))
    assert torch.allclose(of["b"], torch.full((2,), 1.05))


def test_bias_factor_and_warm_up() -> None:
    assert bias_factor(2, 0.9, 0.999) == pytest.approx(math.sqrt(1 - 0.999**2) / 0.19)
    settings = OptimizerSettings(learning_rate=2.0, warmup_steps=2)
    assert [learning_rate_at(settings, step) for step in range(4)] == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", ["adamw", "apollo"])
def test_both_descend(kind: str) -> None:
    torch.manual_seed(0)
    target = torch.randn(8, 4)
    of = {"tall": Parameter(torch.zeros(8, 4))}
    settings = OptimizerSettings(kind=kind, learning_rate=0.03, rank=1, scale=4.0)  # type: ignore[arg-type]
    optimizer = NamedOptimizer(of, ["tall"], settings, seed=0)
    for _ in range(300):
        optimizer.zero_grad()
        of["tall"].grad = of["tall"].detach() - target
        optimizer.step()
    assert (of["tall"] - target).norm() < 0.2 * target.norm()
