"""One GRPO step (a group of replies to one prompt: sample, advantages, gradient, optimiser) beside TRL's, in turns.

Both: SmolLM2-135M-Instruct in fp32, the same lengths (forced), group, threads and allocator settings, AdamW on all
weights, no gradient checkpointing, the whole group in one micro-batch, gate off.

Usage: python benchmarks/grpo_step.py [--prompt 300] [--new 48] [--group 8] [--repeats 5]
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

from common import Rival, document, machine, peak_rss, ratio, summary, token_words, write

from sparring import models
from sparring.inference.sampler import InProcessSampler
from sparring.learning.advantages import group_relative
from sparring.learning.optimizers import NamedOptimizer
from sparring.learning.settings import LossSettings, OptimizerSettings
from sparring.learning.step import learner_step
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest
from sparring.types import Experience, Reply, SamplingSettings, TurnId


def experience(policy: CausalLM, prompt: tuple[int, ...], reply: Reply, number: int, advantage: float) -> Experience:
    nothing, count = (0.0,) * len(prompt), len(reply.token_ids)
    return Experience(
        source=TurnId(episode=number, agent="a00", tick=0), policy=policy.name, team="blue", version=reply.version,
        sampling=SamplingSettings(), token_ids=prompt + reply.token_ids,
        loss_mask=(False,) * len(prompt) + (True,) * count, behaviour_log_probs=nothing + reply.log_probs,
        advantages=nothing + (advantage,) * count, weights=nothing + (1.0,) * count,
    )  # fmt: skip


class Ours:
    """A step of ours, with the seconds of its parts."""

    def __init__(self, model: str, prompt: int, new: int, group: int) -> None:
        self.budget = group * (prompt + new)  # the whole group in one micro-batch
        self.policy = models.load(model, name="shared", micro_batch_tokens=self.budget)
        self.policy.chat.end_ids = frozenset()  # every reply as long as it may be
        self.sampler = InProcessSampler(self.policy)
        settings = OptimizerSettings(learning_rate=1e-6)
        self.optimizer = NamedOptimizer(
            self.policy.trainable_parameters(), self.policy.matrix_names(), settings, seed=0
        )
        self.optimizer_seconds = 0.0
        real = self.optimizer.step

        def timed() -> None:
            begin = time.perf_counter()
            real()
            self.optimizer_seconds = time.perf_counter() - begin

        self.optimizer.step = timed  # type: ignore[method-assign]
        self.sampling = SamplingSettings(max_new_tokens=new)
        self.group, self.number = group, 0
        self.prompt = token_words(random.Random(0), prompt, int(self.policy.core.config.vocab_size))

    def step(self) -> dict[str, float]:
        begin = time.perf_counter()
        self.number += 1
        asked = [SampleRequest(prompt_ids=self.prompt, key=(self.number, i)) for i in range(self.group)]
        replies = self.sampler.sample(asked, self.sampling)
        sampled = time.perf_counter()
        advantages = group_relative([float(i % 2) for i in range(self.group)])
        batch = [
            experience(self.policy, self.prompt, reply, i, a)
            for i, (reply, a) in enumerate(zip(replies, advantages, strict=True))
        ]
        report = learner_step(
            self.policy, batch, LossSettings(micro_batch_tokens=self.budget), self.optimizer,
            bad_batch_dir=Path(tempfile.gettempdir()),
        )  # fmt: skip
        assert report.skipped is None and report.graded_tokens == self.group * self.sampling.max_new_tokens
        end = time.perf_counter()
        return {
            "whole": end - begin, "rollout": sampled - begin, "gradients": end - sampled - self.optimizer_seconds,
            "optimizer": self.optimizer_seconds, "forwarded": report.forwarded_tokens,
        }  # fmt: skip


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(chosen.threads)
    theirs = None
    if not chosen.only_ours:
        directory = models.resolve(chosen.model)
        theirs = Rival(
            "rival_trl.py", "--model", directory, "--prompt", str(chosen.prompt), "--new", str(chosen.new), "--group",
            str(chosen.group), "--threads", str(chosen.threads),
        )  # fmt: skip
    ours = Ours(chosen.model, chosen.prompt, chosen.new, chosen.group)
    mine, other = [], []
    for repeat in range(chosen.repeats + 1):  # the first is warm-up on both sides
        mine.append(ours.step())
        print(f"ours {repeat}: {mine[-1]}", flush=True)
        if theirs is not None:
            other.append(theirs.ask())
            print(f"TRL  {repeat}: {other[-1]}", flush=True)
    mine, other = mine[1:], other[1:]
    result: dict[str, Any] = {
        "name": f"grpo_step {chosen.prompt}/{chosen.new}/{chosen.group}",
        "ours": {part: summary([row[part] for row in mine]) for part in ("whole", "rollout", "gradients", "optimizer")},
        "forwarded_positions": mine[-1]["forwarded"],
        "row_positions": chosen.group * (chosen.prompt + chosen.new - 1),
        "peak_rss": peak_rss(),
        "settings": {"model": chosen.model, "dtype": "float32", "gate": "off", "gradient_checkpointing": False},
        "versions": machine("torch", "transformers"),
    }
    if theirs is not None:
        parts = ("whole", "rollout", "gradients")
        result["theirs"] = {part: summary([row[part] for row in other]) for part in parts}
        result["ratio"] = {part: ratio([r[part] for r in other], [r[part] for r in mine]) for part in parts}
        result["peak_rss_theirs"] = other[-1]["peak_rss"]
        result["peak_rss_share"] = round(result["peak_rss"] / other[-1]["peak_rss"], 3)
        result["versions"] |= {"trl": theirs.about["trl"]}
        result["prompt_tokens_theirs"] = theirs.about["prompt_tokens"]
        theirs.close()
        document(f"grpo_step {chosen.prompt}/{chosen.new}/{chosen.group}", table(result))
    return result


def table(result: dict[str, Any]) -> str:
    """Seconds by phase, for the docs."""
    lines = ["| seconds (median) | ours | TRL | times faster (least to greatest) |", "|---|---|---|---|"]
    for part in ("rollout", "gradients", "whole"):
        mine, other, r = result["ours"][part], result["theirs"][part], result["ratio"][part]
        lines.append(
            f"| {part} | {mine['median']:.2f} | {other['median']:.2f} | {r['value']:.2f} ({r['least']:.2f} to "
            f"{r['greatest']:.2f}), n = {r['n']} |"
        )
    peaks = [result[key] / 2**30 for key in ("peak_rss", "peak_rss_theirs")]
    lines.append(f"| peak memory, GiB | {peaks[0]:.2f} | {peaks[1]:.2f} | {result['peak_rss_share']:.2f} of TRL's |")
    lines.append(f"| positions forward | {result['forwarded_positions']} | {result['row_positions']} | |")
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    return "\n".join([*lines, "", f"{versions}."])


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only-ours", action="store_true", help="without TRL")
    write(measure(parser.parse_args()))


if __name__ == "__main__":
    from sparring.cli import restart_with_allocator

    restart_with_allocator()
    main()
