"""Which tokens are worth a backward pass: decided before any learner forward, from the sampler's own log-probs.

Source: I. Osband, "Does This Gradient Spark Joy?" (arXiv 2603.20526, Kondo gate) and "Delightful Policy Gradient"
(arXiv 2603.14608). With advantage U and surprisal l = -log pi(a|s) >= 0, *delight* is chi = U * l.

- ``delight``: weight sigmoid(chi / eta).
- ``kondo``: keep (weight 1) where priority > price. The priority is chi, or, as controls, U, |U| or l; with
  ``sign_split``, where positive and negative advantages are gated apart, its absolute value. The price is fixed, or the
  (1 - rate) quantile of a rolling history together with the batch. ``bernoulli`` keeps with probability
  sigmoid((priority - price) / eta) instead.
- ``uniform``: keep at random with probability ``rate``: the control.
- ``off``: keep all.

In every mode a turn without advantage is never kept (its gradient is 0), and a safety violation with a negative
advantage keeps all of its tokens, outside the rate and the history. A violation with a positive advantage goes
through the gate like any other: to force it in would teach the violation.

*The rate is met on average*: it is the share of tokens (unit ``reply``: replies) with an advantage, of each policy,
team and sign. The budget of a batch is no rounded count but a price over history and batch together, with the values
that equal the price kept at random at the share that is left; so three replies a tick keep 3 % too, most ticks
keeping nothing. While the distribution drifts, the history lags; the shortfall so far is therefore paid back slowly
(``aimed_rate``). The first batch has no history, and the same rule is then the batch's own quantile.

Random draws come from numpy's Philox keyed by (seed, batches so far), in the order of TurnIds: a permutation of the
batch changes nothing, and a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparring.errors import CheckpointError, TrainingError
from sparring.learning.advantages import CreditedTurn
from sparring.learning.settings import GateSettings

Array = NDArray[np.float64]
Key = tuple[str, str, int]
"""(policy, team, sign): sign is 1 or -1 with sign_split, else 0."""

BISECTIONS = 40
LEAST_WEIGHT = 1e-30
"""delight: no weight underflows to 0, which would drop the token and cut its reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedTurn:
    """A credited turn with the gate's word on each token of its reply."""

    credited: CreditedTurn
    weights: tuple[float, ...]
    """Shape (R,), in [0, 1]; 0 is dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReport:
    """What the gate did to one policy's turns in one team, in one batch."""

    policy: str
    team: str
    rate: float
    """The rate in force: warm-up or not."""
    eligible_replies: int
    kept_replies: int
    """Replies with at least one token kept."""
    eligible_tokens: int
    kept_tokens: int
    candidate_tokens: int
    """Tokens the rate refers to: with an advantage, and not forced."""
    forced_replies: int
    """Violations kept outside the rate."""
    mean_delight: float
    """Signed mean of advantage * surprisal over the eligible tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateDecision:
    """Weights for every turn, in order of TurnId, and a report for each policy and team, sorted."""

    turns: tuple[GatedTurn, ...]
    reports: tuple[GateReport, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EligibleCount:
    """Replies of one policy that were eligible so far."""

    policy: str
    replies: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryEntry:
    """What belongs to the array ``history/<index>`` of a saved gate."""

    policy: str
    team: str
    sign: int
    shortfall: float
    """Tokens (or replies) that the rate would have kept so far, less those kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateState:
    """The JSON-able part of a gate's state; the arrays travel beside it."""

    batches: int
    eligible: tuple[EligibleCount, ...]
    histories: tuple[HistoryEntry, ...]


@dataclass(slots=True)
class _History:
    priorities: Array
    """Shape (H,), oldest first, H <= settings.history."""
    shortfall: float = 0.0


