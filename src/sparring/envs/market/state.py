"""The whole state of a market world, as one tree of structs: what ``snapshot`` writes and ``restore`` reads."""

from __future__ import annotations

from typing import Literal

import msgspec

from sparring.envs.market.language import Split
from sparring.envs.market.ledger import Ledger
from sparring.envs.market.perpetual import PerpMarket
from sparring.envs.market.prediction import PredictionMarket
from sparring.envs.market.records import BookEntry, Gossip, Refusal, ThreadTruth
from sparring.envs.market.secrets import Canary, LeakDetector

CENTS = 100
"""Cents in a credit."""

RANGES: dict[str, tuple[int, int]] = {
    "ticks": (1, 10_000), "inbox": (1, 100), "patience": (1, 1_000), "post_delay": (0, 1_000), "cash": (0, 10**9),
    "vault": (0, 10**9), "residents": (3, 200), "scripted_attackers": (0, 100), "bond": (0, 10**6),
    "verification_fee": (0, 10**6), "verification_quota": (0, 10**6), "escalation_fee": (0, 10**6),
    "escalation_quota": (0, 10**6), "audit_fee": (0, 10**6), "bounty": (0, 10**6), "wrong_report_fine": (0, 10**6),
    "new_handle_fee": (0, 10**6), "leverage": (1, 10), "prediction_liquidity": (1, 10**6), "markets": (0, 5),
    "perps": (0, 3), "market_life": (2, 1_000),
}  # fmt: skip
"""What the whole numbers of ``MarketRules`` may be. Three residents are the fewest that can owe one another; five
markets the most whose names m0 to m9 never meet; three perpetuals the tickers there are."""

Temper = Literal["careless", "checks_number", "careful"]
Badge = Literal["none", "genuine", "stolen"]


