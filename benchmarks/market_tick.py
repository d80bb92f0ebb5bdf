"""One tick of a market of 30 agents beside a fair implementation by rows: sample, score, gradient of what the gate keeps.

Prompts: 250 tokens shared by all, 60 by each of three teams, 120 of each agent's own; replies of 40 tokens (forced).
By rows: padded batched ``generate``, padded batched scoring of all rows, batched backward of the kept rows, each in
micro-batches of the same number of token positions. Ours: the tree, with log-probs recorded while sampling.

Usage: python benchmarks/market_tick.py [--gate 0.03] [--repeats 5]; ``--gate off`` trains every reply.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import document, machine, peak_rss, ratio, summary, token_words, write
from grpo_step import experience

from sparring import models
from sparring.inference.sampler import InProcessSampler
from sparring.learning.optimizers import NamedOptimizer
from sparring.learning.settings import LossSettings, OptimizerSettings
from sparring.learning.step import learner_step
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest, ScoreRow
from sparring.types import Reply, SamplingSettings

AGENTS, TEAMS = 30, 3
SHARED, TEAM, PRIVATE, REPLY = 250, 60, 120, 40


def prompts(vocabulary: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    shared = token_words(rng, SHARED, vocabulary)
    teams = [token_words(rng, TEAM, vocabulary) for _ in range(TEAMS)]
    return [(*shared, *teams[i % TEAMS], *token_words(rng, PRIVATE, vocabulary)) for i in range(AGENTS)]


def kept_rows(gate: str) -> list[int]:
    """Which agents' replies the gate keeps, spread over the teams."""
    count = AGENTS if gate == "off" else max(1, round(float(gate) * AGENTS))
    return [i * AGENTS // count for i in range(count)]


class Tick:
    """What both sides share: the policy, its optimizer, prompts and what is kept."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.policy: CausalLM = models.load(chosen.model, name="shared", micro_batch_tokens=chosen.micro_batch_tokens)
        self.policy.chat.end_ids = frozenset()
        self.optimizer = NamedOptimizer(
            self.policy.trainable_parameters(),
            self.policy.matrix_names(),
            OptimizerSettings(learning_rate=1e-6),
            seed=0,
        )
        self.prompts = prompts(int(self.policy.core.config.vocab_size))
        self.kept = kept_rows(chosen.gate)
        self.budget = chosen.micro_batch_tokens
        self.number = 0

    def ours(self) -> dict[str, float]:
        begin = time.perf_counter()
        self.number += 1
        sampler = InProcessSampler(self.policy)
        asked = [SampleRequest(prompt_ids=ids, key=(self.number, i)) for i, ids in enumerate(self.prompts)]
        replies = sampler.sample(asked, SamplingSettings(max_new_tokens=REPLY))
        sampled = time.perf_counter()
        batch = [experience(self.policy, self.prompts[i], replies[i], i, (-1.0) ** i + 0.5) for i in self.kept]
        report = learner_step(
            self.policy, batch, LossSettings(micro_batch_tokens=self.budget), self.optimizer,
            bad_batch_dir=Path(tempfile.gettempdir()),
        )  # fmt: skip
        assert report.graded_tokens == len(self.kept) * REPLY
        end = time.perf_counter()
        statistics = sampler.statistics
        return {
            "whole": end - begin, "prefill": statistics.prefill_seconds, "decode": statistics.decode_seconds, "score": 0.0,
            "learn": end - sampled, "forwarded": report.forwarded_tokens, "prefilled": statistics.prefilled_tokens,
        }  # fmt: skip

    def rows(self) -> dict[str, float]:
        """The same by rows, on the same model."""
        core = self.policy.core
        before, core.rows_because = core.rows_because, "measured by rows"
        try:
            begin = time.perf_counter()
            ids = torch.tensor(self.prompts)
            out = core.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, min_new_tokens=REPLY, max_new_tokens=REPLY,
                pad_token_id=0,
            )  # fmt: skip
            replies = out[:, ids.shape[1] :].tolist()
            sampled = time.perf_counter()
            positions = tuple(range(ids.shape[1], ids.shape[1] + REPLY))
            with torch.no_grad():
                scored = self.policy.log_probs(
                    [ScoreRow(token_ids=(*p, *r), positions=positions) for p, r in zip(self.prompts, replies, strict=True)],
                    temperature=1.0,
                ).view(AGENTS, REPLY)  # fmt: skip
            done = time.perf_counter()
            version = self.policy.version
            batch = [
                experience(
                    self.policy, self.prompts[i],
                    Reply(token_ids=tuple(replies[i]), log_probs=tuple(scored[i].tolist()), truncated=True, version=version),
                    i, (-1.0) ** i + 0.5,
                )
                for i in self.kept
            ]  # fmt: skip
            report = learner_step(
                self.policy, batch, LossSettings(micro_batch_tokens=self.budget), self.optimizer,
                bad_batch_dir=Path(tempfile.gettempdir()),
            )  # fmt: skip
            end = time.perf_counter()
            return {
                "whole": end - begin, "sample": sampled - begin, "score": done - sampled, "learn": end - done,
                "forwarded": report.forwarded_tokens,
            }  # fmt: skip
        finally:
            core.rows_because = before


def table(result: dict[str, Any]) -> str:
    """Seconds by phase, for the docs."""
    phases = (
        ("prefill", "ours"),
        ("decode", "ours"),
        ("sample", "theirs"),
        ("score", "theirs"),
        ("learn", ""),
        ("whole", ""),
    )
    lines = ["| seconds (median) | ours | rows |", "|---|---|---|"]
    for phase, only in phases:
        cells = [f"{result[side][phase]['median']:.2f}" if only in ("", side) else "" for side in ("ours", "theirs")]
        lines.append(f"| {phase} | {cells[0]} | {cells[1]} |")
    r = result["ratio"]
    forwarded = [result[side]["forwarded"]["median"] for side in ("ours", "theirs")]
    lines.append(f"| positions forward in learning | {forwarded[0]:.0f} | {forwarded[1]:.0f} |")
    lines += ["", f"Whole tick: {r['value']:.2f} times faster ({r['least']:.2f} to {r['greatest']:.2f}, n = {r['n']})."]
    return "\n".join(lines)


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--gate", default="0.03", help="share of replies that are kept, or off")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--only", choices=("ours", "rows"), help="one side, for its peak of memory")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    tick = Tick(chosen)
    mine, other = [], []
    for repeat in range(chosen.repeats + 1):  # the first is warm-up
        if chosen.only != "rows":
            mine.append(tick.ours())
            print(f"ours {repeat}: {mine[-1]}", flush=True)
        if chosen.only != "ours":
            other.append(tick.rows())
            print(f"rows {repeat}: {other[-1]}", flush=True)
    mine, other = mine[1:], other[1:]
    result: dict[str, Any] = {
        "name": f"market_tick gate {chosen.gate}",
        "row_positions": AGENTS * (SHARED + TEAM + PRIVATE + REPLY), "kept_replies": len(tick.kept),
        "peak_rss": peak_rss(), "versions": machine("torch", "transformers"),
        "settings": {"model": chosen.model, "dtype": "float32", "micro_batch_tokens": chosen.micro_batch_tokens},
    }  # fmt: skip
    if mine:
        result["ours"] = {k: summary([row[k] for row in mine]) for k in mine[0]}
    if other:
        result["theirs"] = {k: summary([row[k] for row in other]) for k in other[0]}
    if mine and other:
        result["ratio"] = ratio([row["whole"] for row in other], [row["whole"] for row in mine])
        document(f"market_tick {chosen.gate}", table(result))
    write(result)


if __name__ == "__main__":
    from sparring.cli import restart_with_allocator

    restart_with_allocator()
    main()
