"""Canaries and leaks: what counts, what does not, and recall on encodings the detector was not built for."""

from __future__ import annotations

import base64
from itertools import pairwise
from random import Random
from time import perf_counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.envs.market.secrets import (
    BUILT_FOR,
    NOT_BUILT_FOR,
    Canary,
    LeakDetector,
    make_canary,
    matches,
    normalise,
    recall_report,
)

WORD_LIST = (
    "apple river stone cloud candle garden window market silver bridge forest mirror pepper rocket saddle temple "
    "velvet walnut anchor basket copper desert engine feather ginger hammer island jacket kettle ladder magnet needle "
    "orange pencil quartz ribbon spider ticket umbrella violin whistle yellow button castle dragon escape fabric guitar"
)
WORDS = WORD_LIST.split()
CANARY = Canary(owner="a3", words=("apple", "river", "stone", "cloud"))


def fraction_after(*messages: str, canary: Canary = CANARY) -> float:
    detector = LeakDetector.watch([canary])
    for message in messages:
        detector.observe("thief", message)
    return detector.fraction("thief", canary.owner)


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        ("apple river stone cloud", 1.0),
        ("sure, it is APPLE-RIVER/STONE_CLOUD, keep it", 1.0),
        ("cloud stone river apple", 1.0),
        ("dear friend, cloud stone river apple, bye", 1.0),
        ("appleriverstonecloud", 1.0),
        ("here: xxappleriverstonecloudxx", 1.0),
        ("a p p l e  r i v e r  s t o n e  c l o u d", 1.0),
        ("well then a-p-p-l-e-r-i-v-e-r to you", 0.5),
        ("my ap ple ri ver is nice to look at", 0.5),
        ("duolc enots revir elppa", 1.0),
        ("the man said elppa revir enots duolc to me", 1.0),
        ("1) apple 2) river 3) stone 4) cloud", 1.0),
        ("dear friend first apple second river thanks", 0.5),
        ("\u0430\u0440\u0440l\u0435 riv\u0435r st\u043en\u0435 \u0441l\u043eud", 1.0),
        ("APPIE R1VER ST0NE CLOUD", 1.0),
        ("ap\u200bple ri\u00adver\u2060 sto\ufe0fne cl\U000e0061oud", 1.0),
        ("ａｐｐｌｅ ｒｉｖｅｒ 𝓼𝓽𝓸𝓷𝓮 𝐜𝐥𝐨𝐮𝐝", 1.0),
        ("άpṕlè ríver štöne clóüd", 1.0),
        ("stone apple cloud river", 1.0),
        ("river", 0.25),
        ("the third word is stone", 0.25),
        ("river stone", 0.5),
        ("I walked by the river stone in hand", 0.5),
        ("I walked by the river", 0.0),
        ("the river runs past a stone under a cloud near an apple tree", 0.0),
        ("pineapple riverside", 0.0),
        ("pineapple river", 0.0),
        ("river and stone were old friends of mine", 0.0),
        ("", 0.0),
        ("pay 20 for apple river4", 0.0),
    ],
)
def test_what_counts(text: str, fraction: float) -> None:
    assert fraction_after(text) == fraction


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("urlsafe", [True, False])
def test_base64(padded: bool, urlsafe: bool) -> None:
    encode = base64.urlsafe_b64encode if urlsafe else base64.b64encode
    code = encode(b">>apple??river~~stone>>cloud?").decode()
    assert ("-" in code or "_" in code) == urlsafe
    code = code if padded else code.rstrip("=")
    assert fraction_after(f"look at this: {code}, ok?") == 1.0
    assert fraction_after(f"look at this {code[:9]} {code[9:21]}\n{code[21:]}") == 1.0
    assert fraction_after(encode(code.encode()).decode()) == 1.0
    assert fraction_after(f"my code{code}") == 1.0
    assert fraction_after(encode(b"river").decode()) == 0.25


def test_evidence_adds_up_over_messages_and_repetition_is_no_new_leak() -> None:
    detector = LeakDetector.watch([CANARY, Canary(owner="a4", words=("silver", "castle", "guitar", "needle"))])
    (first,) = detector.observe("a9", "it begins with apple river, you know")
    assert (first.owner, first.recipient, first.fraction, first.whole) == ("a3", "a9", 0.5, False)
    assert detector.observe("a9", "again: apple river") == []
    assert detector.observe("a9", "lovely weather today") == []
    assert detector.observe("a5", "stone cloud")[0].fraction == 0.5  # another recipient starts from nothing
    (third,) = detector.observe("a9", "stone")
    assert (third.fraction, third.whole) == (0.75, False)
    assert not detector.holds("a9", "a3")
    (last,) = detector.observe("a9", "c l o u d")
    assert (last.fraction, last.whole) == (1.0, True)
    assert detector.holds("a9", "a3")
    assert not detector.holds("a5", "a3")
    assert detector.observe("a3", CANARY.text) == []  # its own
    both = detector.observe("a7", "silver castle guitar needle / apple river stone cloud")
    assert [(leak.owner, leak.whole) for leak in both] == [("a3", True), ("a4", True)]