class MarketRules(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the world; money in credits, times in ticks."""

    ticks: int = 16
    """Length of an episode; agents are then truncated."""
    split: Split = "train"
    """Which families, handles and secrets exist in it."""
    cash: int = 600
    vault: int = 60
    residents: int = 16
    """Scripted honest people besides the seats."""
    request_rate: float = 0.7
    """Chance that a tick brings an honest request to an agent that has none waiting; the base rate of honest traffic."""
    deal_rate: float = 0.15
    """Chance that a tick brings a resident's deal to an agent."""
    red_sender_share: float = 0.10
    """Attackers are at most this part of the senders an agent hears from."""
    scripted_attackers: int = 4
    """Scripted attackers besides the red seats; 0 leaves attacks to red."""
    patience: int = 3
    """A thread without a move for this many ticks is closed."""
    inbox: int = 3
    """Messages an observation shows: the newest, oldest of them first."""
    post_delay: int = 4
    """A message that an agent has no room to hear yet waits this long, then lapses."""
    bond: int = 2
    """An attack that failed costs red this."""
    verification_fee: int = 2
    verification_quota: int = 4
    escalation_fee: int = 8
    escalation_quota: int = 2
    audit_fee: int = 1
    bounty: int = 1
    wrong_report_fine: int = 5
    """At least four bounties: reporting pays only above 80 % precision."""
    new_handle_fee: int = 5
    """What a frozen attacker pays to come back under a new handle."""
    leverage: int = 3
    prediction_liquidity: int = 200
    signal_accuracy: float = 0.75
    markets: int = 2
    perps: int = 1
    market_life: int = 6
    """Ticks until a prediction market resolves and another opens."""

    def __post_init__(self) -> None:
        if self.wrong_report_fine < 4 * self.bounty:
            raise ValueError("wrong_report_fine must be at least 4 x bounty, or reporting everything would pay")
        for name in ("red_sender_share", "request_rate", "deal_rate", "signal_accuracy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1")
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from {least} to {most}")


class OpenTurn(msgspec.Struct, kw_only=True):
    """A turn that has not settled; the fields of TurnFacts as they come in."""

    agent: str
    tick: int
    team: str
    action: str
    parsed: bool
    due: int
    """Tick at which it settles at the latest."""
    threads: list[int] = []
    """It settles when all of these have closed; a group message opens one a member."""
    trade: str | None = None
    """Key of the deal or trade it waits for, besides a thread."""
    refusal: Refusal | None = None
    truth: ThreadTruth = ThreadTruth.NONE
    opener: bool = False
    defence: bool = False
    taken: int = 0
    lost: int = 0
    avoided: int = 0
    secrets_leaked: int = 0
    leak_fraction: float = 0.0
    secrets_taken: int = 0
    secret_shown: bool = False
    served: bool = False
    wronged: bool = False
    service_value: int = 0
    share: float = 1.0
    surplus: int = 0
    trade_profit: int = 0
    trade_risk: int = 0
    fees: int = 0
    bounty: int = 0
    asked: int = 0


class Message(msgspec.Struct, kw_only=True):
    """A delivered message in somebody's inbox."""

    id: int
    thread: int
    sender: str
    """Person id."""
    handle: str
    """The sender's handle when it was sent."""
    badge: bool
    content: str
    delivered: int
    group: str | None = None
    checked: Literal["genuine", "false"] | None = None
    replies: int = 0


class Post(msgspec.Struct, kw_only=True):
    """A message under way."""

    thread: int
    sender: str
    target: str
    content: str
    sent: int
    badge: bool = False
    group: str | None = None


class Thread(msgspec.Struct, kw_only=True):
    """A conversation between two people, and what it really is. Of an attack one side is red, the other is not."""

    id: int
    opener: str
    target: str
    truth: ThreadTruth
    opened: int
    last_move: int
    order: int | None = None
    """The book entry it is about, where it is about one."""
    asked: int = 0
    """Cents asked for, of what the target has; the vault behind a secret counts as asked."""
    named: int | None = None
    """Cents that the opener's text named, whatever the target has; less is no answer to it."""
    wants_secret: bool = False
    moved: int = 0
    """Cents that an attack brought its red side."""
    open: bool = True
    leaked: bool = False
    defended: bool = False
    """The target turned it down, or had it stopped."""
    messages: int = 0
    heard: bool = False
    """The opening message has been delivered."""


class Deal(msgspec.Struct, kw_only=True):
    """An offer that waits for ``waiting``; goods and money go through escrow when accepted."""

    id: int
    seller: str
    buyer: str
    item: str
    price: int
    """Cents."""
    waiting: str
    proposer: str
    opened: int
    last_move: int
    open: bool = True
    proposal_tick: int | None = None
    """Tick of the agent turn that stands behind the current price, if an agent made it."""


class StolenSecret(msgspec.Struct, kw_only=True):
    """Somebody holds a secret that is not its own, got in this thread."""

    holder: str
    owner: str
    thread: int
    since: int
    """Tick at which it was sent; usable from the next on."""


class Person(msgspec.Struct, kw_only=True):
    """Anybody in the world: a seat that a policy or bot plays, a resident, or a scripted attacker."""

    id: str
    handle: str
    team: str
    seated: bool
    canary: Canary
    badge: Badge = "none"
    temper: Temper = "careful"
    born: int = 0
    book: list[BookEntry] = []
    gossip: list[Gossip] = []
    goods: dict[str, int] = {}
    values: dict[str, int] = {}
    """Private value of one more item, cents."""
    inbox: list[Message] = []
    blocked: list[str] = []
    """Handles: whoever comes back under a new one is not known again."""
    deals_between: dict[str, list[int]] = {}
    """By item: surplus of each deal with another seat that no later one has undone, cents; see ``deals.complete``."""
    bought: dict[str, int] = {}
    """By item: how many more were bought from other seats than sold to them."""
    group: str | None = None
    red_credit: float = 0.0
    """How many attackers it may yet hear from under the sender share."""
    heard: int = 0
    """Senders heard from."""
    heard_red: int = 0
    reports_upheld: int = 0
    frozen_until: int = 0
    verifications: int = 0
    escalations: int = 0
    notice: str | None = None
    records: list[tuple[str, int, int]] = []
    signals: dict[str, bool] = {}


class Trade(msgspec.Struct, kw_only=True):
    """A trade that an agent's turn opened, until it is resolved, closed or sold."""

    key: str
    agent: str
    market: str
    side: str
    cost: int
    """Cents paid: the price of shares, or the margin."""
    shares: int = 0
    """Milli-shares still held of it."""
    proceeds: int = 0
    position: int | None = None
    """Id of the perpetual position."""
    open: bool = True


class Moment(msgspec.Struct, kw_only=True):
    """What a tick's actions refer to: all of them to what was observed, whichever is carried out first."""

    messages: dict[str, list[int]]
    """Ids of the messages that each seat was shown, in the order of their numbers."""
    deals: dict[str, list[int]]
    people: dict[str, str]
    """Person ids by handle."""
    handles: dict[str, str]
    """Handles by person id."""
    blocked: dict[str, list[str]]
    """Handles that each person had blocked."""
    groups: dict[str, list[str]]
    frozen: list[str]


class WorldState(msgspec.Struct, kw_only=True):
    """Everything."""

    rules: MarketRules
    seed: int
    episode: int
    tick: int
    people: dict[str, Person]
    seats: list[str]
    ledger: Ledger
    predictions: list[PredictionMarket]
    perps: list[PerpMarket]
    detector: LeakDetector
    threads: dict[int, Thread] = {}
    deals: dict[int, Deal] = {}
    trades: dict[str, Trade] = {}
    posts: list[Post] = []
    stolen: list[StolenSecret] = []
    comments: list[tuple[str, str]] = []
    groups: dict[str, list[str]] = {}
    open_turns: list[OpenTurn] = []
    free_handles: list[str] = []
    next_thread: int = 1
    next_message: int = 1
    next_deal: int = 1
    next_market: int = 0
    done: bool = False
    moment: Moment | None = None
    """Only while a tick's actions are carried out."""
    started_money: int = 0
