"""The settings of the ``learning`` room: frozen, checked on construction, without torch.

Every error is a ``ConfigError`` that names the field by its dotted path in the configuration and says what to write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from sparring.errors import ConfigError

LEAST_SCALE_FLOOR = 1e-2
"""No scale below this divides an advantage: 25 equal rewards and then one that is 1e-6 higher must not shout."""


def _require(holds: bool, name: str, value: object, fix: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}: {fix}")


def _share(name: str, value: float) -> None:
    _require(math.isfinite(value) and 0.0 < value <= 1.0, name, value, "give a share above 0 and at most 1")


def _positive(name: str, value: float) -> None:
    _require(math.isfinite(value) and value > 0.0, name, value, "give a finite number above 0")


def _not_negative(name: str, value: float) -> None:
    _require(math.isfinite(value) and value >= 0.0, name, value, "give a finite number, 0 or more")


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    _require(value in valid, name, value, f"choose one of {', '.join(valid)}")


SMALL_MODEL = 20_000_000
"""Numbers below which a model is small: it was made here, and learns at higher rates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages, per policy and team, from the whole batch. ``kind="group", scale="none"`` is
    Dr. GRPO.

    >>> AdvantageSettings().kind
    'leave_one_out'
    """

    kind: Literal["leave_one_out", "running", "group"] = "leave_one_out"
    """Baseline: mean of the others in the batch, running mean of the role (policy and team), or mean of the group of
    forks."""
    decay: float = 0.9
    """Share of the old running mean (and running mean square) that a batch leaves in place, in [0, 1)."""
    scale: Literal["role", "group", "none"] = "role"
    """Divides advantages by the role's running root mean square, or by the standard deviation of the group, or by
    nothing."""
    scale_floor: float = LEAST_SCALE_FLOOR
    """Smallest divisor, in reward units; at least 0.01."""
    forks: int = 4
    """With kind = "group": copies of every world, which part at the tick whose replies are trained and are played on
    until all of these have settled."""

    def __post_init__(self) -> None:
        _one_of("advantages.kind", self.kind, ("leave_one_out", "running", "group"))
        _one_of("advantages.scale", self.scale, ("role", "group", "none"))
        _require(0.0 <= self.decay < 1.0, "advantages.decay", self.decay, "give a share of at least 0 and below 1")
        _require(
            math.isfinite(self.scale_floor) and self.scale_floor >= LEAST_SCALE_FLOOR,
            "advantages.scale_floor",
            self.scale_floor,
            "give at least 0.01, or tiny differences of reward become huge advantages",
        )
        _require(
            self.scale != "group" or self.kind == "group",
            "advantages.scale",
            self.scale,
            "only advantages.kind = 'group' has groups; write 'role' or 'none'",
        )
        _require(self.forks >= 2, "advantages.forks", self.forks, "a group has at least 2")
        _require(
            self.forks == 4 or self.kind == "group",
            "advantages.forks",
            self.forks,
            "only advantages.kind = 'group' plays forks; set it, or leave this out",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSettings:
    """Which reply tokens are worth a backward pass. See ``learning/gate.py`` for the maths.

    >>> GateSettings().rate
    0.03
    """

    mode: Literal["kondo", "delight", "uniform", "off"] = "kondo"
    """Most delightful tokens only; all with sigmoid weights; random tokens at the same rate (the control);
    everything."""
    rate: float = 0.03
    """Share of the tokens (or replies) with an advantage that is kept on average, in (0, 1]."""
    warmup_rate: float = 0.30
    """The rate while fewer than ``warmup_replies`` replies of the policy were eligible."""
    warmup_replies: int = 500
    """Length of the warm-up in eligible replies (trained policy, settled, scored); 0 for none."""
    priority: Literal["delight", "advantage", "abs_advantage", "surprisal"] = "delight"
    """kondo: what is compared with the price; all but delight (advantage x surprisal) are controls."""
    price: float | None = None
    """kondo: fixed price in units of the priority (delight: nats x advantage units) instead of the rate; None takes the
    price that meets the rate."""
    bernoulli: bool = False
    """kondo: keep with probability sigmoid((priority - price) / temperature) instead of priority > price."""
    temperature: float = 1.0
    """eta of the papers: softness of ``delight`` weights and of ``bernoulli``, in units of delight."""
    unit: Literal["token", "reply"] = "token"
    """What is kept or dropped as one."""
    reply_surprisal: Literal["sum", "mean"] = "sum"
    """unit reply: surprisal of a reply, over its tokens (the sum is -log of the reply's probability)."""
    sign_split: bool = True
    """Gate positive and negative advantages apart, each at the rate, so that failures teach too."""
    keep_violations: bool = True
    """Keep every token of a safety violation that has a negative advantage, outside the rate."""
    history: int = 1024
    """Rolling history: delights remembered per policy, team and sign; a longer one lags behind a policy that
    changes."""

    def __post_init__(self) -> None:
        _one_of("gate.mode", self.mode, ("kondo", "delight", "uniform", "off"))
        _one_of("gate.unit", self.unit, ("token", "reply"))
        _one_of("gate.priority", self.priority, ("delight", "advantage", "abs_advantage", "surprisal"))
        _require(
            self.priority == "delight" or self.mode == "kondo",
            "gate.priority",
            self.priority,
            "only gate.mode = 'kondo' compares priorities; leave it out",
        )
        _one_of("gate.reply_surprisal", self.reply_surprisal, ("sum", "mean"))
        _share("gate.rate", self.rate)
        _share("gate.warmup_rate", self.warmup_rate)
        _require(self.warmup_replies >= 0, "gate.warmup_replies", self.warmup_replies, "give 0 or more replies")
        _positive("gate.temperature", self.temperature)
        _require(self.history >= 1, "gate.history", self.history, "give at least 1 (1024 is usual)")
        if self.price is not None:
            _require(
                self.mode == "kondo", "gate.price", self.price, "only gate.mode = 'kondo' has a price; leave it out"
            )
            _require(math.isfinite(self.price), "gate.price", self.price, "give a finite number")
            _require(
                self.price >= 0.0 or not self.sign_split,
                "gate.price",
                self.price,
                "with gate.sign_split the size of delight is compared with it; give 0 or more",
            )
        _require(
            not self.bernoulli or self.mode == "kondo",
            "gate.bernoulli",
            self.bernoulli,
            "only gate.mode = 'kondo' draws; write false",
        )

    @property
    def keeps_whole_replies(self) -> bool:
        """True when a reply is never cut: all of its tokens reach the learner, or none."""
        return self.unit == "reply" or self.mode in ("off", "delight")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """What is minimised over the kept tokens. See ``learning/losses.py`` for the maths.

    >>> LossSettings().needs_whole_replies
    False
    """

    kind: Literal["policy_gradient", "clipped"] = "policy_gradient"
    """Policy gradient with truncated importance weights, or the clipped ratio of PPO."""
    ratio: Literal["token", "reply"] = "token"
    """Importance ratio of each token, or of the reply (geometric mean over its tokens, as in GSPO)."""
    ratio_cap: float = 2.0
    """Largest importance ratio that counts, at least 1; beyond it the weight (policy_gradient) is truncated, or the
    gradient (clipped) is 0."""
    clip_low: float = 0.2
    """clipped: ratios below 1 - clip_low are not pushed further down."""
    clip_high: float = 0.2
    """clipped: ratios above 1 + clip_high are not pushed further up."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the policy's first weights (k3 estimator), per kept token; 0 for none."""
    max_version_lag: int | None = None
    """Turns whose version is further from the learner's, in optimiser steps, are stale (``batch.split_stale``); None
    keeps all."""
    micro_batch_tokens: int = 4096
    """Token positions (rows x longest row) between two backward passes: bounds memory, changes no gradient."""

    def __post_init__(self) -> None:
        _one_of("loss.kind", self.kind, ("policy_gradient", "clipped"))
        _one_of("loss.ratio", self.ratio, ("token", "reply"))
        _require(
            math.isfinite(self.ratio_cap) and self.ratio_cap >= 1.0,
            "loss.ratio_cap",
            self.ratio_cap,
            "give a finite number of at least 1",
        )
        _require(0.0 < self.clip_low < 1.0, "loss.clip_low", self.clip_low, "give a number between 0 and 1")
        _positive("loss.clip_high", self.clip_high)
        _require(
            self.kind != "clipped" or self.ratio_cap >= 1.0 + self.clip_high,
            "loss.ratio_cap",
            self.ratio_cap,
            f"give at least 1 + loss.clip_high = {1.0 + self.clip_high:g}",
        )
        _not_negative("loss.kl_coefficient", self.kl_coefficient)
        _require(
            self.max_version_lag is None or self.max_version_lag >= 0,
            "loss.max_version_lag",
            self.max_version_lag,
            "give 0 or more optimiser steps, or leave it out",
        )
        _require(self.micro_batch_tokens >= 1, "loss.micro_batch_tokens", self.micro_batch_tokens, "give at least 1")

    @property
    def needs_whole_replies(self) -> bool:
        """True when a term needs every token of a reply, so that a gate may only keep or drop whole replies."""
        return self.kl_coefficient > 0.0 or self.ratio == "reply"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """How a gradient becomes a step. See ``learning/optimizers.py`` for the maths.

    >>> OptimizerSettings(kind="apollo").effective_eps
    1e-06
    """

    kind: Literal["adamw", "apollo"] = "adamw"
    learning_rate: float | None = None
    """Change of a weight per step, roughly; in units of weight. None: the loop takes 1e-5 for a whole model of more than
    twenty million parameters, 1e-4 for adapters, 4e-4 for a smaller model, and writes it into the run's configuration."""
    beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""
    beta2: float = 0.999
    """Decay of the second moment, in [0, 1)."""
    eps: float | None = None
    """Added to the root of the second moment; None is 1e-8 for adamw and 1e-6 for apollo."""
    weight_decay: float = 0.0
    """Decoupled; on tensors of two or more dimensions only."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None never clips."""
    warmup_steps: int = 0
    """The learning rate rises linearly over so many real steps."""
    decay_steps: int | None = None
    """The learning rate falls linearly, to 0 at this real step; None leaves it constant."""
    rank: int = 1
    """apollo: rows or columns of the projected gradient; must stay below the smaller side of every projected matrix."""
    scale: float = 128.0
    """apollo: the update is multiplied by its square root (rank 1: 128; rank 256 or a quarter of the width: 1)."""
    projection_gap: int = 200
    """apollo: a new random projection after so many steps."""
    scaling: Literal["channel", "tensor"] = "tensor"
    """apollo: one factor a channel, or one a matrix (APOLLO-Mini)."""
    norm_growth_limit: float | None = None
    """apollo: largest growth of an update's norm from one step to the next (paper: 1.01); None, the default, for
    sparse gradients."""
    norm_growth_gap: int = 8
    """apollo: the limiter starts afresh after so many rounds without an update of the matrix."""

    def __post_init__(self) -> None:
        _one_of("optimizer.kind", self.kind, ("adamw", "apollo"))
        _one_of("optimizer.scaling", self.scaling, ("channel", "tensor"))
        if self.learning_rate is not None:
            _positive("optimizer.learning_rate", self.learning_rate)
        for name, beta in (("optimizer.beta1", self.beta1), ("optimizer.beta2", self.beta2)):
            _require(0.0 <= beta < 1.0, name, beta, "give a share of at least 0 and below 1")
        if self.eps is not None:
            _positive("optimizer.eps", self.eps)
        _not_negative("optimizer.weight_decay", self.weight_decay)
        if self.max_grad_norm is not None:
            _positive("optimizer.max_grad_norm", self.max_grad_norm)
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "give 0 or more steps")
        _require(
            self.decay_steps is None or self.decay_steps >= 1,
            "optimizer.decay_steps",
            self.decay_steps,
            "give 1 or more steps, or leave it out",
        )
        _require(self.rank >= 1, "optimizer.rank", self.rank, "give at least 1")
        _positive("optimizer.scale", self.scale)
        _require(self.projection_gap >= 1, "optimizer.projection_gap", self.projection_gap, "give at least 1 step")
        _require(
            self.norm_growth_limit is None or (math.isfinite(self.norm_growth_limit) and self.norm_growth_limit > 1.0),
            "optimizer.norm_growth_limit",
            self.norm_growth_limit,
            "give a number above 1 (1.01 in the paper), or leave it out",
        )
        _require(self.norm_growth_gap >= 1, "optimizer.norm_growth_gap", self.norm_growth_gap, "give at least 1 round")

    @property
    def rate(self) -> float:
        """``learning_rate`` where one is set; ConfigError where none is."""
        if self.learning_rate is None:
            raise ConfigError("optimizer.learning_rate is not set: give one (1e-5 suits most whole models, 1e-4 LoRA)")
        return self.learning_rate

    @property
    def effective_eps(self) -> float:
        """``eps``, or the default of the kind."""
        if self.eps is not None:
            return self.eps
        return 1e-8 if self.kind == "adamw" else 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOSettings:
    """How small policies learn from rollouts. See ``learning/ppo.py`` for the maths.

    >>> PPOSettings().gae_lambda
    0.95
    """

    gamma: float = 0.99
    """Discount per step of an agent, in [0, 1]."""
    gae_lambda: float = 0.95
    """Decay of the advantage estimator, in [0, 1]; 1 is the whole return over the value."""
    epochs: int = 10
    """Passes over a batch."""
    minibatch: int | None = 64
    """Steps in one gradient step; none takes the whole batch. A shorter remainder counts as a minibatch."""
    shuffle: bool = True
    """A new order of steps for every pass and policy; else as they came."""
    learning_rate: float = 3e-4
    """Change of a weight per step, roughly."""
    learning_rate_end: float | None = None
    """The learning rate falls (or rises) linearly to this at the end of the run; none leaves it constant."""
    clip: float = 0.2
    """Ratios beyond 1 - clip and 1 + clip earn nothing more."""
    clip_end: float | None = None
    """clip moves linearly to this at the end of the run; none leaves it constant."""
    clip_value: float | None = None
    """Largest change of a value, in units of the value head, that still lowers its loss; none never clips."""
    value_coefficient: float = 0.5
    """Weight of the mean squared error of values."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: float | None = 0.5
    """Each policy's gradient is scaled down to this norm; none never clips."""
    target_kl: float | None = None
    """A policy stops for this batch, before the step, where its divergence from the start of the batch exceeds 1.5
    times this; none never stops."""
    kl_window: Literal["pass", "minibatch"] = "pass"
    """Divergence is the mean over the minibatches of this pass so far, or of each minibatch alone."""
    normalize_advantages: Literal["batch", "minibatch", "none"] = "minibatch"
    """Over which steps advantages are shifted to mean 0 and scaled to deviation 1."""
    normalize_observations: bool = False
    """Shift and scale observations by their running mean and deviation, of each policy's own."""
    normalize_values: bool = False
    """The value head learns returns shifted and scaled by their running mean and deviation."""
    max_version_lag: int = 1
    """Rollouts whose version is further behind the learner when they would be trained are dropped, and counted."""
    correction: Literal["ratio", "vtrace", "truncated"] = "ratio"
    """Of older rollouts: by PPO's own ratio alone, by V-trace, or by truncated importance weights."""
    ratio_cap: float = 1.0
    """vtrace and truncated: largest importance weight."""
    adam_eps: float = 1e-5
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        for name, share in (("ppo.gamma", self.gamma), ("ppo.gae_lambda", self.gae_lambda)):
            _require(0.0 <= share <= 1.0, name, share, "give a share of at least 0 and at most 1")
        _require(self.epochs >= 1, "ppo.epochs", self.epochs, "give at least 1")
        _require(self.minibatch is None or self.minibatch >= 1, "ppo.minibatch", self.minibatch, "give at least 1")
        for name in ("learning_rate", "clip", "ratio_cap", "adam_eps"):
            _positive(f"ppo.{name}", getattr(self, name))
        for name in ("clip_value", "max_grad_norm", "target_kl"):
            if getattr(self, name) is not None:
                _positive(f"ppo.{name}", getattr(self, name))
        for name in ("learning_rate_end", "clip_end"):
            if getattr(self, name) is not None:
                _not_negative(f"ppo.{name}", getattr(self, name))
        for name in ("value_coefficient", "entropy_coefficient"):
            _not_negative(f"ppo.{name}", getattr(self, name))
        _require(self.max_version_lag >= 0, "ppo.max_version_lag", self.max_version_lag, "give 0 or more updates")


