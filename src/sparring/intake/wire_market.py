"""The market's records as JSON of the market's HTTP contract (spec/market.md 1.2 and 1.3), and back.

JSON names are camelCase, and stand nowhere else. What the market shows beyond the original contract (book, goods, deals,
signals) are further fields of a scenario, so that an observation comes back from it whole: a client that knows only the
original's fields leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from sparring.envs.market import records as r
from sparring.errors import SparringError, nearest
from sparring.types import ParseFailure, ParseFailureKind

ARCHETYPE = "trader"
"""What the contract's field ``archetype`` says of everybody: a team's name there told the policy whom to trust."""
NOT_AN_ACTION = "not_an_action"
PARSE_FAILURE = "parse_failure"
MOST_REASONING = 10_000


class FieldError(SparringError):
    """A field of a request does not hold what it should.

    Attributes:
        field: its name in the request, dotted.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


# -------------------------------------------------------------------------------------------------------- requests


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Unknown fields are left alone: clients of the original send more than is read."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class InitRequest(_Wire, frozen=True, kw_only=True):
    """``POST /init``."""

    seed: int
    number: int = msgspec.field(name="numNPCs", default=20)
    archetypes: list[str] = []
    """Teams in turn: the first agent's, the second's, and round again."""


class SeatRequest(_Strict, frozen=True, kw_only=True):
    npc_id: str
    team: str


class WorldRequest(_Strict, frozen=True, kw_only=True):
    """``POST /v2/init``: seats by name, or a number of them as in ``/init``."""

    seed: int
    world: str = "main"
    episode: int = 0
    seats: list[SeatRequest] | None = None
    number: int | None = msgspec.field(name="numNPCs", default=None)
    archetypes: list[str] = []
    settings: dict[str, bool | int | float | str] = {}
    """Of the market's rules, over those of the server."""


class RestoreRequest(_Strict, frozen=True, kw_only=True):
    """``POST /v2/restore``."""

    snapshot: bytes
    """Base64 in JSON."""
    world: str = "main"


class ExecuteRequest(_Wire, frozen=True, kw_only=True):
    """``POST /execute`` and ``/v2/execute``, and each of the actions of ``/v2/tick``."""

    npc_id: str
    action: dict[str, Any]
    reasoning: str | None = None
    action_id: str | None = None


class TickRequest(_Strict, frozen=True, kw_only=True):
    """``POST /v2/tick``."""

    actions: list[ExecuteRequest] = []
    tick: int | None = None
    """The tick that is meant; any other is a conflict."""
    missing: Literal["refuse", "wait"] = "refuse"
    """What becomes of agents without an action."""


def read_request(data: bytes, kind: type[Any]) -> Any:
    """A request's body as ``kind``.

    Raises:
        FieldError: It is no JSON object of that kind; the field is named.
    """
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError("", f"the body is no JSON: {error}") from error


def _field_error(error: msgspec.ValidationError, *, under: str = "") -> FieldError:
    """msgspec says ``... - at `$.action.amount` ``, or names the missing field in words."""
    text = str(error)
    what, _, place = text.partition(" - at `")
    path = re.sub(r"\[\.\.\.\]", "", place.removesuffix("`").removeprefix("$").lstrip("."))
    named = re.search(r"(?:missing required|unknown) field `([^`]+)`", what)
    if named is not None:
        path = f"{path}.{named[1]}" if path else named[1]
    if under:
        path = f"{under}.{path}" if path else under
    return FieldError(path, what)


# --------------------------------------------------------------------------------------------------------- actions

_KINDS: Mapping[str, type[msgspec.Struct]] = {str(kind.__struct_config__.tag): kind for kind in r.ACTIONS}
_ALIASES = {"hold": "wait"}
_PERPETUAL = frozenset({"open_perp", "close_perp"})
_NUMBERS = {"message": "messageId", "deal": "dealId", "order": "orderId"}
_OPTIONAL = frozenset({
    "ticker", "marketId", "side", "amount", "positionId", "reasoning", "target", "content", "messageId", "dealId", "orderId",
    "item", "group", "secret",
})  # fmt: skip
"""Fields that any action may carry; those that are not its own are left alone, as clients send all they have."""


def _wire_name(kind: str, field: str) -> str:
    if field == "market":
        return "ticker" if kind in _PERPETUAL else "marketId"
    return _NUMBERS.get(field, field)