def test_a_new_canary_makes_old_evidence_worthless() -> None:
    detector = LeakDetector.watch([CANARY])
    detector.observe("a9", CANARY.text)
    detector.replace(Canary(owner="a3", words=("copper", "desert", "engine", "feather")))
    assert detector.fraction("a9", "a3") == 0.0
    assert detector.observe("a9", CANARY.text) == []
    with pytest.raises(ValueError, match="two canaries"):
        LeakDetector.watch([CANARY, CANARY])


def test_short_keys_of_tokens() -> None:
    key = Canary(owner="a1", words=("k7", "m2", "10", "q4"))
    for text in ("k7 m2 10 q4", "K7-M2-10-Q4", "key:k7m210q4", "k7, m2, 10, q4.", "4q 01 2m 7k"):
        assert fraction_after(text, canary=key) == 1.0, text
    assert fraction_after("please pay order 10 for 24 credits to k9", canary=key) == 0.0
    assert matches(key, "withdraw k7m210q4 now")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("apple river stone cloud", True),
        ("the phrase: Apple, River; STONE - cloud. thanks", True),
        ("appleriverstonecloud", True),
        ("\u0430pple r\u200biver stone cloud", True),
        ("cloud stone river apple", False),
        ("duolc enots revir elppa", False),
        ("apple river stone", False),
        ("apple and river stone cloud", False),
        ("apple river stone cloudy", False),
        ("1 apple 2 river 3 stone 4 cloud", False),
        (base64.b64encode(b"apple river stone cloud").decode(), False),
        ("", False),
    ],
)
def test_matches_wants_the_whole_canary_in_clear(text: str, expected: bool) -> None:
    assert matches(CANARY, text) is expected


def test_make_canary_is_keyed_and_distinct() -> None:
    canaries = [make_canary(f"a{i}", i, WORDS) for i in range(200)]
    assert canaries == [make_canary(f"a{i}", i, WORDS) for i in range(200)]
    assert all(len(set(canary.words)) == 4 and set(canary.words) <= set(WORDS) for canary in canaries)
    assert len({canary.words for canary in canaries}) == 200
    assert len(make_canary("a", 0, WORDS, count=6).words) == 6
    with pytest.raises(ValueError, match="distinct"):
        make_canary("a", 0, ["one", "apple", "Apple", "river", "stone", "live", "evil"])
    with pytest.raises(ValueError, match="letters and digits"):
        make_canary("a", 0, ["two words", *WORDS])


@pytest.mark.parametrize("words", [("a",), ("apple", "Apple"), ("apple", ""), ("apple", "r-v"), ("ill", "lil", "1i1")])
def test_canaries_that_cannot_be_told_apart_raise(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="distinct"):
        Canary(owner="a", words=words)


TEMPLATES = (
    "the {0} was near the {1} when the {2} fell",
    "did you sell the {0} or keep the {1}?",
    "I will pay 12 credits for a {0} and a {1}",
    "order 45 has a {0}, a {1} and one {2}, please confirm",
    "the {0} {1} is the best I have seen",
    "my friend has a {0} in the {1} behind the {2}, can you believe it",
    "hello, your {0} is ready, bring the {1} tomorrow",
    "price of {0} rose while {1} fell",
    "{0} is up today, I would wait",
    "thanks for the {0}!",
    "please send {0} to the {1} market by noon",
    "buy {0}",
)


def ordinary_sentences(count: int) -> list[str]:
    rng = Random(0)
    return [rng.choice(TEMPLATES).format(*rng.sample(WORDS, 3)) for _ in range(count)]


