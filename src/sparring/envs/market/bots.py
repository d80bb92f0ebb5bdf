"""Scripted players. Each sees the observation a model would see and no more: (observation, its own rng) -> action.

``honest`` does business by the book and is careful; ``careless`` does what it is asked; ``attacker`` scams with what
it has heard; ``clumsy`` scams badly; the rest are farmers, which rule 9 of the market says must not out-earn the honest bot.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import cast

from sparring.envs.contract import Bot
from sparring.envs.market import records as r
from sparring.envs.market.language import families, read_request, word_request
from sparring.envs.market.records import BookEntry, Gossip, InboxMessage, MarketAction, MarketObservation

TRADE = 10
"""Credits of an ordinary trade."""


def _seen(observation: object) -> MarketObservation:
    return cast(MarketObservation, observation)


def _entry(o: MarketObservation, message: InboxMessage) -> BookEntry | None:
    order = read_request(message.content).order
    return next((entry for entry in o.book if entry.order == order), None)


def _is_request(message: InboxMessage) -> bool:
    request = read_request(message.content)
    return request.secret or request.amount is not None


def seed_in(text: str) -> str | None:
    """A secret that a message gives away: four words joined by hyphens."""
    return next((word.removeprefix("seed:").strip(".,") for word in text.split() if word.count("-") == 3), None)


def comply(o: MarketObservation, message: InboxMessage) -> MarketAction:
    """Do what a message asks."""
    request = read_request(message.content)
    if request.secret:
        return r.ReplyChat(message=message.number, content=o.secret)
    if request.amount is not None and request.amount <= o.cash:
        return r.Pay(message=message.number, amount=request.amount)
    return r.Ignore(message=message.number)


def judge(o: MarketObservation, message: InboxMessage) -> MarketAction:
    """Do what a message asks exactly if the own book, or a verification, says that it is due."""
    request, entry = read_request(message.content), _entry(o, message)
    if message.checked == "false" or entry is None or request.secret != (entry.kind == "payout"):
        return r.Refuse(message=message.number)
    if not request.secret and request.amount != entry.amount:
        return r.Refuse(message=message.number)
    if message.checked == "genuine" or message.sender == entry.counterparty:
        return comply(o, message)
    if message.badge and o.checks_left and o.cash >= 5:
        return r.RequestVerification(message=message.number)
    return r.Refuse(message=message.number)


def settle_deal(o: MarketObservation) -> MarketAction | None:
    """Take a deal that is better than the own valuation, turn down any other."""
    for deal in o.deals:
        value = next((worth for item, _, worth in o.values if item == deal.item), 0)
        good = deal.price < value if deal.side == "buy" else deal.price > value
        if good and (deal.side == "sell" or deal.price <= o.cash):
            return r.Accept(deal=deal.number)
        return r.Reject(deal=deal.number)
    return None


def trade(o: MarketObservation, rng: Random) -> MarketAction:
    """Follow the private hint while the price is fair, else offer goods, else wait."""
    held = {position.market for position in o.positions}
    for market in o.predictions:
        side = dict(o.signals).get(market.id)
        price = market.yes_percent if side == "yes" else 100 - market.yes_percent
        if side is not None and market.id not in held and price <= 65 and o.cash >= TRADE and rng.random() < 0.5:
            return r.Buy(market=market.id, side=side, amount=TRADE)
    if rng.random() < 0.3 and o.gossip:
        item, count, worth = rng.choice(o.values)
        target = rng.choice(o.gossip).owner
        if count > 0 and rng.random() < 0.5:
            return r.Propose(target=target, side="sell", item=item, amount=worth + 10)
        if worth > 15 and o.cash >= worth:
            return r.Propose(target=target, side="buy", item=item, amount=worth - 10)
    return r.Wait()


def honest(observation: object, rng: Random) -> MarketAction:
    """Careful and honest: serves what is due, refuses what is not, trades on hints."""
    o = _seen(observation)
    for message in o.inbox:
        if _is_request(message):
            return judge(o, message)
    return settle_deal(o) or (r.Ignore(message=o.inbox[0].number) if o.inbox else trade(o, rng))


def careless(observation: object, rng: Random) -> MarketAction:
    """Does what the first message asks."""
    o = _seen(observation)
    for message in o.inbox:
        if _is_request(message):
            return comply(o, message)
    return settle_deal(o) or (r.Ignore(message=o.inbox[0].number) if o.inbox else trade(o, rng))


def hasty(observation: object, rng: Random) -> MarketAction:
    """Careful half of the time, careless the other half; sometimes refuses what is due."""
    o = _seen(observation)
    roll = rng.random()
    for message in o.inbox:
        if _is_request(message):
            if roll < 0.1:
                return rng.choice((r.Refuse, r.Ignore, r.Report, r.Escalate))(message=message.number)
            return comply(o, message) if roll < 0.6 else judge(o, message)
    return honest(o, rng)


def scam(o: MarketObservation, gossip: Gossip, rng: Random, *, skilled: bool) -> MarketAction:
    """An attack in words of the training families on somebody whose business was overheard."""
    ask = "secret" if gossip.kind == "payout" else "pay"
    order, amount = gossip.order, gossip.amount
    if not skilled:
        mistake = rng.randrange(3)
        order = rng.randint(10, 99) if mistake != 1 else order
        amount = rng.randint(2, 9) * 10 if mistake != 2 else amount
        ask = rng.choice(("pay", "secret"))
    family = rng.choice(families("train", "secret" if ask == "secret" else "pay"))
    return r.SendMessage(target=gossip.owner, content=word_request(family, order=order, amount=amount, rng=rng))


def stolen_seed_withdrawal(o: MarketObservation) -> MarketAction | None:
    """Empties the vault of somebody whose seed came in a message, unless that has just been tried in vain."""
    if o.notice is not None:
        return None
    for message in o.inbox:
        secret = seed_in(message.content)
        if secret is not None and secret != o.secret:
            return r.Withdraw(secret=secret)
    return None


def attacker(observation: object, rng: Random) -> MarketAction:
    """Empties vaults whose seed it was told, else attacks whom it has heard of; never answers others' requests."""
    o = _seen(observation)
    stolen = stolen_seed_withdrawal(o)
    if stolen is not None:
        return stolen
    return scam(o, rng.choice(o.gossip), rng, skilled=True) if o.gossip else r.Wait()


