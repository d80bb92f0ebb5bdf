"""AdamW (torch's) and our own APOLLO, with a state of named tensors and JSON: no pickle anywhere.

APOLLO (arXiv 2412.05270) keeps Adam's moments of a random projection of a matrix's gradient and uses only their scale:
the update has the direction of the raw gradient. Written from the paper's description, in our own words:

    R = G P        (m >= n: m x r, P n x r)   or   R = P G   (m < n: r x n, P r x m),   P ~ N(0, 1/r)
    M = b1 M + (1 - b1) R,   V = b2 V + (1 - b2) R^2,   N = M / (sqrt(V) + eps)
    s_j = |N_j| / (|R_j| + 1e-8)   per row (m >= n) or column, the norm over the r axis;   tensor: one s of all
    U = G s;   limiter: |U| <= gamma |U before|;   U *= sqrt(scale)
    W <- W - lr * sqrt(1 - b2^t) / (1 - b1^t) * U;   W <- W - lr * decay * W

P is drawn anew from (seed, name, t // gap) whenever it is needed and never kept, so an m x n matrix (m <= n) costs 2
n r numbers of state. The moments are not reset when P changes. All parameters that are not named as matrices get full
Adam by the same formulas with R = G and N itself as the update. Moments are fp32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from sparring.errors import CheckpointError, ConfigError
from sparring.learning.settings import OptimizerSettings

RATIO_EPS = 1e-8


# ------------------------------------------------------------------------------------------------------- pure functions


def projection(shape: tuple[int, int], rank: int, seed: int, name: str, epoch: int) -> Tensor:
    """The random projection of a matrix of ``shape`` (m, n): (n, r) if m >= n, else (r, m); fp32 on the CPU, N(0, 1/r).

    The same on every device and after every resume: drawn by torch's CPU generator from a hash of (seed, name, epoch).
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    rows, columns = shape
    size = (columns, rank) if rows >= columns else (rank, rows)
    return torch.randn(size, generator=generator, dtype=torch.float32) / math.sqrt(rank)


def project(gradient: Tensor, matrix: Tensor) -> Tensor:
    """R: (m, r) if m >= n, else (r, n)."""
    return gradient @ matrix if gradient.shape[0] >= gradient.shape[1] else matrix @ gradient


def scaled_gradient(gradient: Tensor, projected: Tensor, normalised: Tensor, scaling: str) -> Tensor:
    """U = G s, with s the ratio of the norms of N and R: one a channel of the larger side, or one for the whole
    matrix."""
    if scaling == "tensor":
        whole: Tensor = normalised.norm() / (projected.norm() + RATIO_EPS)
        return gradient * whole
    axis = 1 if gradient.shape[0] >= gradient.shape[1] else 0  # the r axis of R
    factors: Tensor = normalised.norm(dim=axis, keepdim=True) / (projected.norm(dim=axis, keepdim=True) + RATIO_EPS)
    return gradient * factors


def bias_factor(step: int, beta1: float, beta2: float) -> float:
    """sqrt(1 - beta2^t) / (1 - beta1^t), t from 1.

    >>> round(bias_factor(1, 0.9, 0.99), 12)
    1.0
    """
    return math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)


def learning_rate_at(settings: OptimizerSettings, step: int) -> float:
    """The rate of real step ``step`` (from 0): linear over ``warmup_steps``, then constant, or falling to 0 at
    ``decay_steps``.

    >>> learning_rate_at(OptimizerSettings(learning_rate=1.0, warmup_steps=4), 0)
    0.25
    >>> learning_rate_at(OptimizerSettings(learning_rate=1.0, decay_steps=4), 3)
    0.25
    """
    rate = settings.rate
    if settings.warmup_steps:
        rate *= min(1.0, (step + 1) / settings.warmup_steps)
    if settings.decay_steps is not None:
        rate *= max(0.0, 1.0 - step / settings.decay_steps)
    return rate


# --------------------------------------------------------------------------------------------------------------- APOLLO


@dataclass(slots=True)
class _Moments:
    first: Tensor
    second: Tensor
    step: int = 0
    norm: float = 0.0
    """Norm of the last update before scale, for the limiter; 0 means none is recorded."""
    norm_round: int = 0
    """Round in which it was recorded."""


