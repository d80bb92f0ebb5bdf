"""One update of 16 independent policies, stacked, beside that of one (CartPole's spaces, hidden 64, minibatch 64).

The last line is one JSON object: ``ratio`` = 16 x the time of one / the time of the stack, so 16 would be free and 1 a loop.
Times are CPU time of the process (one thread), the least of some updates, one and stack in turns.

Usage: python benchmarks/ppo_stacked.py [--agents 16] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from common import machine, summary, write

from sparring.learning.ppo_update import StackLearner, update
from sparring.learning.settings import PPOSettings
from sparring.policies.actor_critic import ActorCriticStack, Shape
from sparring.types import ActionKind, PolicyVersion, Rollout, Spaces

SPACES = Spaces(observation_size=4, action=ActionKind.DISCRETE, choices=(2,))
START = PolicyVersion(incarnation=1, step=0)


def learner(agents: int) -> StackLearner:
    stack = ActorCriticStack(Shape(spaces=SPACES, hidden=(64, 64)))
    made = StackLearner.of(stack, PPOSettings(minibatch=64, epochs=10), sizes=(4, 0))
    for number in range(agents):
        stack.add(f"agent_{number}", seed=0)
        made.join(START)
    return made


def rollouts(agents: int, environments: int = 8, steps: int = 256) -> dict[str, list[Rollout]]:
    found: dict[str, list[Rollout]] = {}
    for number in range(agents):
        rng = np.random.default_rng(number)
        found[f"agent_{number}"] = [
            Rollout(
                agent=f"agent_{number}", environment=environment, episode=0, version=START,
                observations=rng.normal(size=(steps, 4)).astype(np.float32), actions=rng.integers(2, size=(steps, 1)),
                log_probs=np.full(steps, np.log(0.5), np.float32), rewards=np.ones(steps, np.float32),
                terminated=rng.random(steps) < 0.02, truncated=np.zeros(steps, bool),
                final_observations=np.zeros((1, 4), np.float32),
            )
            for environment in range(environments)
        ]  # fmt: skip
        for each in found[f"agent_{number}"]:
            each.terminated[-1] = False
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    counts = (1, chosen.agents)
    data = {count: rollouts(count) for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(chosen.repeats + 1):
        for count in counts:
            made = learner(count)
            began = time.process_time()
            update(made, data[count], algorithm="ppo", progress=0.0, seed=0)
            if repeat:  # the first is warm-up
                seconds[count].append(time.process_time() - began)
    one, stack = min(seconds[1]), min(seconds[chosen.agents])
    write({
        "name": "ppo_stacked", "ratio": round(chosen.agents * one / stack, 3), "times_one": round(stack / one, 3),
        "ours": summary(seconds[chosen.agents]), "one": summary(seconds[1]), "n": chosen.repeats,
        "settings": {"agents": chosen.agents, "hidden": [64, 64], "minibatch": 64, "epochs": 10, "steps": 2048},
        "versions": machine("torch", "numpy"),
    })  # fmt: skip


if __name__ == "__main__":
    from sparring.cli import restart_with_allocator

    restart_with_allocator()
    main()