def action_to_wire(action: object) -> dict[str, Any]:
    """An action, a parse failure or anything at all as the contract's ``action``.

    >>> action_to_wire(r.ClosePerp(market="BTC"))
    {'type': 'close_perp', 'ticker': 'BTC'}
    """
    if isinstance(action, ParseFailure):
        return {"type": PARSE_FAILURE, "kind": action.kind.value, "detail": action.detail[:200]}
    if not isinstance(action, msgspec.Struct) or type(action) not in r.ACTIONS:
        return {"type": NOT_AN_ACTION}
    kind = r.action_name(action)
    fields = {_wire_name(kind, name): getattr(action, name) for name in action.__struct_fields__}
    try:  # a player in Python may have put anything into the fields
        msgspec.json.decode(msgspec.json.encode(action), type=type(action))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        return {"type": NOT_AN_ACTION}
    return {"type": kind, **fields}


def action_from_wire(wire: Mapping[str, Any]) -> object:
    """The action that is meant; None for what is said to be none.

    Raises:
        FieldError: No such type, a field is missing, or a value is out of its range.
    """
    kind = wire.get("type")
    if not isinstance(kind, str):
        raise FieldError("action.type", "give the action's name")
    if kind == NOT_AN_ACTION:
        return None
    if kind == PARSE_FAILURE:
        return _failure(wire)
    kind = _ALIASES.get(kind, kind)
    found = _KINDS.get(kind)
    if found is None:
        raise FieldError("action.type", f"no action {kind[:60]!r}{nearest(kind[:60], _KINDS)}")
    unknown = sorted(set(wire) - _OPTIONAL - {"type"})
    if unknown:
        raise FieldError(f"action.{unknown[0][:60]}", "no action has this field")
    fields = {}
    held = wire.get("positionId")
    if held is not None and kind in ("sell", "close_perp"):
        fields = _of_position(held, found)
    for name in found.__struct_fields__:
        value = wire.get(_wire_name(kind, name))
        if value is not None:
            if fields.get(name, value) != value:
                raise FieldError("action.positionId", f"is another position than {_wire_name(kind, name)} says")
            fields[name] = value
    try:
        return msgspec.convert({"action": kind, **fields}, found)
    except (msgspec.ValidationError, RecursionError) as error:
        named = {name: _wire_name(kind, name) for name in found.__struct_fields__}
        text = re.sub(r"`(\$\.)?(\w+)`", lambda m: f"`{m[1] or ''}{named.get(m[2], m[2])}`", str(error))
        raise _field_error(msgspec.ValidationError(text), under="action") from error


def _failure(wire: Mapping[str, Any]) -> ParseFailure:
    try:
        kind = ParseFailureKind(wire.get("kind", "no_json"))
    except ValueError as error:
        valid = ", ".join(each.value for each in ParseFailureKind)
        raise FieldError("action.kind", f"give one of {valid}") from error
    detail = wire.get("detail", "")
    if not isinstance(detail, str) or len(detail) > 200:
        raise FieldError("action.detail", "give a text of at most 200 characters")
    return ParseFailure(kind=kind, detail=detail)


