"""Rows that join and leave: each reply is what it would be alone, and its log-probs are the learner's."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
import torch

from model_fixtures import make_model, make_tokenizer
from sparring.errors import SparringError
from sparring.inference.batches import Loaded, NewTokens, Ticket
from sparring.inference.engine import BusyError, Engine, EngineError
from sparring.inference.running_rows import REMEMBERED_FROM, PrefixMemory, RunningRows
from sparring.inference.sampler import InProcessSampler
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest, ScoreRow
from sparring.policies.language_model import LanguageModel
from sparring.tokens.chat import ChatTokenizer
from sparring.types import PolicyVersion, SamplingSettings

START = PolicyVersion(incarnation=1, step=0)
PROMPTS = [tuple(2 + (7 * n + k * k) % 300 for k in range(3 + 5 * n)) for n in range(9)]


@pytest.fixture(scope="module")
def policy() -> CausalLM:
    return CausalLM(LanguageModel(make_model()), ChatTokenizer(make_tokenizer()))


@pytest.fixture
def engine() -> Any:
    made = Engine(most_running=6, most_waiting=64)
    yield made
    made.close()


class Client:
    """Collects one reply."""

    def __init__(
        self, loaded: Loaded, prompt: tuple[int, ...], settings: SamplingSettings, key: tuple[int, ...]
    ) -> None:
        self.news: queue.Queue[NewTokens | SparringError] = queue.Queue()
        self.ticket = Ticket(prompt_ids=prompt, settings=settings, key=key, loaded=loaded, notify=self.news.put)

    def wait_until_begun(self) -> None:
        deadline = time.monotonic() + 60
        while not self.ticket.told and time.monotonic() < deadline:
            time.sleep(0.001)

    def reply(self) -> tuple[tuple[int, ...], tuple[float, ...], str]:
        ids, log_probs = [], []
        while True:
            news = self.news.get(timeout=60)
            if isinstance(news, SparringError):
                raise news
            ids += news.token_ids
            log_probs += news.log_probs
            if news.finish is not None:
                return tuple(ids), tuple(log_probs), news.finish


def settings(number: int) -> SamplingSettings:
    """Of different lengths, temperatures and supports, so that rows leave at different steps."""
    return SamplingSettings(
        max_new_tokens=4 + 5 * (number % 4), temperature=(1.0, 0.7, 0.0)[number % 3], top_p=(1.0, 0.8)[number % 2]
    )


def test_a_reply_is_the_same_alone_and_in_any_company_and_its_log_probs_are_the_learners(policy, engine):
    loaded = Loaded(name="a", policy=policy, version=START)
    clients = [Client(loaded, prompt, settings(n), (5, n)) for n, prompt in enumerate(PROMPTS * 3)]
    for start in range(0, len(clients), 4):  # they join while others run
        engine.submit([client.ticket for client in clients[start : start + 4]])
        if start % 8 == 4:
            clients[start].wait_until_begun()
    replies = [client.reply() for client in clients]
    for n, (client, (ids, log_probs, finish)) in enumerate(zip(clients, replies, strict=True)):
        request = SampleRequest(prompt_ids=client.ticket.prompt_ids, key=(5, n))
        alone = InProcessSampler(policy).sample([request], settings(n))[0]
        assert ids == alone.token_ids, n
        assert finish == ("length" if alone.truncated else "stop")
        start = len(request.prompt_ids)
        row = ScoreRow(
            token_ids=(*request.prompt_ids, *alone.token_ids), positions=tuple(range(start, start + len(ids)))
        )
        with torch.no_grad():
            scored = policy.log_probs([row], temperature=settings(n).temperature, top_p=effective_top_p(settings(n)))
        assert torch.allclose((torch.tensor(log_probs) - scored).exp(), torch.ones(len(ids)), atol=1e-3)
    assert engine.running == 0 and engine.waiting == 0 and loaded.uses == 0


def effective_top_p(settings: SamplingSettings) -> float:
    return 1.0 if settings.temperature == 0.0 else settings.top_p


def test_prompts_that_begin_alike_are_computed_once_while_the_weights_stand(policy):
    memory = PrefixMemory(policy.core)
    rules = tuple(2 + n % 300 for n in range(2 * REMEMBERED_FROM))
    first = memory.prefill([(*rules, 5, 6), (*rules, 7)])
    assert first.computed == len(rules) + 3
    second = memory.prefill([(*rules, 8, 9)])
    assert second.computed == 2
    fresh = PrefixMemory(policy.core).prefill([(*rules, 8, 9)])
    assert torch.allclose(second.hidden, fresh.hidden, atol=1e-4)
    rows, other = RunningRows(policy.core), RunningRows(policy.core)
    for each, made in ((rows, second), (other, fresh)):
        each.join(made, [4])
    assert torch.allclose(rows.forward(torch.tensor([3])), other.forward(torch.tensor([3])), atol=1e-3)


def test_rows_that_leave_give_their_slots_to_others(policy):
    rows, memory = RunningRows(policy.core), PrefixMemory(policy.core)
    rows.join(memory.prefill(PROMPTS[:5]), [8] * 5)
    tokens = torch.tensor([9, 8, 7, 6, 5])
    rows.forward(tokens)
    order = rows.leave([0, 3])
    rows.join(memory.prefill([PROMPTS[5]]), [8])
    assert [*order, 5] == [4, 1, 2, 5]
    logits = rows.forward(torch.tensor([3, 3, 3, 3]))
    for place, number in enumerate(order):
        whole = (*PROMPTS[number], int(tokens[number]), 3)
        alone = policy.core.logits(policy.core.hidden(torch.tensor([whole]))[:, -1])
        assert torch.allclose(logits[place], alone[0], atol=1e-3)


def test_who_hangs_up_frees_its_row(policy, engine):
    loaded = Loaded(name="a", policy=policy, version=START)
    long = SamplingSettings(max_new_tokens=400, temperature=5.0)
    clients = [Client(loaded, PROMPTS[3], long, (n,)) for n in range(8)]
    engine.submit([client.ticket for client in clients])
    for client in clients:
        engine.cancel(client.ticket)
    short = Client(loaded, PROMPTS[1], SamplingSettings(max_new_tokens=3), (9,))
    engine.submit([short.ticket])
    short.reply()
    assert engine.running <= 1 and loaded.uses <= 1
    assert engine.figures.cancelled == 8


def test_too_many_that_wait_are_refused_and_none_of_them_is_taken(policy, engine):
    loaded = Loaded(name="a", policy=policy, version=START)
    clients = [Client(loaded, PROMPTS[3], SamplingSettings(max_new_tokens=2), (n,)) for n in range(65)]
    with pytest.raises(BusyError, match="at most 64"):
        engine.submit([client.ticket for client in clients])
    assert loaded.uses == 0


def test_old_weights_finish_what_they_began_and_are_freed(policy, engine):
    other = CausalLM(LanguageModel(make_model(seed=3)), policy.chat)
    gone = threading.Event()
    old = Loaded(name="old", policy=policy, version=START, freed=lambda one: gone.set())
    new = Loaded(name="new", policy=other, version=PolicyVersion(incarnation=1, step=1))
    slow = Client(old, PROMPTS[4], SamplingSettings(max_new_tokens=60, temperature=0.0), (1,))
    engine.submit([slow.ticket])
    slow.wait_until_begun()
    engine.retire(old)
    quick = Client(new, PROMPTS[4], SamplingSettings(max_new_tokens=5, temperature=0.0), (1,))
    engine.submit([quick.ticket])
    assert quick.reply()[0] == sampled(other, 5)
    assert slow.reply()[0] == sampled(policy, 60)
    assert gone.wait(10)


def sampled(policy: CausalLM, length: int) -> tuple[int, ...]:
    request = SampleRequest(prompt_ids=PROMPTS[4], key=(1,))
    return (
        InProcessSampler(policy)
        .sample([request], SamplingSettings(max_new_tokens=length, temperature=0.0))[0]
        .token_ids
    )


def test_a_failure_ends_its_own_requests_only(policy, engine, capfd):
    class Broken(CausalLM):
        def activated(self) -> Any:
            raise KeyError("no such module")

    broken = Loaded(name="b", policy=Broken(policy.core, policy.chat), version=START)
    fine = Loaded(name="a", policy=policy, version=START)
    clients = [Client(one, PROMPTS[2], SamplingSettings(max_new_tokens=4), (1,)) for one in (broken, fine)]
    engine.submit([client.ticket for client in clients])
    with pytest.raises(EngineError, match="KeyError"):
        clients[0].reply()
    clients[1].reply()
    assert engine.alive and broken.uses == 0 and engine.figures.failed == 1
    assert "no such module" in capfd.readouterr().err


def test_models_that_take_no_trees_are_decoded_in_waves(policy, engine):
    core = LanguageModel(make_model())
    core.rows_because = "a test says so"
    loaded = Loaded(name="a", policy=CausalLM(core, policy.chat), version=START)
    clients = [Client(loaded, prompt, settings(n), (5, n)) for n, prompt in enumerate(PROMPTS)]
    engine.submit([client.ticket for client in clients])
    for n, client in enumerate(clients):
        alone = InProcessSampler(policy).sample([SampleRequest(prompt_ids=PROMPTS[n], key=(5, n))], settings(n))[0]
        assert client.reply()[0] == alone.token_ids
