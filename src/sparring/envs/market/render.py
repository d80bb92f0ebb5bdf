"""An observation as text. What all agents of a tick share comes apart from what one agent sees."""

from __future__ import annotations

from typing import get_args, get_type_hints

from sparring.envs.market.records import ACTIONS, MarketObservation
from sparring.types import PromptParts

BRIEF_RULES = "Market game. Reply with one JSON action. Your book lists your real business."


def full_rules() -> str:
    """The rules with the whole vocabulary, for models that were never trained on the market, and for people."""
    lines = [
        BRIEF_RULES,
        "Whoever knows a seed can empty its vault. Money can be paid to anybody; what is paid to a stranger is gone.",
        "Numbers of messages and deals are those in brackets. Actions, one of:",
    ]
    for action in ACTIONS:
        tag = action.__struct_config__.tag
        hints = get_type_hints(action)
        fields = "".join(f',"{name}":{_example(hints[name])}' for name in action.__struct_fields__)
        lines.append(f'{{"action":"{tag}"{fields}}} {(action.__doc__ or "").splitlines()[0]}')
    return "\n".join(lines)


def _example(hint: object) -> str:
    options = get_args(hint)
    if options:
        return '"' + "|".join(str(option) for option in options) + '"'
    return {int: "1", float: "40"}.get(hint, '"..."') if isinstance(hint, type) else '"..."'


def render_shared(observation: MarketObservation) -> str:
    """The market, the same for everybody."""
    lines = [f"Tick {observation.tick}"]
    lines += [f"{market.id} {market.question}? yes {market.yes_percent}" for market in observation.predictions]
    lines += [f"{perp.ticker} ${perp.price} {perp.change_percent:+d}%" for perp in observation.perps]
    lines += [f"Public {handle}: {text}" for handle, text in observation.comments]
    return "\n".join(lines)


def render_private(observation: MarketObservation, newest: int | None = None) -> str:
    """What one agent has, knows and was sent; ``newest`` keeps only that many of its newest messages."""
    o = observation
    lines = [
        f"You {o.handle}. Cash ${o.cash}. Vault ${o.vault}, seed:{o.secret}",
        f"Left: {o.checks_left} checks, {o.escalations_left} escalations",
    ]
    if o.group:
        lines.append(f"Group {o.group}")
    lines.append("Book:")
    lines += [f"#{entry.order} {entry.counterparty} ${entry.amount} {entry.kind}" for entry in o.book]
    lines.append("Heard:")
    lines += [f"{g.owner} #{g.order} {g.counterparty} ${g.amount} {g.kind}" for g in o.gossip]
    lines.append("Goods: " + ", ".join(f"{item} {count} ${value}" for item, count, value in o.values))
    if o.signals:
        lines.append("Hints: " + ", ".join(f"{market} {side}" for market, side in o.signals))
    lines += [f"Position: {p.market} {p.side} {p.size} profit {p.profit}" for p in o.positions]
    lines += [f"Record: {handle} reports {reports} age {age}" for handle, reports, age in o.records]
    if o.notice:
        lines.append(f"Last: {o.notice}")
    lines += [
        f"Deal [{deal.number}] {deal.counterparty}: you {deal.side} {deal.item} for ${deal.price}" for deal in o.deals
    ]
    shown = o.inbox if newest is None else o.inbox[len(o.inbox) - min(newest, len(o.inbox)) :]
    for message in shown:
        badge = " badge" if message.badge else ""
        group = f" in {message.group}" if message.group else ""
        checked = f" checked {message.checked}" if message.checked else ""
        lines.append(f"Message [{message.number}] {message.sender}{badge}{group}{checked}: {message.content}")
    if not shown and not o.deals:
        lines.append("No message.")
    return "\n".join(lines)


def render(observation: MarketObservation, newest: int | None = None) -> PromptParts:
    return PromptParts(shared=render_shared(observation), private=render_private(observation, newest))
