"""A round of self-play as phases of TRL's GRPOTrainer: run by ``selfplay_round.py`` in ``.venv-bench``; prints JSON lines.

Each phase loads model and tokenizer from disk, makes its steps and saves; a sampling pass between them loads the model again
and answers all generator prompts in one batch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **other: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def texts(tokenizer: Any, prompt: int, count: int) -> list[str]:
    found = []
    for number in range(count):
        text = tokenizer.decode([5000 + 7 * i + 131 * number for i in range(prompt)])
        while len(tokenizer(text, add_special_tokens=False).input_ids) > prompt:
            text = text[:-1]
        found.append(text)
    return found


def phase(source: str, target: Path, chosen: argparse.Namespace, new: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=str(target / "work"), per_device_train_batch_size=chosen.prompts * chosen.samples,
        num_generations=chosen.samples, gradient_accumulation_steps=1, max_completion_length=new, max_steps=chosen.steps,
        temperature=1.0, beta=0.0, learning_rate=1e-6, bf16=False, fp16=False, use_cpu=True, gradient_checkpointing=False,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
        dataloader_num_workers=0, generation_kwargs={"min_new_tokens": new},
    )  # fmt: skip
    prompts = texts(tokenizer, chosen.prompt, chosen.prompts)
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts * 4}),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(target))
    tokenizer.save_pretrained(str(target))


def sample(source: str, chosen: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    inputs = tokenizer(texts(tokenizer, chosen.prompt, chosen.prompts), return_tensors="pt", padding=True)
    new = chosen.generator_new
    model.generate(**inputs, do_sample=True, max_new_tokens=new, min_new_tokens=new)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("prompt", "generator-new", "answerer-new", "threads", "prompts", "samples", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--model", required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(json.dumps({"trl": version("trl")}), flush=True)
    source = chosen.model
    work = Path(tempfile.mkdtemp(prefix="sparring-bench-"))
    number = 0
    while sys.stdin.readline():
        number += 1
        begin = time.perf_counter()
        phase(source, work / f"{number}-generator", chosen, chosen.generator_new)
        generated = time.perf_counter()
        sample(str(work / f"{number}-generator"), chosen)
        sampled = time.perf_counter()
        phase(str(work / f"{number}-generator"), work / f"{number}-answerer", chosen, chosen.answerer_new)
        end = time.perf_counter()
        source = str(work / f"{number}-answerer")
        shutil.rmtree(work / f"{number}-generator")
        print(json.dumps({
            "whole": end - begin, "generator": generated - begin, "sampling": sampled - generated,
            "answerer": end - sampled,
        }), flush=True)  # fmt: skip


main()
