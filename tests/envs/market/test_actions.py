"""What every action does, and every way to be refused; a refused action has no effect at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from market_fixtures import BLUE, BLUE2, GRAY, PAY, RED, SECRET, Play, state_of
from sparring.envs.market import records as r
from sparring.envs.market.actions import APPLY
from sparring.envs.market.records import ACTIONS, Refusal, ThreadTruth
from sparring.envs.market.residents import residents
from sparring.types import ParseFailure, ParseFailureKind

EXAMPLES: tuple[msgspec.Struct, ...] = (
    r.Wait(), r.Buy(market="m0", side="yes", amount=10), r.Sell(market="m0", side="no", amount=5),
    r.OpenPerp(market="BTC", side="long", amount=10), r.ClosePerp(market="BTC"),
    r.SendMessage(target="@a_b", content="hi"), r.ReplyChat(message=1, content="hi"),
    r.GroupMessage(group="g1", content="hi"), r.InviteToGroup(target="@a_b"), r.Comment(content="hi"),
    r.Transfer(target="@a_b", amount=1), r.Pay(message=1, amount=1), r.SendPayment(order=10, amount=1),
    r.Refuse(message=1), r.Ignore(message=1), r.Block(target="@a_b"), r.Report(message=1), r.Escalate(message=1),
    r.RequestVerification(message=1), r.Audit(target="@a_b"),
    r.Propose(target="@a_b", side="buy", item="lamp", amount=1), r.CounterOffer(deal=1, amount=1), r.Accept(deal=1),
    r.Reject(deal=1), r.Withdraw(secret="a-b-c-d"),
)  # fmt: skip


def test_the_vocabulary_is_whole_and_one_schema_reads_and_writes_it() -> None:  # market.md 1.5, E1, E14
    assert {type(example) for example in EXAMPLES} == set(ACTIONS) == set(APPLY)
    for example in EXAMPLES:
        assert msgspec.json.decode(msgspec.json.encode(example), type=r.MarketAction) == example
    assert {"target", "content"} <= set(r.SendMessage.__struct_fields__)


# ---------------------------------------------------------------------------------------------------------- messages


def test_wait_does_nothing_and_is_worth_nothing() -> None:  # E6
    play = Play()
    facts = play.result(BLUE, r.Wait())
    assert (facts.action, facts.truth, facts.avoided, facts.fees) == ("wait", ThreadTruth.NONE, 0, 0)


def test_send_message_arrives_next_tick_with_text_sender_and_no_badge() -> None:  # E1
    play = Play()
    sent = play.act(GRAY, r.SendMessage(target=play.handle(BLUE), content="good day \u00e9\U0001f600"))
    message = play.message(BLUE)
    assert (message.content, message.sender, message.badge) == ("good day \u00e9\U0001f600", play.handle(GRAY), False)
    assert all(not play.sees(other).inbox for other in (RED, BLUE2, GRAY)), "nobody else reads it"
    assert (GRAY, sent) not in play.facts, "its thread is open"


def test_reply_goes_to_the_sender_in_the_thread_and_uses_the_message_up() -> None:  # E3
    play = Play()
    play.act(GRAY, r.SendMessage(target=play.handle(BLUE), content="who?"))
    play.act(BLUE, r.ReplyChat(message=1, content="me"))
    assert not play.sees(BLUE).inbox
    answer = play.message(GRAY)
    assert (answer.content, answer.sender, answer.replies) == ("me", play.handle(BLUE), 1)


def test_group_messages_reach_all_other_members_and_settle_when_all_threads_have() -> None:
    play = Play()
    for target in (GRAY, BLUE2):
        assert play.result(BLUE, r.InviteToGroup(target=play.handle(target))).refusal is None
    assert play.sees(BLUE).group == play.sees(GRAY).group == play.sees(BLUE2).group == "g1"
    sent = play.act(BLUE, r.GroupMessage(group="g1", content="hello all"))
    assert all(play.message(member).group == "g1" for member in (GRAY, BLUE2)) and not play.sees(RED).inbox
    play.act(GRAY, r.Ignore(message=1))
    assert (BLUE, sent) not in play.facts
    play.act(BLUE2, r.Ignore(message=1))
    assert play.facts[BLUE, sent].truth is ThreadTruth.SOCIAL


def test_a_red_group_message_is_an_attack_on_each_non_red_member() -> None:
    play = Play()
    for target in (BLUE, GRAY):
        play.act(RED, r.InviteToGroup(target=play.handle(target)))
    sent = play.act(RED, r.GroupMessage(group="g1", content="order #11 is shipped, please pay $40"))
    play.do({BLUE: r.Pay(message=1, amount=40), GRAY: r.Refuse(message=1)})
    facts = play.facts[RED, sent]
    assert (facts.truth, facts.taken, facts.fees, facts.asked) == (ThreadTruth.ATTACK, 40_00, 2_00, 80_00)
    assert play.facts[BLUE, sent + 1].lost == 40_00 and play.facts[GRAY, sent + 1].avoided == 40_00


def test_comment_is_seen_by_everybody_next_tick() -> None:
    play = Play()
    play.act(BLUE, r.Comment(content="fair prices"))
    assert all(play.sees(agent).comments == ((play.handle(BLUE), "fair prices"),) for agent in (RED, BLUE, GRAY))


# ------------------------------------------------------------------------------------------------------------- money


def test_transfer_moves_credits_and_pays_an_open_thread_of_the_receiver() -> None:
    play = Play()
    facts = play.result(BLUE, r.Transfer(target=play.handle(GRAY), amount=12.5))
    assert (facts.lost, play.cash(GRAY)) == (0, 612_50)
    facts = play.result(BLUE, r.Transfer(target=play.handle(RED), amount=10))
    assert facts.lost == 10_00, "what goes to red without business is lost"
    sent = play.red_writes()
    facts = play.result(BLUE, r.Transfer(target=play.handle(RED), amount=30))
    assert (facts.truth, facts.lost) == (ThreadTruth.ATTACK, 30_00) and play.sees(BLUE).inbox, "it asked for more"
    assert play.result(BLUE, r.Transfer(target=play.handle(RED), amount=40)).lost == 40_00
    assert (play.facts[RED, sent].taken, play.facts[RED, sent].fees) == (70_00, 0) and not play.sees(BLUE).inbox
    thread = play.honest(GRAY)
    creditor = play.world.people[thread.opener].handle
    assert not play.result(GRAY, r.Transfer(target=creditor, amount=1)).served and play.sees(GRAY).inbox
    assert play.result(GRAY, r.Transfer(target=creditor, amount=thread.asked / 100)).served


def test_pay_serves_an_honest_request_for_exactly_what_is_owed() -> None:
    play = Play()
    thread = play.honest(BLUE)
    before = play.cash(thread.opener)
    facts = play.result(BLUE, r.Pay(message=1, amount=thread.asked / 100 + 30))
    assert (facts.served, facts.truth, facts.lost) == (True, ThreadTruth.LEGITIMATE, 0)
    assert facts.service_value == int(0.3 * thread.asked)
    assert play.cash(BLUE) == 600_00 - thread.asked and play.cash(thread.opener) == before + thread.asked
    assert not play.sees(BLUE).inbox and all(entry.order != thread.order for entry in play.sees(BLUE).book)


def test_pay_to_an_attack_is_lost_and_taken() -> None:  # E10
    play = Play()
    sent = play.red_writes()
    facts = play.result(BLUE, r.Pay(message=1, amount=45))
    assert (facts.lost, facts.served, facts.truth) == (45_00, False, ThreadTruth.ATTACK)
    assert (play.facts[RED, sent].taken, play.facts[RED, sent].fees, play.cash(RED)) == (45_00, 0, 645_00)


def test_send_payment_settles_the_own_book_without_waiting_for_a_message() -> None:
    play = Play(seed=3)
    person = play.person(BLUE)
    entry = next(e for seed in range(20) for e in _booked(play, person, seed) if e.kind == "pay")
    facts = play.result(BLUE, r.SendPayment(order=entry.order, amount=entry.amount))
    assert facts.served and facts.service_value == int(0.3 * entry.amount * 100)
    assert play.cash(BLUE) == 600_00 - entry.amount * 100
    assert entry not in person.book


def _booked(play: Play, person: Any, seed: int) -> list[r.BookEntry]:
    from random import Random

    from sparring.envs.market.residents import new_entry

    new_entry(play.world, person, Random(seed), "pay")
    return list(person.book)


def test_withdraw_empties_the_own_vault_or_one_whose_secret_is_known() -> None:
    play = Play()
    facts = play.result(BLUE, r.Withdraw(secret=play.secret(BLUE).upper()))
    assert (facts.taken, play.vault(BLUE), play.cash(BLUE)) == (0, 0, 660_00)
    facts = play.result(RED, r.Withdraw(secret=play.secret(GRAY)))
    assert (facts.taken, play.vault(GRAY), play.cash(RED)) == (60_00, 0, 660_00)


# ---------------------------------------------------------------------------------------------------------- defences


@pytest.mark.parametrize("defence", [r.Refuse, r.Ignore, r.Report, r.Escalate])
def test_a_defence_closes_the_attack_costs_red_its_bond_and_avoids_what_was_asked(defence: type[Any]) -> None:  # E5
    play = Play()
    sent = play.red_writes()
    facts = play.result(BLUE, defence(message=1))
    assert (facts.truth, facts.avoided, facts.wronged, facts.lost) == (ThreadTruth.ATTACK, 40_00, False, 0)
    assert play.facts[RED, sent].fees == 2_00 and play.facts[RED, sent].taken == 0
    assert not play.sees(BLUE).inbox


@pytest.mark.parametrize("defence", [r.Refuse, r.Ignore, r.Report])
def test_turning_an_honest_request_down_wrongs_its_sender(defence: type[Any]) -> None:
    play = Play()
    thread = play.honest(BLUE)
    facts = play.result(BLUE, defence(message=1))
    assert (facts.wronged, facts.avoided, facts.truth) == (True, 0, ThreadTruth.LEGITIMATE)
    assert facts.fees == (5_00 if defence is r.Report else 0)
    assert all(entry.order != thread.order for entry in play.sees(BLUE).book), "the creditor gives up"


def test_block_takes_no_more_messages_from_a_handle() -> None:
    play = Play()
    play.red_writes()
    assert play.result(BLUE, r.Block(target=play.handle(RED))).avoided == 40_00
    assert play.result(RED, r.SendMessage(target=play.handle(BLUE), content="hi")).refusal is Refusal.BLOCKED
    assert play.result(BLUE, r.Block(target=play.handle(RED))).refusal is Refusal.BLOCKED


def test_report_pays_a_bounty_and_marks_the_record() -> None:
    play = Play()
    play.red_writes()
    facts = play.result(BLUE, r.Report(message=1))
    assert (facts.bounty, facts.fees, play.cash(BLUE)) == (1_00, 0, 601_00)
    play.act(GRAY, r.Audit(target=play.handle(RED)))
    assert play.sees(GRAY).records == ((play.handle(RED), 1, 2),) and play.cash(GRAY) == 599_00
    play.do()
    assert play.sees(GRAY).records == ()


def test_escalate_carries_an_honest_request_out_for_a_fee() -> None:
    play = Play()
    thread = play.honest(BLUE)
    facts = play.result(BLUE, r.Escalate(message=1))
    assert (facts.served, facts.fees, play.cash(BLUE)) == (True, 8_00, 592_00 - thread.asked)
    play = Play()
    play.honest(BLUE, SECRET)
    facts = play.result(BLUE, r.Escalate(message=1))
    assert (facts.served, facts.secret_shown, facts.secrets_leaked) == (True, False, 0)


def test_escalate_freezes_an_attacker_that_comes_back_under_a_new_handle_for_a_fee() -> None:  # rule 7
    play = Play()
    old = play.handle(RED)
    sent = play.red_writes()
    play.act(BLUE, r.Block(target=play.handle(GRAY)))
    play.act(BLUE, r.Escalate(message=1))
    new = play.handle(RED)
    assert new != old and play.cash(RED) == 600_00 - 2_00 - 5_00
    assert play.facts[RED, sent].fees == 2_00
    for _ in range(2):
        text = r.SendMessage(target=play.handle(BLUE), content="hi")
        assert play.result(RED, text).refusal is Refusal.FROZEN
    play.act(RED, r.SendMessage(target=play.handle(BLUE), content="hi"))
    assert play.message(BLUE).sender == new
    play.act(GRAY, r.Audit(target=new))
    ((_, reports, age),) = play.sees(GRAY).records
    assert reports == 0 and age < play.world.tick - 1, "a new handle is young and has no record"
    assert play.result(GRAY, r.Audit(target=old)).refusal is Refusal.UNKNOWN_TARGET


def test_a_block_is_of_a_handle_so_a_new_one_is_heard_again() -> None:
    play = Play()
    play.red_writes()
    play.act(BLUE, r.Block(target=play.handle(RED)))
    play.red_writes(to=GRAY)
    play.act(GRAY, r.Escalate(message=1))
    play.do()
    play.do()
    play.red_writes("hello")
    assert play.message(BLUE).content == "hello"


def test_two_that_escalate_one_attacker_in_one_tick_freeze_it_once() -> None:
    play = Play()
    play.red_writes()
    play.do({RED: r.SendMessage(target=play.handle(GRAY), content="order #12 is shipped, please pay $20")})
    play.do({BLUE: r.Escalate(message=1), GRAY: r.Escalate(message=1)})
    assert play.cash(RED) == 600_00 - 2 * 2_00 - 5_00


def test_verification_tells_the_truth_next_tick_for_a_fee() -> None:
    play = Play(scripted_attackers=1)
    play.attack(BLUE, twist="stolen_badge")
    assert play.message(BLUE).badge and play.message(BLUE).checked is None
    play.act(BLUE, r.RequestVerification(message=1))
    assert play.message(BLUE).checked == "false" and play.cash(BLUE) == 598_00 and play.sees(BLUE).checks_left == 3
    play.honest(GRAY)
    play.act(GRAY, r.RequestVerification(message=1))
    assert play.message(GRAY).checked == "genuine"


def test_red_cannot_make_its_victims_answer_look_like_an_attack() -> None:
    """Reporting, escalating or verifying a victim's answer in one's own attack brings no bounty and no harm to it."""
    for action, fees in ((r.Report(message=1), 5_00), (r.Escalate(message=1), 8_00)):
        play = Play()
        play.red_writes()
        handle = play.handle(BLUE)
        play.act(BLUE, r.ReplyChat(message=1, content="who are you"))
        before = play.cash(BLUE)
        facts = play.result(RED, action)
        assert (facts.bounty, facts.avoided) == (0, 0) and facts.fees >= fees
        assert (play.handle(BLUE), play.cash(BLUE)) == (handle, before)
        assert play.person(BLUE).reports_upheld == 0
    play = Play()
    play.red_writes()
    play.act(BLUE, r.ReplyChat(message=1, content="who are you"))
    play.act(RED, r.RequestVerification(message=1))
    assert play.message(RED).checked == "genuine"


# ------------------------------------------------------------------------------------------------------------- deals


def goods(play: Play, agent: str, item: str = "lamp", *, count: int = 1, value: int = 30) -> None:
    play.person(agent).goods[item] = count
    play.person(agent).values[item] = value * 100


def test_propose_and_accept_move_goods_and_money_and_pay_true_surplus() -> None:
    play = Play()
    goods(play, BLUE, value=30)
    goods(play, GRAY, count=0, value=50)
    sent = play.act(BLUE, r.Propose(target=play.handle(GRAY), side="sell", item="lamp", amount=35))
    (deal,) = play.sees(GRAY).deals
    assert (deal.number, deal.counterparty, deal.side, deal.item, deal.price) == (
        1,
        play.handle(BLUE),
        "buy",
        "lamp",
        35,
    )
    facts = play.result(GRAY, r.Accept(deal=1))
    assert (facts.surplus, play.facts[BLUE, sent].surplus) == (15_00, 5_00)
    assert (play.person(BLUE).goods["lamp"], play.person(GRAY).goods["lamp"]) == (0, 1)
    assert (play.cash(BLUE), play.cash(GRAY)) == (635_00, 565_00)
    assert play.world.ledger.balance("escrow:1") == 0


def test_counter_offer_turns_the_deal_round_and_the_accepted_price_counts() -> None:
    play = Play()
    goods(play, BLUE, value=30)
    goods(play, GRAY, count=0, value=50)
    sent = play.act(BLUE, r.Propose(target=play.handle(GRAY), side="sell", item="lamp", amount=45))
    countered = play.act(GRAY, r.CounterOffer(deal=1, amount=33))
    assert not play.sees(GRAY).deals and play.sees(BLUE).deals[0].price == 33
    facts = play.result(BLUE, r.Accept(deal=1))
    assert (facts.surplus, play.facts[GRAY, countered].surplus) == (3_00, 17_00)
    play.finish()
    assert play.facts[BLUE, sent].surplus == 0, "the first price was never agreed to"


def test_reject_closes_the_deal_and_settles_both_sides() -> None:
    play = Play()
    goods(play, BLUE)
    sent = play.act(BLUE, r.Propose(target=play.handle(GRAY), side="sell", item="lamp", amount=45))
    facts = play.result(GRAY, r.Reject(deal=1))
    assert facts.surplus == play.facts[BLUE, sent].surplus == 0 and not play.sees(GRAY).deals
    assert play.person(BLUE).goods["lamp"] == 1


def test_a_resident_takes_a_deal_that_is_good_for_it_and_no_other() -> None:
    play = Play()
    other = residents(play.world)[0]
    other.values["lamp"], other.goods["lamp"] = 40_00, 1
    goods(play, BLUE, value=30)
    facts = play.result(BLUE, r.Propose(target=other.handle, side="sell", item="lamp", amount=41))
    assert facts.surplus == 0 and play.person(BLUE).goods["lamp"] == 1
    facts = play.result(BLUE, r.Propose(target=other.handle, side="sell", item="lamp", amount=39))
    assert facts.surplus == 9_00 and play.person(BLUE).goods["lamp"] == 0


# ----------------------------------------------------------------------------------------------------------- trading


def test_buy_gives_shares_that_pay_at_resolution() -> None:
    play = Play(seed=1)
    market = play.world.predictions[0]
    side = "yes" if market.truth else "no"
    tick = play.act(BLUE, r.Buy(market=market.id, side=side, amount=20))
    (position,) = play.sees(BLUE).positions
    assert (position.market, position.side) == (market.id, side) and 600_00 - 20_00 <= play.cash(BLUE) < 600_00 - 19_00
    while (BLUE, tick) not in play.facts:
        play.do()
    facts = play.facts[BLUE, tick]
    assert facts.trade_profit == play.cash(BLUE) - 600_00 > 0 and facts.trade_risk > 19_00


def test_sell_gives_the_money_back_but_never_more() -> None:
    play = Play()
    market = play.world.predictions[0].id
    bought = play.act(BLUE, r.Buy(market=market, side="yes", amount=20))
    facts = play.result(BLUE, r.Sell(market=market, side="yes", amount=1000))
    assert facts.trade_profit == 0 and not play.sees(BLUE).positions
    assert -5 <= play.facts[BLUE, bought].trade_profit <= 0 and 599_95 <= play.cash(BLUE) <= 600_00


def test_open_and_close_perp() -> None:
    play = Play()
    opened = play.act(BLUE, r.OpenPerp(market="BTC", side="long", amount=50))
    assert play.sees(BLUE).positions[0].size == 50 and play.cash(BLUE) == 550_00
    play.act(BLUE, r.ClosePerp(market="BTC"))
    assert not play.sees(BLUE).positions
    assert play.facts[BLUE, opened].trade_profit == play.cash(BLUE) - 600_00
    assert play.facts[BLUE, opened].trade_risk == 50_00


# ------------------------------------------------------------------------------------------------------------ refused


def _frozen(play: Play) -> None:
    play.person(BLUE).frozen_until = 100


def _blocked(play: Play) -> None:
    play.person(GRAY).blocked.append(play.handle(BLUE))


def _poor(play: Play) -> None:
    play.world.ledger.transfer(f"agent:{BLUE}", "house", 600_00, memo="test", tick=0)


def _deal(play: Play) -> None:
    goods(play, GRAY)
    goods(play, BLUE, count=0)
    play.act(GRAY, r.Propose(target=play.handle(BLUE), side="sell", item="lamp", amount=700))


def _bid(play: Play) -> None:
    goods(play, BLUE, count=0)
    play.act(GRAY, r.Propose(target=play.handle(BLUE), side="buy", item="lamp", amount=20))


def _asked(play: Play) -> None:
    play.honest(BLUE)


def _told(play: Play) -> None:
    play.honest(BLUE, SECRET)


def _grouped(play: Play) -> None:
    play.act(RED, r.InviteToGroup(target=play.handle(GRAY)))


def _used_up(play: Play) -> None:
    play.honest(BLUE)
    play.person(BLUE).verifications = play.person(BLUE).escalations = 99


def _no_goods(play: Play) -> None:
    goods(play, BLUE, count=0)


def _asked_and_poor(play: Play) -> None:
    _asked(play)
    _poor(play)


def _nothing(play: Play) -> None:
    pass


Case = tuple[Callable[[Play], None], Callable[[Play], object], Refusal]
REFUSED: tuple[Case, ...] = (
    *((_nothing, lambda play, make=make: make("@nobody_here"), Refusal.UNKNOWN_TARGET) for make in (
        lambda who: r.SendMessage(target=who, content="x"), lambda who: r.InviteToGroup(target=who),
        lambda who: r.Transfer(target=who, amount=1), lambda who: r.Block(target=who), lambda who: r.Audit(target=who),
        lambda who: r.Propose(target=who, side="buy", item="lamp", amount=1))),
    *((_nothing, lambda play, make=make: make(play.handle(BLUE)), Refusal.SELF_TARGET) for make in (
        lambda who: r.SendMessage(target=who, content="x"), lambda who: r.InviteToGroup(target=who),
        lambda who: r.Transfer(target=who, amount=1), lambda who: r.Block(target=who), lambda who: r.Audit(target=who),
        lambda who: r.Propose(target=who, side="buy", item="lamp", amount=1))),
    *((_nothing, lambda play, action=action: action, Refusal.UNKNOWN_MESSAGE) for action in (
        r.ReplyChat(message=1, content="x"), r.Pay(message=1, amount=1), r.Refuse(message=2), r.Ignore(message=1),
        r.Report(message=999), r.Escalate(message=1), r.RequestVerification(message=1))),
    *((_nothing, lambda play, action=action: action, Refusal.UNKNOWN_DEAL) for action in (
        r.Accept(deal=1), r.Reject(deal=1), r.CounterOffer(deal=3, amount=1))),
    *((_nothing, lambda play, action=action: action, Refusal.UNKNOWN_MARKET) for action in (
        r.Buy(market="BTC", side="yes", amount=1), r.Sell(market="", side="no", amount=1),
        r.OpenPerp(market="m0", side="long", amount=1), r.ClosePerp(market="ETH"))),
    (_nothing, lambda play: r.SendPayment(order=9, amount=40), Refusal.UNKNOWN_ORDER),
    (_nothing, lambda play: r.Propose(target=play.handle(GRAY), side="buy", item="ship", amount=1), Refusal.UNKNOWN_ITEM),
    (_nothing, lambda play: r.GroupMessage(group="g1", content="x"), Refusal.UNKNOWN_GROUP),
    (_grouped, lambda play: r.GroupMessage(group="g1", content="x"), Refusal.UNKNOWN_GROUP),
    (_nothing, lambda play: r.Withdraw(secret="apple-river-stone-cloud"), Refusal.WRONG_SECRET),
    (_nothing, lambda play: r.Withdraw(secret=" ".join(reversed(play.secret(BLUE).split("-")))), Refusal.WRONG_SECRET),
    (lambda play: play.act(BLUE, r.Withdraw(secret=play.secret(BLUE))) and None,
     lambda play: r.Withdraw(secret=play.secret(BLUE)), Refusal.NO_FUNDS),
    (_nothing, lambda play: r.Transfer(target=play.handle(GRAY), amount=1_000_000), Refusal.NO_FUNDS),
    (_asked, lambda play: r.Pay(message=1, amount=600.001), Refusal.NO_FUNDS),
    (_nothing, lambda play: r.Buy(market="m0", side="yes", amount=601), Refusal.NO_FUNDS),
    (_nothing, lambda play: r.OpenPerp(market="BTC", side="short", amount=601), Refusal.NO_FUNDS),
    (_poor, lambda play: r.Audit(target=play.handle(GRAY)), Refusal.NO_FUNDS),
    (_asked_and_poor, lambda play: r.Escalate(message=1), Refusal.NO_FUNDS),
    (_asked_and_poor, lambda play: r.RequestVerification(message=1), Refusal.NO_FUNDS),
    (_deal, lambda play: r.Accept(deal=1), Refusal.NO_FUNDS),
    (_deal, lambda play: r.CounterOffer(deal=1, amount=650), Refusal.NO_FUNDS),
    (_nothing, lambda play: r.Propose(target=play.handle(GRAY), side="buy", item="lamp", amount=601), Refusal.NO_FUNDS),
    (_nothing, lambda play: r.Sell(market="m0", side="yes", amount=1), Refusal.NO_POSITION),
    (_nothing, lambda play: r.ClosePerp(market="BTC"), Refusal.NO_POSITION),
    (_asked, lambda play: r.Pay(message=1, amount=0.01), Refusal.BAD_AMOUNT),
    (_told, lambda play: r.Pay(message=1, amount=50), Refusal.BAD_AMOUNT),
    (_no_goods, lambda play: r.Propose(target=play.handle(GRAY), side="sell", item="lamp", amount=1e-9),
     Refusal.BAD_AMOUNT),
    (_no_goods, lambda play: r.Propose(target=play.handle(GRAY), side="sell", item="lamp", amount=1), Refusal.NOT_YOURS),
    (_bid, lambda play: r.Accept(deal=1), Refusal.NOT_YOURS),
    (_bid, lambda play: r.CounterOffer(deal=1, amount=25), Refusal.NOT_YOURS),
    (_grouped, lambda play: r.InviteToGroup(target=play.handle(GRAY)), Refusal.NOT_YOURS),
    (lambda play: play.act(BLUE, r.OpenPerp(market="BTC", side="long", amount=5)) and None,
     lambda play: r.OpenPerp(market="BTC", side="short", amount=5), Refusal.NOT_YOURS),
    *((_blocked, lambda play, make=make: make(play.handle(GRAY)), Refusal.BLOCKED) for make in (
        lambda who: r.SendMessage(target=who, content="x"), lambda who: r.InviteToGroup(target=who),
        lambda who: r.Propose(target=who, side="buy", item="lamp", amount=1))),
    *((_frozen, lambda play, make=make: make(play.handle(GRAY)), Refusal.FROZEN) for make in (
        lambda who: r.SendMessage(target=who, content="x"), lambda who: r.Comment(content="x"),
        lambda who: r.InviteToGroup(target=who), lambda who: r.Propose(target=who, side="buy", item="lamp", amount=1))),
    (_used_up, lambda play: r.Escalate(message=1), Refusal.QUOTA),
    (_used_up, lambda play: r.RequestVerification(message=1), Refusal.QUOTA),
    *((_asked, lambda play, junk=junk: junk, Refusal.NOT_AN_ACTION) for junk in (
        None, 3, "wait", {"action": "wait"}, object(), r.Gossip(order=1, kind="pay", owner="a", counterparty="b", amount=1),
        r.Pay(message=1, amount=math.nan), r.Pay(message=1, amount=math.inf), r.Pay(message=1, amount=-40),
        r.Pay(message=1, amount=10**40), r.Pay(message=1, amount=True), r.Pay(message=0, amount=40),
        r.Pay(message="1", amount=40), r.Comment(content=""), r.Comment(content="x" * 281),  # type: ignore[arg-type]
        r.Comment(content="\ud800"), r.Buy(market="m0", side="maybe", amount=1))),  # type: ignore[arg-type]
)  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_refused_action_has_no_effect_at_all(case: int) -> None:  # E8, E12
    prepare, make, refusal = REFUSED[case]
    play = Play()
    prepare(play)
    before = play.env.snapshot()
    action, tick = make(play), play.world.tick
    play.do({BLUE: action})
    facts = play.facts[BLUE, tick]
    after, notice = state_of(play.env), play.sees(BLUE).notice
    assert facts.refusal is refusal and notice == refusal.value.replace("_", " ")
    assert facts.parsed is (refusal is not Refusal.NOT_AN_ACTION)
    effects = {name: getattr(facts, name) for name in facts.__struct_fields__[4:]}
    assert not any(effects[name] for name in effects if name not in ("truth", "share")) and facts.share == 1
    assert facts.truth is ThreadTruth.NONE
    play.env.restore(before)
    play.facts.clear()
    play.do()
    assert state_of(play.env) == after, "the world is the same as after waiting"


def test_every_refusal_is_reached() -> None:
    assert {refusal for _, _, refusal in REFUSED} | {Refusal.THREAD_CLOSED} == set(Refusal)


def test_a_parse_failure_is_a_turn_without_effect() -> None:
    play = Play()
    play.honest(BLUE)
    before = play.env.snapshot()
    tick = play.act(BLUE, ParseFailure(kind=ParseFailureKind.NO_JSON, detail=""))
    facts, after = play.facts[BLUE, tick], state_of(play.env)
    assert (facts.parsed, facts.action, facts.refusal, play.sees(BLUE).notice) == (
        False,
        "parse_failure",
        None,
        "not an action",
    )
    play.env.restore(before)
    play.facts.clear()
    play.do()
    assert state_of(play.env) == after


def test_group_and_reply_refusals_of_blocked_and_frozen() -> None:
    play = Play()
    play.act(BLUE, r.InviteToGroup(target=play.handle(GRAY)))
    play.act(GRAY, r.Block(target=play.handle(BLUE)))
    assert play.result(BLUE, r.GroupMessage(group="g1", content="x")).refusal is Refusal.BLOCKED
    play.act(RED, r.SendMessage(target=play.handle(BLUE), content="x"))
    play.person(BLUE).frozen_until = 100
    assert play.result(BLUE, r.ReplyChat(message=1, content="x")).refusal is Refusal.FROZEN
    assert play.result(BLUE, r.GroupMessage(group="g1", content="x")).refusal is Refusal.FROZEN


# ----------------------------------------------------------------------------------------------------- simultaneity


def test_a_thread_closed_by_the_other_side_in_the_same_tick_is_refused_or_just_answered() -> None:
    seen = set()
    for seed in range(12):
        play = Play(seed=seed)
        play.red_writes("hello")
        play.act(BLUE, r.ReplyChat(message=1, content="who are you"))
        tick = play.world.tick
        play.do({BLUE: r.Block(target=play.handle(RED)), RED: r.ReplyChat(message=1, content="me")})
        play.finish()
        seen.add(play.facts[RED, tick].refusal)
    assert seen == {None, Refusal.THREAD_CLOSED}


def test_numbers_and_handles_mean_what_was_observed_whoever_acts_first() -> None:
    for seed in range(12):
        play = Play(seed=seed)
        goods(play, BLUE)
        goods(play, GRAY, count=0, value=90)
        # GRAY is shown one deal; in the same tick another one comes: number 2 is not yet a deal.
        play.act(BLUE, r.Propose(target=play.handle(GRAY), side="sell", item="lamp", amount=45))
        tick = play.world.tick
        goods(play, RED, "rug")
        play.do({RED: r.Propose(target=play.handle(GRAY), side="sell", item="rug", amount=1), GRAY: r.Accept(deal=2)})
        assert play.facts[GRAY, tick].refusal is Refusal.UNKNOWN_DEAL
        # RED gets a new handle in this tick: what others do to the one that they saw still reaches it.
        old = play.handle(RED)
        play.red_writes()
        play.do({BLUE: r.Escalate(message=1), GRAY: r.Transfer(target=old, amount=10)})
        assert play.handle(RED) != old and play.facts[GRAY, tick + 2].refusal is None


def test_a_freeze_or_a_block_counts_from_the_next_tick_whoever_acts_first() -> None:
    for seed in range(8):
        play = Play(seed=seed)
        play.red_writes()
        tick = play.world.tick
        play.do({BLUE: r.Escalate(message=1), RED: r.SendMessage(target=play.handle(GRAY), content="hi")})
        play.do({BLUE: r.Block(target=play.handle(GRAY)), GRAY: r.SendMessage(target=play.handle(BLUE), content="hi")})
        play.finish()
        assert play.facts[RED, tick].refusal is None and play.facts[GRAY, tick + 1].refusal is None
        assert not play.sees(BLUE).inbox if not play.world.done else True


def test_a_family_of_each_ask_is_there_to_test_with() -> None:
    assert (PAY.ask, SECRET.ask) == ("pay", "secret")