def usual_learning_rate(parameters: int, *, adapters: bool) -> float:
    """What ``optimizer.learning_rate`` None stands for in reinforcement learning.

    >>> usual_learning_rate(1_000_000, adapters=False)
    0.0004
    """
    return 4e-4 if parameters < SMALL_MODEL else 1e-4 if adapters else 1e-5


def check_gate_and_loss(gate: GateSettings, loss: LossSettings) -> None:
    """Raise ConfigError when the loss needs every token of a reply and the gate would cut replies (design decision
    2)."""
    if loss.needs_whole_replies and not gate.keeps_whole_replies:
        needed, remedy = (
            (f"loss.kl_coefficient = {loss.kl_coefficient:g}", "loss.kl_coefficient = 0")
            if loss.kl_coefficient > 0.0
            else ("loss.ratio = 'reply'", "loss.ratio = 'token'")
        )
        raise ConfigError(
            f"{needed} needs every token of a reply, but gate.unit = 'token' drops single tokens: "
            f"write gate.unit = 'reply', or {remedy}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningSettings:
    """The room's settings together, checked against each other.

    >>> LearningSettings(gate=GateSettings(unit="reply"), loss=LossSettings(kl_coefficient=0.1)).gate.unit
    'reply'
    """

    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)

    def __post_init__(self) -> None:
        check_gate_and_loss(self.gate, self.loss)
