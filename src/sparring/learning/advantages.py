"""Rewards to advantages: one number a turn, per role, from the whole batch at once.

A *role* is a policy in a team: red's rewards never shift blue's baseline. Sums are ``math.fsum``, correctly rounded
whatever the order, so a permutation of the batch changes not one bit. State is updated once a batch, after use.

Legend: r rewards of a role in the batch (n of them), b baseline, a = r - b, s scale; the advantage is a / s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparring.errors import TrainingError
from sparring.learning.settings import AdvantageSettings
from sparring.types import Settlement, TurnId

NEGLIGIBLE = 1e-9
"""Differences of reward below this, relative to max(1, |reward|), are rounding and count as 0: Adam would blow them
up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditedTurn:
    """A settled, scored turn with its advantage."""

    settlement: Settlement
    advantage: float
    """Reward over the baseline, divided by the scale; exactly 0 when the reward equals the baseline."""
    counted: bool = True
    """False leaves its tokens out of the loss's denominator: a group of equal rewards would only dilute the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credits:
    """What a batch of settlements came to. Turns that are in no count below are in ``turns``."""

    turns: tuple[CreditedTurn, ...]
    """In order of TurnId, whatever the order of the batch."""
    unscored: int
    """Turns left out because no judge scored them."""
    dropped: int
    """Turns left out because their group has fewer than two scored turns."""
    alone: int
    """Turns kept with advantage 0 because nothing in the batch or the history could be their baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBaseline:
    """Running figures of one role, after the last batch.

    >>> RoleBaseline(policy="shared", team="red", batches=1, mean=0.5, mean_square=0.0).mean
    0.5
    """

    policy: str
    team: str
    batches: int
    """Batches that have updated ``mean``."""
    mean: float
    """Exponential moving average of the batch means of the rewards."""
    mean_square: float
    """Exponential moving average of the mean squared unscaled advantage, over batches in which any differed from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineState:
    """Everything that must be saved for an exact resume; JSON-able (msgspec encodes and decodes it as it is).

    >>> BaselineState().roles
    ()
    """

    roles: tuple[RoleBaseline, ...] = ()
    """Sorted by policy, then team."""


def exact_mean(values: Sequence[float]) -> float:
    """Mean with a correctly rounded sum; exactly ``values[0]`` when all are equal.

    >>> exact_mean([0.1] * 25)
    0.1
    """
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def root_mean_square(values: Sequence[float]) -> float:
    """sqrt(mean(v^2)), independent of the order.

    >>> root_mean_square([3.0, -4.0, 0.0, 0.0])
    2.5
    """
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """a_i = r_i - mean of the others = n / (n - 1) * (r_i - mean(r)). Shape (n,) to (n,), reward units.

    The baseline does not contain the sample it judges, so it is unbiased (Kool et al. 2019, RLOO). One reward alone has
    no baseline: 0. Equal rewards give exact zeros.

    >>> leave_one_out([1.0, 2.0, 6.0])
    [-3.0, -1.5, 4.5]
    """
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    mean = exact_mean(rewards)
    return [_significant((reward - mean) * count / (count - 1), reward) for reward in rewards]


def against_running(rewards: Sequence[float], baseline: float) -> list[float]:
    """a_i = r_i - b with one baseline from earlier batches (role-conditioned advantage, as in SPIRAL).

    >>> against_running([1.0, 0.25], 0.25)
    [0.75, 0.0]
    """
    return [_significant(reward - baseline, reward) for reward in rewards]


def group_relative(rewards: Sequence[float], *, deviation_floor: float | None = None) -> list[float]:
    """a_i = r_i - mean(group), divided by max(std, floor) only when a floor is given (GRPO); without one it is Dr.
    GRPO.

    The std is that of the population. Shape (n,) to (n,).

    >>> group_relative([0.0, 1.0, 0.0, 1.0])
    [-0.5, 0.5, -0.5, 0.5]
    >>> group_relative([0.0, 1.0, 0.0, 1.0], deviation_floor=0.01)
    [-1.0, 1.0, -1.0, 1.0]
    """
    mean = exact_mean(rewards)
    centred = [_significant(reward - mean, reward) for reward in rewards]
    if deviation_floor is None:
        return centred
    scale = max(root_mean_square(centred), deviation_floor)
    return [value / scale for value in centred]


def credit(
    settlements: Sequence[Settlement],
    settings: AdvantageSettings,
    state: BaselineState,
    *,
    groups: Mapping[TurnId, str] | None = None,
) -> tuple[Credits, BaselineState]:
    """Advantages of one batch, and the state after it.

    Pass the turns of trained policies only; what others earned is nobody's baseline. ``groups`` names the group of
    each turn (kind ``group``: forks of one situation; groups never mix roles). Forks are episodes of their own, so that
    their TurnIds differ. ``running`` uses leave-one-out in a role's first batch.

    The scale ``role`` is max(floor, running root mean square, root mean square of this batch): the batch's own term
    bounds every advantage by sqrt(n), however long rewards had been equal before.

    Raises TrainingError when a reward is not finite, a turn comes twice, or a turn has no group.
    """
    scored, unscored = _scored(settlements)
    old = {(role.policy, role.team): role for role in state.roles}
    new = dict(old)
    credited: list[CreditedTurn] = []
    dropped = alone = 0
    for key, members in _by_role(scored).items():
        role = old.get(key)
        if settings.kind == "group":
            members, raw, counted, lone = _group_advantages(members, settings, groups)
            dropped += lone
        else:
            rewards = [_total(member) for member in members]
            counted = [True] * len(members)
            if settings.kind == "running" and role is not None:
                raw = against_running(rewards, role.mean)
            else:
                raw = leave_one_out(rewards)
                alone += len(rewards) == 1
        if not members:
            continue
        scale = _scale(raw, role, settings)
        credited += [
            CreditedTurn(settlement=member, advantage=value / scale, counted=counts)
            for member, value, counts in zip(members, raw, counted, strict=True)
        ]
        new[key] = _updated(key, role, [_total(member) for member in members], raw, settings.decay)
    credited.sort(key=lambda turn: turn.settlement.turn.id)
    credits = Credits(turns=tuple(credited), unscored=unscored, dropped=dropped, alone=alone)
    return credits, BaselineState(roles=tuple(new[key] for key in sorted(new)))


def _significant(difference: float, reward: float) -> float:
    return 0.0 if abs(difference) <= NEGLIGIBLE * max(1.0, abs(reward)) else difference


def _total(settlement: Settlement) -> float:
    total = settlement.reward.total
    assert total is not None  # _scored left the others out
    return float(total)


def _scored(settlements: Sequence[Settlement]) -> tuple[list[Settlement], int]:
    """The scored settlements in order of TurnId, and how many were not scored."""
    seen: set[TurnId] = set()
    scored: list[Settlement] = []
    for settlement in settlements:
        turn_id, total = settlement.turn.id, settlement.reward.total
        if turn_id in seen:
            raise TrainingError(
                f"turn {turn_id} is in the batch twice; a turn is trained once (number forks as episodes)"
            )
        seen.add(turn_id)
        if total is None:
            continue
        if not math.isfinite(total):
            raise TrainingError(f"the reward of turn {turn_id} is {total}; a judge that fails leaves it None")
        scored.append(settlement)
    scored.sort(key=lambda settlement: settlement.turn.id)
    return scored, len(settlements) - len(scored)


def _by_role(settlements: Sequence[Settlement]) -> dict[tuple[str, str], list[Settlement]]:
    roles: dict[tuple[str, str], list[Settlement]] = {}
    for settlement in settlements:
        roles.setdefault((settlement.turn.policy, settlement.turn.team), []).append(settlement)
    return dict(sorted(roles.items()))


def _group_advantages(
    members: Sequence[Settlement], settings: AdvantageSettings, groups: Mapping[TurnId, str] | None
) -> tuple[list[Settlement], list[float], list[bool], int]:
    """Members that have a group, their unscaled advantages, whether they count, and how many were dropped."""
    by_group: dict[str, list[Settlement]] = {}
    for member in members:
        if groups is None or member.turn.id not in groups:
            raise TrainingError(
                f"turn {member.turn.id} has no group; advantages.kind = 'group' needs one for each turn"
            )
        by_group.setdefault(groups[member.turn.id], []).append(member)
    kept: list[Settlement] = []
    raw: list[float] = []
    counted: list[bool] = []
    dropped = 0
    floor = settings.scale_floor if settings.scale == "group" else None
    for group in by_group.values():
        if len(group) < 2:
            dropped += len(group)
            continue
        values = group_relative([_total(member) for member in group], deviation_floor=floor)
        kept += group
        raw += values
        counted += [any(values)] * len(group)
    return kept, raw, counted, dropped


def _scale(raw: Sequence[float], role: RoleBaseline | None, settings: AdvantageSettings) -> float:
    if settings.scale != "role":
        return 1.0
    running = 0.0 if role is None else math.sqrt(role.mean_square)
    return max(settings.scale_floor, running, root_mean_square(raw))


def _updated(
    key: tuple[str, str], role: RoleBaseline | None, rewards: Sequence[float], raw: Sequence[float], decay: float
) -> RoleBaseline:
    """One update a batch: m += (1 - decay) * (batch mean - m), which leaves m alone, to the bit, when both are
    equal."""
    mean, square = exact_mean(rewards), math.fsum(value * value for value in raw) / len(raw)
    if role is None:
        return RoleBaseline(policy=key[0], team=key[1], batches=1, mean=mean, mean_square=square)
    mean_square = role.mean_square
    if square > 0.0:
        mean_square = square if mean_square == 0.0 else mean_square + (1.0 - decay) * (square - mean_square)
    return RoleBaseline(
        policy=key[0],
        team=key[1],
        batches=role.batches + 1,
        mean=role.mean + (1.0 - decay) * (mean - role.mean),
        mean_square=mean_square,
    )
