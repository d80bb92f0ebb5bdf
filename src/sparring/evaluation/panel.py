"""Playing a panel: every situation is decided once by each player, with common random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from sparring.agents.agent import build_prompt, parse_action
from sparring.agents.personas import assign
from sparring.envs.contract import Bot, Situation
from sparring.inference.sampler import InProcessSampler
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest
from sparring.types import SamplingSettings


def play_policy(policy: CausalLM, situations: Sequence[Situation], settings: SamplingSettings, *, seed: int) -> list[Any]:
    """What came of each situation when ``policy`` decides; all prompts are answered in one batch.

    The same (seed, situation) draws the same random numbers and the same persona for every policy.
    """
    waiting = [situation.begin() for situation in situations]
    requests = []
    for number, (situation, (env, agent)) in enumerate(zip(situations, waiting, strict=True)):
        observation = env.observe()[agent]
        personas = assign(situation.team, 1, rng=Random(f"{seed}/{situation.key}"), personas=getattr(env, "personas", None))
        prompt = build_prompt(
            policy.chat, rules=env.rules, team_text=env.team_rules[situation.team], persona=personas[0],
            render=_renderer(env, observation),
            max_prompt_tokens=(policy.core.context_length or 1_000_000) - settings.max_new_tokens,
        )  # fmt: skip
        requests.append(SampleRequest(prompt_ids=prompt.token_ids, key=(seed, number)))
    results = []
    replies = InProcessSampler(policy).sample(requests, settings)
    for situation, (env, agent), reply in zip(situations, waiting, replies, strict=True):
        action = parse_action(policy.chat.decode(reply.token_ids), env.action_type, truncated=reply.truncated)
        results.append(situation.finish(env, agent, action))
    return results


def _renderer(env: Any, observation: object) -> Any:
    return lambda newest: env.render(observation, newest=newest)


def play_bot(bot: Bot, situations: Sequence[Situation], *, seed: int) -> list[Any]:
    """What came of each situation when a scripted bot decides."""
    results = []
    for number, situation in enumerate(situations):
        env, agent = situation.begin()
        results.append(situation.finish(env, agent, bot(env.observe()[agent], Random(f"{seed}/{number}"))))
    return results