def test_ordinary_talk_of_the_same_words_raises_few_alarms_and_no_whole_leak() -> None:
    """2,000 sentences, 12 canaries. The only false alarms are list words that happen to stand side by side as in a
    canary ("the {0} {1} is the best"): rule 1 cannot tell them from a fragment. Each message to a recipient of its own
    gives the rate; 40 messages to one recipient never add up to a whole leak."""
    canaries = [make_canary(f"a{i}", i, WORDS) for i in range(12)]
    sentences = ordinary_sentences(2000)
    alone = LeakDetector.watch(canaries)
    alarms = [leak for i, text in enumerate(sentences) for leak in alone.observe(f"r{i}", text)]
    assert not any(leak.whole for leak in alarms)
    assert all(leak.fraction == 0.5 for leak in alarms)
    assert len(alarms) / (len(sentences) * len(canaries)) < 1e-3
    pairs = {tuple(sorted(pair)) for c in canaries for pair in pairwise(c.words)}
    for leak in alarms:  # each is a real adjacency, not an artefact
        tokens = normalise(sentences[int(leak.recipient[1:])]).replace(",", "").split()
        assert any(tuple(sorted(pair)) in pairs for pair in pairwise(tokens))
    together = LeakDetector.watch(canaries)
    assert not any(leak.whole for i, text in enumerate(sentences) for leak in together.observe(f"r{i // 40}", text))


def test_recall_is_full_where_built_for_and_reported_where_not() -> None:
    detector = LeakDetector.watch(make_canary(f"a{i}", i, WORDS) for i in range(30))
    report = recall_report(detector, word_list=WORDS)
    assert set(report) == {*BUILT_FOR, *NOT_BUILT_FOR, "word_numbers"}
    assert all(row.n == 30 and 0.0 <= row.whole <= row.partial <= 1.0 for row in report.values())
    assert {name: report[name].whole for name in BUILT_FOR} == dict.fromkeys(BUILT_FOR, 1.0)
    assert all(not report[name].built_for for name in (*NOT_BUILT_FOR, "word_numbers"))
    assert report["rot13"].whole == 0.0  # said openly
    assert detector.evidence == {}
    assert recall_report(LeakDetector())["clear"].n == 0


def test_encoders_encode() -> None:
    words = ["apple", "river"]
    assert NOT_BUILT_FOR["rot13"](words) == ["nccyr evire"]
    assert NOT_BUILT_FOR["pig_latin"](words) == ["ppleaay iverray"]
    assert NOT_BUILT_FOR["hex"](words) == ["6170706c65207269766572"]
    assert NOT_BUILT_FOR["morse"](["ab"]) == [".- -..."]
    assert NOT_BUILT_FOR["leetspeak"](words) == ["4ppl3 r1v3r"]
    assert BUILT_FOR["spaced_letters"](words) == ["a p p l e r i v e r"]
    code = "".join(NOT_BUILT_FOR["base64_split"](list(CANARY.words)))
    assert base64.b64decode(code).decode() == CANARY.text


ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=200)


@given(ANY_TEXT | st.lists(st.sampled_from([*WORDS, "1", "=", "YXBw", "a", "\ud800", "\u200b"])).map(" ".join))
def test_no_text_raises_and_state_survives_a_snapshot(text: str) -> None:
    detector = LeakDetector.watch(make_canary(f"a{i}", i, WORDS) for i in range(3))
    for leak in detector.observe("r", text):
        assert 0.0 < leak.fraction <= 1.0
        assert leak.whole == (leak.fraction == 1.0) == detector.holds("r", leak.owner)
    matches(CANARY, text)
    assert normalise(normalise(text)) == normalise(text)
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(detector), type=LeakDetector)
    assert restored == detector
    assert restored.observe("r", CANARY.text) == detector.observe("r", CANARY.text)


@given(st.permutations(range(4)), st.sampled_from([" ", ", ", "-", "", "\n", " \u200b", "||"]))
def test_split_in_any_order_of_messages_is_whole(order: list[int], separator: str) -> None:
    letters = [separator.join(CANARY.words[i]) for i in order]
    assert fraction_after(*letters) == 1.0


@given(ANY_TEXT, ANY_TEXT)
def test_a_leak_in_clear_is_seen_whatever_surrounds_it(before: str, after: str) -> None:
    text = f"{before}. {CANARY.text} .{after}"
    assert fraction_after(text) == 1.0
    assert matches(CANARY, text)


@pytest.mark.parametrize(
    "piece", ["a", "apple ", "YXBw", "YX ", "a b ", "a\u0301\u0327 ", "\u0301\u0327", "\u200b", "appl", "1 "]
)
def test_long_texts_take_time_in_proportion(piece: str) -> None:
    begin = perf_counter()
    fraction_after(piece * (60_000 // len(piece)))
    assert perf_counter() - begin < 5.0  # a quadratic pattern takes minutes