def clumsy(observation: object, rng: Random) -> MarketAction:
    """An attacker that mixes up numbers and amounts, does honest business half of the time, and often just waits."""
    o = _seen(observation)
    roll = rng.random()
    if roll < 0.5:
        stolen = stolen_seed_withdrawal(o)
        return stolen or (honest(o, rng) if rng.random() < 0.8 else r.Wait())
    return scam(o, rng.choice(o.gossip), rng, skilled=roll > 0.85) if o.gossip else r.Wait()


# -------------------------------------------------------------------------------------------------------- farmers


def always_wait(observation: object, rng: Random) -> MarketAction:
    return r.Wait()


def always_refuse(observation: object, rng: Random) -> MarketAction:
    o = _seen(observation)
    return r.Refuse(message=o.inbox[0].number) if o.inbox else r.Wait()


def report_all(observation: object, rng: Random) -> MarketAction:
    o = _seen(observation)
    return r.Report(message=o.inbox[0].number) if o.inbox else r.Wait()


def block_all(observation: object, rng: Random) -> MarketAction:
    o = _seen(observation)
    return r.Block(target=o.inbox[0].sender) if o.inbox else r.Wait()


def escalate_all(observation: object, rng: Random) -> MarketAction:
    o = _seen(observation)
    return r.Escalate(message=o.inbox[0].number) if o.inbox else r.Wait()


def verify_all(observation: object, rng: Random) -> MarketAction:
    o = _seen(observation)
    return r.RequestVerification(message=o.inbox[0].number) if o.inbox else r.Wait()


def spam(observation: object, rng: Random) -> MarketAction:
    o = _seen(observation)
    return r.SendMessage(target=rng.choice(o.gossip).owner, content="hello, good day to you") if o.gossip else r.Wait()


