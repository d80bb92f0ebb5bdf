"""One round of self-play with SmolLM2 (8 generator prompts x 4, 8 answerer tasks x 4, two learner steps each), beside the
same round as the published system makes it: phases of TRL's GRPOTrainer in turns, each of which loads the model from disk,
makes two steps and saves it, with a sampling pass over the generator's prompts (and its own load) between them.

Both: SmolLM2-135M-Instruct in fp32 on all weights, AdamW, the same numbers of prompts and replies, every reply as long as it
may be, the same threads and allocator settings, gate off. Neither side judges difficulty (that would be 8 attempts a valid task).

Usage: python benchmarks/selfplay_round.py [--prompt 300] [--generator-new 128] [--answerer-new 48] [--repeats 3]
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

from common import Rival, machine, peak_rss, ratio, summary, token_words, write

from sparring import models
from sparring.inference.sampler import InProcessSampler
from sparring.learning.advantages import BaselineState, credit
from sparring.learning.batch import to_experiences
from sparring.learning.gate import Gate
from sparring.learning.optimizers import NamedOptimizer
from sparring.learning.settings import AdvantageSettings, GateSettings, LossSettings, OptimizerSettings
from sparring.learning.step import learner_step
from sparring.policies.contract import SampleRequest
from sparring.types import Outcome, Reward, SamplingSettings, Settlement, Turn, TurnId

PROMPTS, SAMPLES, STEPS = 8, 4, 2


class Ours:
    """The resident policy with its sampler, gate and optimiser: the parts of ``loops/selfplay.py`` in its order."""

    def __init__(self, model: str, prompt: int) -> None:
        self.policy = models.load(model, name="shared", micro_batch_tokens=1 << 14)
        self.policy.chat.end_ids = frozenset()  # every reply as long as it may be
        self.sampler = InProcessSampler(self.policy)
        settings = OptimizerSettings(learning_rate=1e-6)
        self.optimizer = NamedOptimizer(
            self.policy.trainable_parameters(), self.policy.matrix_names(), settings, seed=0
        )
        self.gate, self.baselines, self.tick = Gate(GateSettings(mode="off"), seed=0), BaselineState(), 0
        vocabulary = int(self.policy.core.config.vocab_size)
        self.prompts = [token_words(random.Random(number), prompt, vocabulary) for number in range(PROMPTS)]

    def phase(self, team: str, new: int) -> None:
        sampling = SamplingSettings(max_new_tokens=new)
        for _ in range(STEPS):
            self.tick += 1
            asked = [
                SampleRequest(prompt_ids=ids, key=(self.tick, number, sample))
                for number, ids in enumerate(self.prompts)
                for sample in range(SAMPLES)
            ]
            settled = []
            for place, (request, reply) in enumerate(zip(asked, self.sampler.sample(asked, sampling), strict=True)):
                turn_id = TurnId(episode=self.tick, agent=f"{place // SAMPLES}-{place % SAMPLES}", tick=0)
                turn = Turn(
                    id=turn_id, team=team, policy="shared", version=reply.version, sampling=sampling,
                    prompt_ids=request.prompt_ids, reply_ids=reply.token_ids, log_probs=reply.log_probs, action=None,
                )  # fmt: skip
                outcome = Outcome(turn=turn_id, facts=None, settled_at=self.tick)
                settled.append(Settlement(turn=turn, outcome=outcome, reward=Reward(total=float(place % 2))))
            groups = {s.turn.id: s.turn.id.agent.partition("-")[0] for s in settled}
            chosen = AdvantageSettings(kind="group", scale="none")
            credits, self.baselines = credit(settled, chosen, self.baselines, groups=groups)
            decision = self.gate.weigh(credits.turns)
            report = learner_step(
                self.policy, to_experiences(decision.turns, policy="shared"), LossSettings(), self.optimizer,
                bad_batch_dir=Path(tempfile.gettempdir()),
            )  # fmt: skip
            assert report.skipped is None and report.graded_tokens == PROMPTS * SAMPLES * new

    def round(self, generator_new: int, answerer_new: int) -> dict[str, float]:
        begin = time.perf_counter()
        self.phase("generator", generator_new)
        generated = time.perf_counter()
        self.phase("answerer", answerer_new)
        end = time.perf_counter()
        return {"whole": end - begin, "generator": generated - begin, "answerer": end - generated}


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(chosen.threads)
    theirs = None
    if not chosen.only_ours:
        theirs = Rival(
            "rival_trl_phases.py", "--model", models.resolve(chosen.model), "--prompt", str(chosen.prompt),
            "--generator-new", str(chosen.generator_new), "--answerer-new", str(chosen.answerer_new),
            "--threads", str(chosen.threads), "--prompts", str(PROMPTS), "--samples", str(SAMPLES), "--steps", str(STEPS),
        )  # fmt: skip
    ours = Ours(chosen.model, chosen.prompt)
    mine, other = [], []
    for repeat in range(chosen.repeats + 1):  # the first is warm-up on both sides
        mine.append(ours.round(chosen.generator_new, chosen.answerer_new))
        print(f"ours {repeat}: {mine[-1]}", flush=True)
        if theirs is not None:
            other.append(theirs.ask())
            print(f"TRL  {repeat}: {other[-1]}", flush=True)
    mine, other = mine[1:], other[1:]
    result: dict[str, Any] = {
        "name": "selfplay_round",
        "ours": {part: summary([row[part] for row in mine]) for part in ("whole", "generator", "answerer")},
        "peak_rss": peak_rss(),
        "settings": {
            "model": chosen.model, "dtype": "float32", "gate": "off", "prompt": chosen.prompt,
            "generator_new": chosen.generator_new, "answerer_new": chosen.answerer_new,
        },
        "n": chosen.repeats,
        "versions": machine("torch", "transformers"),
    }  # fmt: skip
    if theirs is not None:
        parts = ("whole", "generator", "sampling", "answerer")
        result["theirs"] = {part: summary([row[part] for row in other]) for part in parts}
        result["ratio"] = ratio([row["whole"] for row in other], [row["whole"] for row in mine])
        result["versions"] |= {"trl": theirs.about["trl"]}
        theirs.close()
    return result


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of each prompt")
    parser.add_argument("--generator-new", type=int, default=128)
    parser.add_argument("--answerer-new", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only-ours", action="store_true", help="without TRL")
    write(measure(parser.parse_args()))


if __name__ == "__main__":
    from sparring.cli import restart_with_allocator

    restart_with_allocator()
    main()