# ------------------------------------------------------------------------------------------------------- pure functions


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow, elementwise.

    >>> sigmoid(np.array([0.0, -1000.0])).tolist()
    [0.5, 0.0]
    """
    small = np.exp(-np.abs(x))
    result: Array = np.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small))
    return result


def delight(advantage: float, log_probs: Array) -> Array:
    """chi = U * l of each token, l = max(0, -log-prob); shape (R,), nats x advantage units (arXiv 2603.20526).

    >>> delight(2.0, np.array([-0.5, -1.0])).tolist()
    [1.0, 2.0]
    """
    chi: Array = advantage * np.maximum(0.0, -log_probs)
    return chi


def token_priority(advantage: float, chi: Array, priority: str) -> Array:
    """What the gate compares with its price, of each token (or reply); shape (R,), from the delight of the same shape.

    ``delight`` chi, ``advantage`` U, ``abs_advantage`` |U|, ``surprisal`` l = chi / U. U is not 0.

    >>> token_priority(-2.0, np.array([-1.0, -4.0]), "surprisal").tolist()
    [0.5, 2.0]
    """
    if priority == "delight":
        return chi
    if priority == "surprisal":
        surprisal: Array = chi / advantage
        return surprisal
    return np.full(len(chi), abs(advantage) if priority == "abs_advantage" else advantage)


def quantile_price(pool: Array, rate: float) -> tuple[float, float]:
    """The price that keeps exactly the share ``rate`` of ``pool``: (price, probability for values equal to it).

    Values above the price are kept, values equal to it with the probability. The price is the value at which the
    descending order first reaches ``rate * n``. Shape (n,), n >= 1.

    >>> quantile_price(np.array([1.0, 4.0, 3.0, 2.0]), 0.5)
    (3.0, 1.0)
    >>> quantile_price(np.array([1.0, 4.0, 3.0, 2.0]), 0.125)
    (4.0, 0.5)
    >>> quantile_price(np.array([2.0, 2.0, 2.0, 2.0]), 0.25)
    (2.0, 0.25)
    """
    budget = rate * len(pool)
    index = min(len(pool), max(1, math.ceil(budget)))
    price = float(np.partition(pool, len(pool) - index)[len(pool) - index])
    above, equal = int(np.count_nonzero(pool > price)), int(np.count_nonzero(pool == price))
    return price, min(1.0, max(0.0, (budget - above) / equal))


def soft_price(pool: Array, rate: float, temperature: float) -> float:
    """The price at which mean(sigmoid((pool - price) / temperature)) is ``rate``; by bisection. Shape (n,), n >= 1.

    The paper puts the (1 - rate) quantile here, which keeps far more than the rate when the temperature is not small;
    both agree as the temperature goes to 0.

    >>> round(soft_price(np.array([1.0, 1.0]), 0.5, 1.0), 6)
    1.0
    """
    low, high = float(pool.min()) - 40.0 * temperature, float(pool.max()) + 40.0 * temperature
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if float(sigmoid((pool - middle) / temperature).mean()) > rate:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def aimed_rate(rate: float, shortfall: float, batch: int) -> float:
    """The rate to aim at now, so that what was kept too little or too much before is paid back within a few batches.

    rate * exp(shortfall / (5 + 2 * rate * batch)), kept within [rate / 64, min(1, 16 * rate)]. ``batch`` is the
    number of values in the batch; at most half of the shortfall is paid back at once, so the rate does not swing.

    >>> aimed_rate(0.03, shortfall=0.0, batch=100)
    0.03
    """
    factor = math.exp(min(max(shortfall / (5.0 + 2.0 * rate * batch), -10.0), 10.0))
    return min(1.0, rate * min(max(factor, 1.0 / 64.0), 16.0))


# ------------------------------------------------------------------------------------------------------------- the gate


class Gate:
    """The gate with its memory: rolling histories, counters, and the seed of its draws."""

    def __init__(self, settings: GateSettings, *, seed: int) -> None:
        """``seed`` >= 0 keys all draws."""
        self.settings = settings
        self._seed = seed
        self._batches = 0
        self._eligible: dict[str, int] = {}
        self._histories: dict[Key, _History] = {}

    def rate(self, policy: str) -> float:
        """The rate in force for the policy's next batch: by replies that were eligible before it."""
        warming = self._eligible.get(policy, 0) < self.settings.warmup_replies
        return self.settings.warmup_rate if warming else self.settings.rate

    def weigh(self, turns: Sequence[CreditedTurn]) -> GateDecision:
        """Weights for the turns of trained policies. One call a batch: it moves histories, counters and draws on.

        Raises TrainingError, before anything has moved, when an advantage or a log-prob is not finite or a turn has
        not one log-prob a reply token.
        """
        ordered = sorted(turns, key=lambda turn: turn.settlement.turn.id)
        delights = [_token_delight(turn) for turn in ordered]
        draws = np.random.Generator(np.random.Philox(key=[self._seed & (2**64 - 1), self._batches]))
        weights: list[Array] = []
        waiting: dict[Key, list[int]] = {}
        units: list[Array] = []
        uniforms: list[Array] = []
        for index, (turn, tokens) in enumerate(zip(ordered, delights, strict=True)):
            units.append(tokens if self.settings.unit == "token" else self._of_reply(tokens))
            uniforms.append(draws.random(len(units[index])))
            weights.append(np.zeros(len(tokens)))
            if turn.advantage == 0.0 or not len(tokens):
                continue
            if self._forced(turn):
                weights[index] += 1.0
            else:
                waiting.setdefault(self._key(turn), []).append(index)
        for key in sorted(waiting):
            members = waiting[key]
            kept = self._keep(
                key,
                np.concatenate([units[index] for index in members]),
                np.concatenate([self._priority(ordered[index], units[index]) for index in members]),
                np.concatenate([uniforms[index] for index in members]),
            )
            bounds = np.cumsum([len(units[index]) for index in members])[:-1]
            for index, part in zip(members, np.split(kept, bounds), strict=True):
                weights[index] += part  # a reply's single weight spreads over its tokens
        gated = tuple(
            GatedTurn(credited=turn, weights=tuple(part.tolist())) for turn, part in zip(ordered, weights, strict=True)
        )
        reports = self._reports(gated, delights)
        self._batches += 1
        for turn in ordered:
            if turn.counted:
                policy = turn.settlement.turn.policy
                self._eligible[policy] = self._eligible.get(policy, 0) + 1
        return GateDecision(turns=gated, reports=reports)

    def state(self) -> tuple[dict[str, Array], GateState]:
        """Everything an exact resume needs: named float64 arrays, and a JSON-able record."""
        keys = sorted(self._histories)
        arrays = {f"history/{index}": self._histories[key].priorities.copy() for index, key in enumerate(keys)}
        entries = tuple(
            HistoryEntry(policy=key[0], team=key[1], sign=key[2], shortfall=self._histories[key].shortfall)
            for key in keys
        )
        eligible = tuple(EligibleCount(policy=name, replies=count) for name, count in sorted(self._eligible.items()))
        return arrays, GateState(batches=self._batches, eligible=eligible, histories=entries)

    def load_state(self, arrays: Mapping[str, Array], state: GateState) -> None:
        """Take up a saved state. Raises CheckpointError when arrays and record do not belong together."""
        expected = {f"history/{index}" for index in range(len(state.histories))}
        if set(arrays) != expected:
            raise CheckpointError(f"gate state: arrays {sorted(arrays)} where {sorted(expected)} were expected")
        histories: dict[Key, _History] = {}
        for index, entry in enumerate(state.histories):
            values = np.array(arrays[f"history/{index}"], dtype=np.float64)
            if values.ndim != 1 or not np.isfinite(values).all():
                raise CheckpointError(f"gate state: history/{index} is not a list of finite numbers")
            histories[(entry.policy, entry.team, entry.sign)] = _History(values, entry.shortfall)
        self._batches = state.batches
        self._eligible = {count.policy: count.replies for count in state.eligible}
        self._histories = histories

    def _of_reply(self, tokens: Array) -> Array:
        """One delight for the reply: U times the sum (or mean) of its surprisals."""
        if not len(tokens):
            return np.zeros(1)
        return np.array([tokens.sum() if self.settings.reply_surprisal == "sum" else tokens.mean()])

    def _forced(self, turn: CreditedTurn) -> bool:
        return self.settings.keep_violations and turn.settlement.reward.violation and turn.advantage < 0.0

    def _key(self, turn: CreditedTurn) -> Key:
        sign = (1 if turn.advantage > 0.0 else -1) if self.settings.sign_split else 0
        return turn.settlement.turn.policy, turn.settlement.turn.team, sign

    def _priority(self, turn: CreditedTurn, chi: Array) -> Array:
        priority = token_priority(turn.advantage, chi, self.settings.priority)
        return np.abs(priority) if self.settings.sign_split else priority

    def _keep(self, key: Key, chi: Array, priority: Array, uniform: Array) -> Array:
        """Weights of one policy, team and sign. All shapes (N,); ``uniform`` are draws in [0, 1)."""
        settings = self.settings
        rate = self.rate(key[0])
        if settings.mode == "off":
            return np.ones(len(chi))
        if settings.mode == "delight":
            weights: Array = np.maximum(sigmoid(chi / settings.temperature), LEAST_WEIGHT)
            return weights
        if settings.mode == "uniform":
            return (uniform < rate).astype(np.float64)
        if settings.price is not None:
            return self._above(priority, settings.price, 0.0, uniform)
        history = self._histories.setdefault(key, _History(np.zeros(0)))
        pool = np.concatenate([history.priorities, priority])
        target = aimed_rate(rate, history.shortfall, len(priority))
        if settings.bernoulli:
            price, share_at_price = soft_price(pool, target, settings.temperature), 0.0
        else:
            price, share_at_price = quantile_price(pool, target)
        kept = self._above(priority, price, share_at_price, uniform)
        # A budget that cannot be spent (all surprisals 0) is not saved up without end.
        limit = rate * settings.history
        history.shortfall = min(max(history.shortfall + rate * len(priority) - float(kept.sum()), -limit), limit)
        stride = math.ceil(len(priority) / settings.history)  # a batch larger than the history is thinned evenly
        history.priorities = np.concatenate([history.priorities, priority[::stride]])[-settings.history :]
        return kept

    def _above(self, priority: Array, price: float, share_at_price: float, uniform: Array) -> Array:
        if self.settings.bernoulli:
            chosen = uniform < sigmoid((priority - price) / self.settings.temperature)
        else:
            chosen = (priority > price) | ((priority == price) & (uniform < share_at_price))
        kept: Array = (chosen & (priority != 0.0)).astype(np.float64)
        return kept

    def _reports(self, gated: Sequence[GatedTurn], delights: Sequence[Array]) -> tuple[GateReport, ...]:
        roles: dict[tuple[str, str], list[int]] = {}
        for index, turn in enumerate(gated):
            if turn.credited.counted:
                source = turn.credited.settlement.turn
                roles.setdefault((source.policy, source.team), []).append(index)
        reports = []
        for (policy, team), members in sorted(roles.items()):
            kept = [sum(1 for weight in gated[index].weights if weight) for index in members]
            forced = [self._forced(gated[index].credited) for index in members]
            tokens = [len(delights[index]) for index in members]
            candidates = sum(
                count
                for index, count, force in zip(members, tokens, forced, strict=True)
                if gated[index].credited.advantage != 0.0 and not force
            )
            total = math.fsum(math.fsum(delights[index]) for index in members)
            reports.append(
                GateReport(
                    policy=policy,
                    team=team,
                    rate=self.rate(policy),
                    eligible_replies=len(members),
                    kept_replies=sum(1 for count in kept if count),
                    eligible_tokens=sum(tokens),
                    kept_tokens=sum(kept),
                    candidate_tokens=candidates,
                    forced_replies=sum(forced),
                    mean_delight=total / max(1, sum(tokens)),
                )
            )
        return tuple(reports)


def _token_delight(credited: CreditedTurn) -> Array:
    turn = credited.settlement.turn
    if len(turn.log_probs) != len(turn.reply_ids):
        raise TrainingError(
            f"turn {turn.id} has {len(turn.log_probs)} log-probs for {len(turn.reply_ids)} reply tokens"
        )
    log_probs = np.array(turn.log_probs, dtype=np.float64)
    if not math.isfinite(credited.advantage):
        raise TrainingError(f"the advantage of turn {turn.id} is {credited.advantage}")
    if not np.isfinite(log_probs).all():
        raise TrainingError(f"a log-prob of turn {turn.id} is not finite: {turn.log_probs}")
    return delight(credited.advantage, log_probs)