class Apollo(torch.optim.Optimizer):
    """APOLLO on the named matrices, Adam on the rest."""

    def __init__(
        self, parameters: Mapping[str, Parameter], matrices: Iterable[str], settings: OptimizerSettings, *, seed: int
    ) -> None:
        super().__init__(list(parameters.values()), {"lr": settings.rate})
        self.parameters_by_name = dict(parameters)
        self.matrices = frozenset(matrices)
        self.settings = settings
        self.seed = seed
        self.moments: dict[str, _Moments] = {}
        self.rounds = 0
        """Learner steps so far, those included in which nothing moved: the limiter forgets after a gap of them."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step over all parameters that have a gradient. Closures are not supported."""
        if closure is not None:
            raise ValueError("Apollo.step takes no closure")
        self.rounds += 1
        for name, parameter in self.parameters_by_name.items():
            if parameter.grad is not None:
                self._update(name, parameter, parameter.grad)
        return None

    def _update(self, name: str, parameter: Parameter, gradient: Tensor) -> None:
        settings = self.settings
        rate: float = self.param_groups[0]["lr"]
        gradient = gradient.float()
        held = self.moments.get(name)
        step = held.step if held is not None else 0
        if name in self.matrices:
            shape = (parameter.shape[0], parameter.shape[1])
            basis = projection(shape, settings.rank, self.seed, name, step // settings.projection_gap)
            projected = project(gradient, basis.to(gradient.device))
        else:
            projected = gradient
        if held is None:
            held = self.moments[name] = _Moments(torch.zeros_like(projected), torch.zeros_like(projected))
        held.step += 1
        held.first.lerp_(projected, 1.0 - settings.beta1)
        held.second.mul_(settings.beta2).addcmul_(projected, projected, value=1.0 - settings.beta2)
        normalised = held.first / (held.second.sqrt() + settings.effective_eps)
        if name in self.matrices:
            update = scaled_gradient(gradient, projected, normalised, settings.scaling)
            update = self._limited(held, update) * math.sqrt(settings.scale)
        else:
            update = normalised
        parameter.add_(update.to(parameter.dtype), alpha=-rate * bias_factor(held.step, settings.beta1, settings.beta2))
        if settings.weight_decay > 0.0 and parameter.ndim >= 2:
            parameter.mul_(1.0 - rate * settings.weight_decay)

    def _limited(self, held: _Moments, update: Tensor) -> Tensor:
        """The norm-growth limiter. It never records a zero norm: that would freeze the matrix for a thousand steps."""
        limit = self.settings.norm_growth_limit
        if limit is None:
            return update
        norm = float(update.norm())
        if norm == 0.0:
            return update
        fresh = held.norm == 0.0 or self.rounds - held.norm_round > self.settings.norm_growth_gap
        bound = limit * (held.norm + RATIO_EPS)
        if not fresh and norm > bound:
            update, norm = update * (bound / norm), bound
        held.norm, held.norm_round = norm, self.rounds
        return update


# ---------------------------------------------------------------------------------------------- what the learner holds


@dataclass(frozen=True, kw_only=True, slots=True)
class LimiterState:
    """The limiter's memory of one matrix."""

    norm: float
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """The JSON-able part of an optimiser's state; the moments travel beside it as named tensors."""

    kind: str
    seed: int
    steps: int
    """Real steps."""
    rounds: int
    """Learner steps, skipped ones included."""
    parameter_steps: dict[str, int]
    """Real steps in which the parameter had a gradient."""
    limiter: dict[str, LimiterState]


class NamedOptimizer:
    """An optimiser over named parameters: what ``learner_step`` steps and a checkpoint saves."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        matrix_names: Iterable[str],
        settings: OptimizerSettings,
        *,
        seed: int,
    ) -> None:
        """``matrix_names`` are those APOLLO projects (``TrainablePolicy.matrix_names``); AdamW ignores them.

        Raises ConfigError when there is nothing to train, when weights are below fp32, or when a matrix is unknown,
        not 2-D, or no larger than the rank.
        """
        if not parameters:
            raise ConfigError("the policy has no trainable parameters: train one, or take its team out of `trainable`")
        for name, parameter in parameters.items():
            if parameter.dtype.itemsize < 4:
                raise ConfigError(
                    f"{name} is {parameter.dtype}: train fp32 master weights (load the policy in float32)"
                )
        self.parameters = dict(sorted(parameters.items()))
        self.settings = settings
        self.seed = seed
        self.steps = 0
        self.rounds = 0
        self.inner: torch.optim.AdamW | Apollo
        if settings.kind == "apollo":
            matrices = sorted(set(matrix_names))
            _check_matrices(self.parameters, matrices, settings.rank)
            self.inner = Apollo(self.parameters, matrices, settings, seed=seed)
        else:
            self.inner = _adamw(self.parameters, settings)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Of the parameters that have one, by name."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def step(self) -> None:
        """One real step with the gradients as they are."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate_at(self.settings, self.steps)
        if isinstance(self.inner, Apollo):
            self.inner.rounds = self.rounds
        self.inner.step()
        self.steps += 1
        self.rounds += 1

    def skip(self) -> None:
        """A learner step in which nothing moves: weights and moments stay, the limiter's clock goes on."""
        self.rounds += 1

    def state_numbers(self) -> int:
        """How many floating-point numbers the moments hold."""
        tensors, _ = optimizer_state(self)
        return sum(tensor.numel() for tensor in tensors.values())


def _check_matrices(parameters: Mapping[str, Parameter], matrices: Iterable[str], rank: int) -> None:
    for name in matrices:
        if name not in parameters:
            raise ConfigError(f"matrix {name} is not among the trainable parameters")
        shape = tuple(parameters[name].shape)
        if len(shape) != 2:
            raise ConfigError(f"{name} has shape {shape}: APOLLO projects 2-D matrices; leave it out of matrix_names")
        if min(shape) <= rank:
            raise ConfigError(
                f"optimizer.rank is {rank}, but {name} has shape {shape}: give a rank below {min(shape)}, or "
                "optimizer.kind = 'adamw'"
            )


def _adamw(parameters: Mapping[str, Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """torch's AdamW, fused (the fastest on CPU and GPU); decay on tensors of two or more dimensions."""
    wide = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    narrow = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((wide, settings.weight_decay), (narrow, 0.0))
        if group
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.effective_eps,
        fused=True,
    )


def optimizer_state(optimizer: NamedOptimizer) -> tuple[dict[str, Tensor], OptimizerState]:
    """Moments as ``<parameter>/first`` and ``<parameter>/second`` (copies on the CPU), and the rest as a JSON-able
    record."""
    tensors: dict[str, Tensor] = {}
    steps: dict[str, int] = {}
    limiter: dict[str, LimiterState] = {}
    for name, parameter in optimizer.parameters.items():
        if isinstance(optimizer.inner, Apollo):
            held = optimizer.inner.moments.get(name)
            if held is None:
                continue
            first, second, steps[name] = held.first, held.second, held.step
            if held.norm > 0.0:
                limiter[name] = LimiterState(norm=held.norm, round=held.norm_round)
        else:
            state = optimizer.inner.state.get(parameter)
            if not state:
                continue
            first, second, steps[name] = state["exp_avg"], state["exp_avg_sq"], int(state["step"])
        tensors[f"{name}/first"] = first.detach().to("cpu", copy=True).contiguous()
        tensors[f"{name}/second"] = second.detach().to("cpu", copy=True).contiguous()
    record = OptimizerState(
        kind=optimizer.settings.kind,
        seed=optimizer.seed,
        steps=optimizer.steps,
        rounds=optimizer.rounds,
        parameter_steps=steps,
        limiter=limiter,
    )
    return tensors, record


def load_optimizer_state(optimizer: NamedOptimizer, tensors: Mapping[str, Tensor], record: OptimizerState) -> None:
    """Take up a saved state. Raises CheckpointError, before anything has changed, when it belongs to another kind of
    optimiser, other parameters, other shapes, or another seed of projections."""
    kind = optimizer.settings.kind
    if record.kind != kind:
        raise CheckpointError(f"optimiser state is of {record.kind!r}, but optimizer.kind is {kind!r}")
    if record.kind == "apollo" and record.seed != optimizer.seed:
        raise CheckpointError(f"optimiser state has seed {record.seed}, but the run has {optimizer.seed}")
    expected = {f"{name}/{which}" for name in record.parameter_steps for which in ("first", "second")}
    if set(tensors) != expected:
        raise CheckpointError(
            f"optimiser state: tensors differ from the record in {sorted(set(tensors) ^ expected)[:4]}"
        )
    loaded: dict[str, _Moments] = {}
    for name, step in record.parameter_steps.items():
        if name not in optimizer.parameters:
            raise CheckpointError(f"optimiser state has {name}, which is not a trainable parameter of the policy")
        parameter = optimizer.parameters[name]
        wanted = _moment_shape(optimizer, name)
        pair = [tensors[f"{name}/{which}"] for which in ("first", "second")]
        for tensor in pair:
            if tuple(tensor.shape) != wanted:
                raise CheckpointError(f"optimiser state of {name} has shape {tuple(tensor.shape)}, expected {wanted}")
        dtype = torch.float32 if kind == "apollo" else parameter.dtype
        first, second = (tensor.to(parameter.device, dtype, copy=True) for tensor in pair)
        limit = record.limiter.get(name, LimiterState(norm=0.0, round=0))
        loaded[name] = _Moments(first, second, step, limit.norm, limit.round)
    optimizer.steps, optimizer.rounds = record.steps, record.rounds
    if isinstance(optimizer.inner, Apollo):
        optimizer.inner.moments = loaded
        return
    optimizer.inner.state.clear()
    for name, held in loaded.items():
        parameter = optimizer.parameters[name]
        optimizer.inner.state[parameter] = {
            "step": torch.tensor(float(held.step), dtype=torch.float32, device=parameter.device),
            "exp_avg": held.first,
            "exp_avg_sq": held.second,
        }


def _moment_shape(optimizer: NamedOptimizer, name: str) -> tuple[int, ...]:
    shape = tuple(optimizer.parameters[name].shape)
    if not isinstance(optimizer.inner, Apollo) or name not in optimizer.inner.matrices:
        return shape
    rank = optimizer.settings.rank
    return (shape[0], rank) if shape[0] >= shape[1] else (rank, shape[1])
