"""TRL's GRPOTrainer, one step at a time: run by ``grpo_step.py`` in ``.venv-bench``; it prints JSON lines.

The same model, lengths, group, threads and allocator as ours; fp32; gradient checkpointing off; one micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from importlib.metadata import version
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


class Steps(TrainerCallback):
    """Waits for a line before each step, and reports after it."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.seconds: dict[str, float] = {}

    def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
        if not sys.stdin.readline():
            raise SystemExit
        self.begin, self.seconds = time.perf_counter(), {}

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        whole = time.perf_counter() - self.begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        gradients = self.seconds["training_step"] - self.seconds["rollout"]
        say({"whole": whole, "rollout": self.seconds["rollout"], "gradients": gradients, "peak_rss": peak})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32)
    text = tokenizer.decode([5000 + 7 * i for i in range(chosen.prompt)])
    while len(tokenizer(text, add_special_tokens=False).input_ids) > chosen.prompt:
        text = text[:-1]
    steps = Steps()
    config = GRPOConfig(
        output_dir="/tmp/sparring-bench-trl", per_device_train_batch_size=chosen.group, num_generations=chosen.group,
        gradient_accumulation_steps=1, max_completion_length=chosen.new, max_steps=1000, temperature=1.0, beta=0.0,
        learning_rate=1e-6, bf16=False, fp16=False, use_cpu=True, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0, dataloader_num_workers=0,
        generation_kwargs={"min_new_tokens": chosen.new},
    )  # fmt: skip

    def reward(completions: list[str], **other: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [text] * 2000}), callbacks=[steps],
    )  # fmt: skip

    def timed(name: str, label: str) -> None:
        real = getattr(trainer, name)

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return real(*arguments, **keywords)
            finally:
                steps.seconds[label] = steps.seconds.get(label, 0.0) + time.perf_counter() - begin

        setattr(trainer, name, wrapped)

    timed("_prepare_inputs", "rollout")
    timed("training_step", "training_step")
    say({
        "trl": version("trl"), "transformers": version("transformers"), "torch": version("torch"),
        "prompt_tokens": len(tokenizer(text, add_special_tokens=False).input_ids),
    })  # fmt: skip
    trainer.train()


main()
