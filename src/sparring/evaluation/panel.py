"""Playing a panel: every situation is decided once by each player, with common random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from sparring.agents.agent import build_prompt, parse_action
from sparring.agents.personas import assign
from sparring.envs.contract import Bot, Duel, Env, Situation
from sparring.inference.sampler import InProcessSampler
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest
from sparring.types import SamplingSettings


def play_policy(
    policy: CausalLM, situations: Sequence[Situation], settings: SamplingSettings, *, seed: int
) -> list[Any]:
    """What came of each situation when ``policy`` decides; all prompts are answered in one batch.

    The same (seed, situation) draws the same random numbers and the same persona for every policy.
    """
    waiting = [situation.begin() for situation in situations]
    places = [
        (situation.team, situation.key, env, agent) for situation, (env, agent) in zip(situations, waiting, strict=True)
    ]
    actions = _decide(policy, places, settings, seed=seed)
    return [
        situation.finish(env, agent, action)
        for situation, (env, agent), action in zip(situations, waiting, actions, strict=True)
    ]


def write_attacks(attacker: CausalLM, duels: Sequence[Duel], settings: SamplingSettings, *, seed: int) -> list[Any]:
    """What ``attacker`` does at each duel's opportunity."""
    waiting = [duel.begin() for duel in duels]
    places = [(duel.attacker_team, duel.key, env, agent) for duel, (env, agent) in zip(duels, waiting, strict=True)]
    return _decide(attacker, places, settings, seed=seed)


def answer_attacks(
    defender: CausalLM, duels: Sequence[Duel], attacks: Sequence[Any], settings: SamplingSettings, *, seed: int
) -> list[Any]:
    """What came of each duel when ``defender`` decides on an attack that was written before."""
    places = []
    for duel, action in zip(duels, attacks, strict=True):
        env, _ = duel.begin()
        places.append((duel.team, duel.key, env, duel.attack(env, action)))
    actions = _decide(defender, places, settings, seed=seed)
    return [
        duel.finish(env, agent, action) for duel, (_, _, env, agent), action in zip(duels, places, actions, strict=True)
    ]


def _decide(
    policy: CausalLM, places: Sequence[tuple[str, str, Env, str]], settings: SamplingSettings, *, seed: int
) -> list[Any]:
    """One decision at each (team, key, environment, agent), in one batch."""
    requests = []
    for number, (team, key, env, agent) in enumerate(places):
        observation = env.observe()[agent]
        personas = assign(team, 1, rng=Random(f"{seed}/{key}"), personas=getattr(env, "personas", None))
        prompt = build_prompt(
            policy.chat, rules=env.rules, team_text=env.team_rules[team], persona=personas[0],
            render=_renderer(env, observation),
            max_prompt_tokens=(policy.core.context_length or 1_000_000) - settings.max_new_tokens,
        )  # fmt: skip
        requests.append(SampleRequest(prompt_ids=prompt.token_ids, key=(seed, number)))
    replies = InProcessSampler(policy).sample(requests, settings)
    return [
        parse_action(
            policy.chat.decode(reply.token_ids),
            env.action_type,
            truncated=reply.truncated,
            thinking_opened=policy.chat.thinking_opened,
        )
        for (_, _, env, _), reply in zip(places, replies, strict=True)
    ]


def _renderer(env: Any, observation: object) -> Any:
    return lambda newest: env.render(observation, newest=newest)


def play_bot(bot: Bot, situations: Sequence[Situation], *, seed: int) -> list[Any]:
    """What came of each situation when a scripted bot decides."""
    results = []
    for number, situation in enumerate(situations):
        env, agent = situation.begin()
        results.append(situation.finish(env, agent, bot(env.observe()[agent], Random(f"{seed}/{number}"))))
    return results
