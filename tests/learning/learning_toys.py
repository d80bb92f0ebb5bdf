"""Turns by the handful, and a toy policy that fulfils the contract of a trainable one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sparring.learning.advantages import CreditedTurn
from sparring.policies.contract import ScoreRow
from sparring.types import (
    Experience,
    Outcome,
    ParseFailure,
    ParseFailureKind,
    PolicyVersion,
    Reward,
    SamplingSettings,
    Settlement,
    Turn,
    TurnId,
)

V1 = PolicyVersion(incarnation=1, step=0)


def settlement(
    number: int,
    reward: float | None,
    *,
    team: str = "blue",
    policy: str = "shared",
    log_probs: Sequence[float] = (-0.5, -0.25),
    violation: bool = False,
    tick: int = 0,
    step: int = 0,
) -> Settlement:
    turn = Turn(
        id=TurnId(episode=0, agent=f"a{number:04d}", tick=tick),
        team=team,
        policy=policy,
        version=PolicyVersion(incarnation=1, step=step),
        sampling=SamplingSettings(),
        prompt_ids=(1, 2, 3),
        reply_ids=tuple(4 + i % 4 for i in range(len(log_probs))),
        log_probs=tuple(log_probs),
        action=ParseFailure(kind=ParseFailureKind.NO_JSON, detail=""),
    )
    return Settlement(
        turn=turn,
        outcome=Outcome(turn=turn.id, facts=None, settled_at=tick + 1),
        reward=Reward(total=reward, violation=violation),
    )


def credited(number: int, advantage: float, **more: object) -> CreditedTurn:
    return CreditedTurn(settlement=settlement(number, 0.0, **more), advantage=advantage)  # type: ignore[arg-type]


class ToyPolicy(nn.Module):
    """A causal model in one file: log-softmax(head(tanh(mix(mean of embeddings so far + last embedding))))."""

    def __init__(self, *, vocabulary: int = 11, width: int = 6, seed: int = 0, name: str = "shared") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.name = name
        self.version = V1
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.forwarded: list[int] = []
        self.embed.register_forward_hook(lambda _module, inputs, _output: self.forwarded.append(inputs[0].numel()))
        self._reference = [copy.deepcopy(module) for module in (self.embed, self.mix, self.head)]
        self._reference[0]._forward_hooks.clear()

    def log_probs(self, rows: Sequence[ScoreRow], *, temperature: float, top_p: float = 1.0) -> Tensor:
        return self._score(self.embed, self.mix, self.head, rows, temperature)

    @property
    def shares_prefixes(self) -> bool:
        return False

    def positions(self, rows: Sequence[ScoreRow]) -> int:
        return sum(row.positions[-1] for row in rows)

    def reference_log_probs(self, rows: Sequence[ScoreRow], *, temperature: float) -> Tensor:
        with torch.no_grad():
            return self._score(*self._reference, rows, temperature)

    def _score(
        self, embed: nn.Module, mix: nn.Module, head: nn.Module, rows: Sequence[ScoreRow], temperature: float
    ) -> Tensor:
        parts = []
        for row in rows:
            ids = torch.tensor(row.token_ids[: row.positions[-1]])
            x = embed(ids)
            past = x.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
            everywhere = torch.log_softmax(head(torch.tanh(mix(past + x))) / temperature, dim=-1)
            parts += [everywhere[i - 1, row.token_ids[i]] for i in row.positions]
        return torch.stack(parts)

    def trainable_parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self.named_parameters())

    def matrix_names(self) -> Iterable[str]:
        return ["mix.weight"]


def behaviour(policy: ToyPolicy, tokens: Sequence[int], prompt: int) -> tuple[float, ...]:
    row = ScoreRow(token_ids=tuple(tokens), positions=tuple(range(prompt, len(tokens))))
    with torch.no_grad():
        values = policy.log_probs([row], temperature=1.0).tolist()
    policy.forwarded.clear()
    return (0.0,) * prompt + tuple(values)


def experience(
    number: int,
    tokens: Sequence[int],
    prompt: int,
    advantage: float,
    weights: Sequence[float],
    log_probs: Sequence[float],
    **more: object,
) -> Experience:
    reply = len(tokens) - prompt
    assert len(weights) == reply
    fields: dict[str, object] = {
        "source": TurnId(episode=0, agent=f"a{number:04d}", tick=0),
        "policy": "shared",
        "team": "blue",
        "version": V1,
        "sampling": SamplingSettings(),
        "token_ids": tuple(tokens),
        "loss_mask": (False,) * prompt + (True,) * reply,
        "behaviour_log_probs": tuple(log_probs),
        "advantages": (0.0,) * prompt + (advantage,) * reply,
        "weights": (0.0,) * prompt + tuple(weights),
    }
    return Experience(**(fields | more))  # type: ignore[arg-type]