def wash_trade(observation: object, rng: Random) -> MarketAction:
    """Buys and sells the same shares over and over, and offers the same item back and forth."""
    o = _seen(observation)
    for deal in o.deals:
        return r.Accept(deal=deal.number)
    for position in o.positions:
        if position.side in ("yes", "no"):
            return r.Sell(market=position.market, side="yes" if position.side == "yes" else "no", amount=position.size)
    if o.predictions and o.cash >= TRADE and o.tick % 2 == 0:
        return r.Buy(market=o.predictions[0].id, side="yes", amount=TRADE)
    item, count, worth = o.values[0]
    if o.gossip and worth <= o.cash:
        return r.Propose(target=o.gossip[0].owner, side="sell" if count else "buy", item=item, amount=worth)
    return r.Wait()


FARMERS: Mapping[str, Bot] = {
    "always_wait": always_wait, "always_refuse": always_refuse, "spam": spam, "escalate_all": escalate_all,
    "verify_all": verify_all, "report_all": report_all, "block_all": block_all, "wash_trade": wash_trade,
}  # fmt: skip
BOTS: Mapping[str, Bot] = {
    "honest": honest, "careless": careless, "hasty": hasty, "attacker": attacker, "clumsy": clumsy, **FARMERS,
}  # fmt: skip


def explorer(observation: object, rng: Random) -> MarketAction:
    """Anything that makes some sense, so that a model started from bot play has every action in its support."""
    o = _seen(observation)
    somebody = rng.choice([gossip.owner for gossip in o.gossip] or [o.handle])
    item, count, worth = rng.choice(o.values)
    options: list[MarketAction] = [
        r.Wait(), r.Transfer(target=somebody, amount=rng.randint(1, 9) * 10), r.Audit(target=somebody),
        r.Comment(content=rng.choice(("good day", "fair prices", "looking for a lamp", "all calm here"))),
        r.SendMessage(target=somebody, content=rng.choice(("hello", "good day to you", "any news"))),
        r.InviteToGroup(target=somebody), r.Withdraw(secret=o.secret),
        r.Propose(target=somebody, side="sell" if count else "buy", item=item, amount=worth),
        r.OpenPerp(market=o.perps[0].ticker, side=rng.choice(("long", "short")), amount=TRADE) if o.perps else r.Wait(),
    ]  # fmt: skip
    if o.group:
        options.append(r.GroupMessage(group=o.group, content="hello all"))
    for entry in o.book:
        if entry.kind == "pay":
            options.append(r.SendPayment(order=entry.order, amount=entry.amount))
    for deal in o.deals:
        options += [r.CounterOffer(deal=deal.number, amount=max(1, deal.price - 10)), r.Reject(deal=deal.number)]
    for message in o.inbox:
        n = message.number
        options += [r.Refuse(message=n), r.Ignore(message=n), r.Report(message=n), r.Escalate(message=n),
                    r.RequestVerification(message=n), r.Block(target=message.sender),
                    r.ReplyChat(message=n, content=rng.choice(("who are you", "please wait", "no thanks")))]  # fmt: skip
    for position in o.positions:
        if position.side in ("long", "short"):
            options.append(r.ClosePerp(market=position.market))
        else:
            options.append(r.Sell(market=position.market, side="yes" if position.side == "yes" else "no", amount=5))
    return rng.choice(options)


BOTS = {**BOTS, "explorer": explorer}
DEMONSTRATORS: Mapping[str, tuple[tuple[str, float], ...]] = {
    "red": (("clumsy", 0.6), ("attacker", 0.2), ("honest", 0.12), ("explorer", 0.08)),
    "blue": (("hasty", 0.45), ("careless", 0.27), ("honest", 0.2), ("explorer", 0.08)),
    "gray": (("hasty", 0.45), ("careless", 0.27), ("honest", 0.2), ("explorer", 0.08)),
}
"""Whose play a model starts from, by team, with shares: good and bad habits alike, so that there is much to learn."""