def _of_position(held: object, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Market, and side where the action has one, of a position's id."""
    market, colon, side = held.partition(":") if isinstance(held, str) else ("", "", "")
    if not market or not colon or not side:
        raise FieldError("action.positionId", "give the id of one of the scenario's positions")
    return {"market": market, "side": side} if "side" in kind.__struct_fields__ else {"market": market}


# ------------------------------------------------------------------------------------------------------- scenarios


class PerpMarketWire(_Wire, frozen=True, kw_only=True):
    ticker: str
    current_price: int
    change_percent: int = msgspec.field(name="changePercent24h")
    """Since the episode began: there are no 24 hours in it."""
    volume: float = msgspec.field(name="volume24h", default=0.0)
    """Not counted by this market: always 0."""


class PredictionMarketWire(_Wire, frozen=True, kw_only=True):
    id: str
    question: str
    yes_price: float
    """0 to 1."""
    no_price: float


class MarketStateWire(_Wire, frozen=True, kw_only=True):
    perp_markets: list[PerpMarketWire]
    prediction_markets: list[PredictionMarketWire]


class PositionWire(_Wire, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    market_type: Literal["perp", "prediction"]
    side: str
    size: int
    profit: int = msgspec.field(name="unrealizedPnL")
    ticker: str | None = None
    market_id: str | None = None


class NewsWire(_Wire, frozen=True, kw_only=True):
    content: str
    source: str
    """Handle of whoever wrote it in public."""
    timestamp: int
    """Tick at which it was shown."""


class MessageWire(_Wire, frozen=True, kw_only=True):
    """A message that waits for an answer."""

    message_id: int
    sender: str = msgspec.field(name="from")
    """Handle."""
    content: str
    badge: bool
    group: str | None
    checked: Literal["genuine", "false"] | None
    replies: int


class RelationshipWire(_Wire, frozen=True, kw_only=True):
    actor_id: str
    actor_name: str
    sentiment: float


class SocialContextWire(_Wire, frozen=True, kw_only=True):
    recent_messages: list[MessageWire]
    group_chats: list[str]
    relationships: list[RelationshipWire] = []
    """Empty: this market keeps no opinions; whom to trust is for the agent to find out."""


class GoodsWire(_Wire, frozen=True, kw_only=True):
    item: str
    count: int
    worth: int
    """What one more is worth to this agent, credits."""


class SignalWire(_Wire, frozen=True, kw_only=True):
    market_id: str
    side: r.Side


class AuditWire(_Wire, frozen=True, kw_only=True):
    handle: str
    upheld_reports: int
    age: int
    """Ticks."""


class ScenarioWire(_Wire, frozen=True, kw_only=True):
    """``GET /scenario/:npcId``: the contract's fields, then the market's own."""

    npc_id: str
    archetype: str
    balance: int
    market_state: MarketStateWire
    positions: list[PositionWire]
    recent_news: list[NewsWire]
    social_context: SocialContextWire
    tick: int
    handle: str
    vault: int
    secret: str
    book: tuple[r.BookEntry, ...]
    gossip: tuple[r.Gossip, ...]
    goods: list[GoodsWire]
    signals: list[SignalWire]
    deals: tuple[r.DealView, ...]
    audits: list[AuditWire]
    checks_left: int
    escalations_left: int
    notice: str | None


def scenario_to_wire(npc_id: str, o: r.MarketObservation) -> ScenarioWire:
    """What an agent sees, as the contract has it. No team, and no truth."""
    return ScenarioWire(
        npc_id=npc_id, archetype=ARCHETYPE, balance=o.cash,
        market_state=MarketStateWire(
            perp_markets=[
                PerpMarketWire(ticker=p.ticker, current_price=p.price, change_percent=p.change_percent) for p in o.perps
            ],
            prediction_markets=[
                PredictionMarketWire(
                    id=p.id, question=p.question, yes_price=p.yes_percent / 100, no_price=(100 - p.yes_percent) / 100
                )
                for p in o.predictions
            ],
        ),
        positions=positions_to_wire(o),
        recent_news=[NewsWire(content=text, source=handle, timestamp=o.tick) for handle, text in o.comments],
        social_context=SocialContextWire(
            group_chats=[] if o.group is None else [o.group],
            recent_messages=[
                MessageWire(
                    message_id=m.number, sender=m.sender, content=m.content, badge=m.badge, group=m.group, checked=m.checked,
                    replies=m.replies,
                )
                for m in o.inbox
            ],
        ),
        tick=o.tick, handle=o.handle, vault=o.vault, secret=o.secret, book=o.book, gossip=o.gossip,
        goods=[GoodsWire(item=item, count=count, worth=worth) for item, count, worth in o.values],
        signals=[SignalWire(market_id=market, side=side) for market, side in o.signals], deals=o.deals,
        audits=[AuditWire(handle=handle, upheld_reports=n, age=age) for handle, n, age in o.records],
        checks_left=o.checks_left, escalations_left=o.escalations_left, notice=o.notice,
    )  # fmt: skip


def positions_to_wire(o: r.MarketObservation) -> list[PositionWire]:
    """Their ids name market and side, so that they stay the same while the position does."""
    tickers = {perp.ticker for perp in o.perps}
    ids: list[str] = []
    for p in o.positions:  # of one perpetual there may be several, which close together
        before = sum(other == f"{p.market}:{p.side}" or other.startswith(f"{p.market}:{p.side}:") for other in ids)
        ids.append(f"{p.market}:{p.side}:{before + 1}" if before else f"{p.market}:{p.side}")
    return [
        PositionWire(
            id=position_id, side=p.side, size=p.size, profit=p.profit,
            market_type="perp" if p.market in tickers else "prediction",
            ticker=p.market if p.market in tickers else None, market_id=None if p.market in tickers else p.market,
        )
        for position_id, p in zip(ids, o.positions, strict=True)
    ]  # fmt: skip


def scenario_from_wire(s: ScenarioWire) -> r.MarketObservation:
    """The observation that was sent."""
    return r.MarketObservation(
        tick=s.tick, handle=s.handle, cash=s.balance, vault=s.vault, secret=s.secret, book=s.book, gossip=s.gossip,
        predictions=tuple(
            r.PredictionView(id=p.id, question=p.question, yes_percent=round(p.yes_price * 100))
            for p in s.market_state.prediction_markets
        ),
        perps=tuple(
            r.PerpView(ticker=p.ticker, price=p.current_price, change_percent=p.change_percent)
            for p in s.market_state.perp_markets
        ),
        comments=tuple((news.source, news.content) for news in s.recent_news),
        values=tuple((g.item, g.count, g.worth) for g in s.goods),
        signals=tuple((signal.market_id, signal.side) for signal in s.signals),
        positions=tuple(
            r.PositionView(market=p.ticker or p.market_id or "", side=p.side, size=p.size, profit=p.profit)
            for p in s.positions
        ),
        inbox=tuple(
            r.InboxMessage(
                number=m.message_id, sender=m.sender, badge=m.badge, content=m.content, group=m.group, checked=m.checked,
                replies=m.replies,
            )
            for m in s.social_context.recent_messages
        ),
        deals=s.deals, group=next(iter(s.social_context.group_chats), None),
        records=tuple((audit.handle, audit.upheld_reports, audit.age) for audit in s.audits), checks_left=s.checks_left,
        escalations_left=s.escalations_left, notice=s.notice,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- answers


class OutcomeWire(_Wire, frozen=True, kw_only=True):
    """A turn that settled, of ``/v2/tick``."""

    action_id: str
    npc_id: str
    tick: int
    settled_at: int
    facts: dict[str, Any]


class BegunWire(_Wire, frozen=True, kw_only=True):
    """The answer of ``/v2/init`` and ``/v2/restore``."""

    status: str
    world: str
    npc_ids: list[str]
    archetypes: dict[str, str]
    seed: int
    episode: int
    tick_number: int
    done: bool
    state_digest: str
    server_epoch: str


class TickWire(_Wire, frozen=True, kw_only=True):
    """The answer of ``/v2/tick``."""

    tick_number: int
    outcomes: list[OutcomeWire]
    events: list[dict[str, Any]]
    market_changes: list[dict[str, Any]]
    truncated: list[str]
    done: bool
    state_digest: str


class SnapshotWire(_Wire, frozen=True, kw_only=True):
    """The answer of ``/v2/snapshot``."""

    snapshot: bytes
    state_digest: str


class ScenariosWire(_Wire, frozen=True, kw_only=True):
    """The answer of ``/v2/scenarios``: whole scenarios, so that a client asks once a tick and not once an agent."""

    tick_number: int
    done: bool
    scenarios: list[ScenarioWire]


class ErrorWire(_Wire, frozen=True, kw_only=True):
    """The error in any answer but 200."""

    message: str = ""
    type: str = ""
    field: str | None = None


class _ErrorAnswer(_Wire, frozen=True, kw_only=True):
    error: ErrorWire


def read_answer(data: bytes, kind: type[Any]) -> Any:
    """An answer's body as ``kind``.

    Raises:
        FieldError: The server answered something else.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError("", f"this is no answer of a market server: {error}") from error


def read_error(data: bytes) -> ErrorWire:
    """What an answer says is wrong; its beginning where it is not of ours."""
    try:
        return msgspec.json.decode(data, type=_ErrorAnswer).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ErrorWire(message=data[:200].decode("utf-8", "replace"))


def facts_to_wire(facts: r.TurnFacts) -> dict[str, Any]:
    """Money in cents, as in the record."""
    return {_camel(name): value for name, value in msgspec.to_builtins(facts).items()}


def facts_from_wire(wire: Mapping[str, Any]) -> r.TurnFacts:
    """
    Raises:
        FieldError: They are none.
    """
    known = {_camel(name): name for name in r.TurnFacts.__struct_fields__}
    try:
        return msgspec.convert({known.get(name, name): value for name, value in wire.items()}, r.TurnFacts)
    except msgspec.ValidationError as error:
        raise _field_error(error, under="facts") from error


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def named(names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under the contract's names: ``named(("server_epoch",), ...)`` has ``serverEpoch``."""
    return {_camel(name): values[name] for name in names}
