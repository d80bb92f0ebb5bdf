"""Chats of scripted players on knowledge graphs, for a supervised start of a model that has never seen one:

    python recipes/graph_chats.py --out /tmp/graph.jsonl
    sparring warmup --model tiny --chats /tmp/graph.jsonl --out models/graph

The players are careless on purpose: the model learns both forms, how to look edges up, and their mistakes; what to make of
it is left to self-play. Graphs come from the ``warmup`` split, which neither training nor the test sees.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from sparring.config import SelfplayConfig
from sparring.envs.graph.prompts import answerer_prompt, context_of, generator_prompt, packet_of
from sparring.envs.graph.scripted import scripted_answer, scripted_task
from sparring.envs.graph.solver import random_tasks
from sparring.envs.graph.worlds import make_world

TASKS_A_WORLD = 12


def chats(config: SelfplayConfig, count: int, *, care: float, generator_share: float) -> Iterator[dict[str, Any]]:
    made, number = 0, 0
    while True:
        world = make_world(config.world, config.world_settings, split="warmup", seed=config.seed, number=number)
        rng = Random(f"chats/{config.seed}/{number}")
        hops = range(config.min_hops, config.max_hops + 1)
        tasks = random_tasks(world.graph, rng, TASKS_A_WORLD, hops=tuple(hops), full=config.full)
        for task in tasks:
            if rng.random() < generator_share:
                packet = packet_of(world.graph, task.query, task.evidence, rng, edges=config.context_edges)
                prompt = generator_prompt(packet, task.query.length, full=config.full, draws=config.draws)
                reply = scripted_task(packet, task.query.length, rng, care=care, full=config.full, draws=config.draws)
            else:
                context = context_of(world.graph, task, rng, edges=config.context_edges)
                prompt = answerer_prompt(task.question, context, full=config.full)
                reply = scripted_answer(context, task.query, rng, care=care)
            roles = zip(("system", "user", "assistant"), (*prompt, reply), strict=True)
            yield {"messages": [{"role": role, "content": content} for role, content in roles]}
            made += 1
            if made == count:
                return
        number += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--care", type=float, default=0.6, help="share of replies that are right")
    parser.add_argument("--generator-share", type=float, default=0.4)
    parser.add_argument("--world", default="investigation")
    parser.add_argument("--full", action="store_true", help="full instructions and questions (for pretrained models)")
    parser.add_argument(
        "--canonical-graph", choices=["fixed", "generate"], default="fixed", help="as in the run to come"
    )
    chosen = parser.parse_args()
    config = SelfplayConfig(world=chosen.world, full=chosen.full, canonical_graph=chosen.canonical_graph)
    made = chats(config, chosen.count, care=chosen.care, generator_share=chosen.generator_share)
    chosen.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
