"""Token reversal: the experiment of the delightful gradient's papers (arXiv 2603.14608, 2603.20526) on our own learner.

A prompt of H random tokens, an answer of H tokens, reward = share of positions that hold the reversed prompt. A small
decoder from random weights; in each step 10 prompts with 10 samples each, advantages against the mean of the prompt's
samples, one step of Adam. Methods:

- ``pg``: REINFORCE over all tokens; ``ppo``: two clipped steps on each batch; ``filter``: what others already do, samples
  without advantage are left out (same gradient as ``pg``, fewer rows);
- ``dg``: every token weighted by sigmoid(delight); ``dgk_R``: the Kondo gate at R percent, a quantile of delight.

All go through ``credit``, ``Gate``, ``to_experiences`` and ``learner_step``, as a run does. The error is 1 - mean reward of
the freshly sampled batch, over the last 20 steps; seconds cover sampling and learning, methods taking turns step by step.

Usage: python recipes/token_reversal.py [--seeds 5] [--steps 1000] [--length 10] [--tokens 2] [--json] [--docs]
``--docs`` writes the table and the figure into docs/. With ``--json`` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

from sparring.learning.advantages import BaselineState, credit
from sparring.learning.batch import to_experiences
from sparring.learning.gate import Gate, GatedTurn
from sparring.learning.optimizers import NamedOptimizer
from sparring.learning.settings import AdvantageSettings, GateSettings, LossSettings, OptimizerSettings
from sparring.learning.step import learner_step
from sparring.policies.contract import ScoreRow
from sparring.types import Outcome, PolicyVersion, Reward, SamplingSettings, Settlement, Turn, TurnId

DOCS = Path(__file__).parent.parent / "docs"
PROMPTS, SAMPLES, WINDOW = 10, 10, 20
COLD = {"warmup_replies": 0, "sign_split": False, "keep_violations": False}
GATES: dict[str, GateSettings | None] = {
    "pg": None,
    "ppo": None,
    "filter": GateSettings(mode="off", **COLD),
    "dg": GateSettings(mode="delight", **COLD),
    "dgk_50": GateSettings(rate=0.50, **COLD),
    "dgk_30": GateSettings(rate=0.30, **COLD),
    "dgk_10": GateSettings(rate=0.10, **COLD),
    "dgk_3": GateSettings(rate=0.03, **COLD),
}
"""None: no gate, every token with weight 1."""


# --------------------------------------------------------------------------------------------------------- the policy


class Block(nn.Module):
    """Pre-LayerNorm attention and MLP, no biases. x (N, T, D); past keys and values (N, heads, P, D / heads)."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.mix, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, past: list[Tensor] | None) -> Tensor:
        count, length, width = x.shape
        split = self.mix(self.norm_1(x)).view(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split[0], split[1], split[2]
        if past is not None:
            if past:
                key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
            past[:] = [key, value]
        seen = scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, width))
        hidden: Tensor = x + self.down(relu(self.up(self.norm_2(x))))
        return hidden


class Reverser(nn.Module):
    """The papers' decoder (3 blocks, width 64, 4 heads, no final norm), as a ``TrainablePolicy``."""

    def __init__(self, length: int, tokens: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.name, self.version, self.length = "shared", PolicyVersion(incarnation=1, step=0), length
        self.embed, self.place = nn.Embedding(tokens, 64), nn.Embedding(2 * length, 64)
        self.blocks = nn.ModuleList(Block(64, 4, 128) for _ in range(3))
        self.head = nn.Linear(64, tokens, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=1.0 / math.sqrt(parameter.shape[1]))

    def logits(self, ids: Tensor, start: int = 0, past: list[list[Tensor]] | None = None) -> Tensor:
        """(N, T, M) from ids (N, T) that begin at position ``start``."""
        x = self.embed(ids) + self.place(torch.arange(start, start + ids.shape[1]))
        for number, block in enumerate(self.blocks):
            x = block(x, None if past is None else past[number])
        found: Tensor = self.head(x)
        return found

    @torch.inference_mode()
    def sample(self, prompts: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Answers (N, H) and their log-probs (N, H), at temperature 1."""
        past: list[list[Tensor]] = [[] for _ in self.blocks]
        logits = self.logits(prompts, 0, past)[:, -1]
        tokens, values = [], []
        for step in range(self.length):
            log_probs = logits.log_softmax(dim=-1)
            chosen = torch.multinomial(log_probs.exp(), 1, generator=draw)
            tokens.append(chosen)
            values.append(log_probs.gather(1, chosen))
            if step + 1 < self.length:
                logits = self.logits(chosen, self.length + step, past)[:, -1]
        return torch.cat(tokens, dim=1), torch.cat(values, dim=1)

    def log_probs(self, rows: Sequence[ScoreRow], *, temperature: float, top_p: float = 1.0) -> Tensor:
        heads = [row.token_ids[: row.positions[-1]] for row in rows]
        ids = torch.zeros((len(rows), max(map(len, heads))), dtype=torch.int64)
        for number, head in enumerate(heads):
            ids[number, : len(head)] = torch.tensor(head)
        where = torch.tensor([(n, p - 1) for n, row in enumerate(rows) for p in row.positions]).T
        wanted = torch.tensor([row.token_ids[p] for row in rows for p in row.positions])
        scores = (self.logits(ids)[where[0], where[1]] / temperature).log_softmax(dim=-1)
        return scores.gather(1, wanted.unsqueeze(1)).squeeze(1)

    @property
    def shares_prefixes(self) -> bool:
        return False

    def positions(self, rows: Sequence[ScoreRow]) -> int:
        return sum(row.positions[-1] for row in rows)

    def reference_log_probs(self, rows: Sequence[ScoreRow], *, temperature: float) -> Tensor:
        raise NotImplementedError("there is no KL term here")

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def matrix_names(self) -> list[str]:
        return []


# -------------------------------------------------------------------------------------------------------- the methods


@dataclass
class Trial:
    """One method from one seed, and what it has come to after each step."""

    method: str
    seed: int
    length: int
    tokens: int
    errors: list[float] = field(default_factory=list)
    graded: list[int] = field(default_factory=list)
    """Tokens that reached the backward pass, so far."""
    forwarded: list[int] = field(default_factory=list)
    """Positions that the learner ran forward, so far."""
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = Reverser(self.length, self.tokens, self.seed)
        settings = OptimizerSettings(learning_rate=3e-4, max_grad_norm=None)
        self.optimizer = NamedOptimizer(self.policy.trainable_parameters(), [], settings, seed=self.seed)
        gate = GATES[self.method]
        self.gate = None if gate is None else Gate(gate, seed=self.seed)
        self.draw = torch.Generator().manual_seed(self.seed)
        self.loss = LossSettings(kind="clipped" if self.method == "ppo" else "policy_gradient")

    def step(self) -> None:
        begin = time.perf_counter()
        prompts = torch.randint(self.tokens, (PROMPTS, self.length), generator=self.draw)
        prompts = prompts.repeat_interleave(SAMPLES, dim=0)
        answers, log_probs = self.policy.sample(prompts, self.draw)
        rewards = (answers == prompts.flip(1)).double().mean(dim=1).tolist()
        rows = zip(prompts.tolist(), answers.tolist(), log_probs.tolist(), rewards, strict=True)
        settled = [self._settlement(number, *row) for number, row in enumerate(rows)]
        groups = {s.turn.id: str(s.turn.id.episode // SAMPLES) for s in settled}
        credits, _ = credit(settled, AdvantageSettings(kind="group", scale="none"), BaselineState(), groups=groups)
        # The papers divide by all tokens, those of prompts whose samples all earned the same among them.
        turns = [replace(turn, counted=True) for turn in credits.turns]
        if self.gate is None:
            ones = (1.0,) * self.length
            gated: Sequence[GatedTurn] = [GatedTurn(credited=turn, weights=ones) for turn in turns]
        else:
            gated = self.gate.weigh(turns).turns
        experiences = to_experiences(gated, policy="shared")
        graded = forwarded = 0
        for _ in range(2 if self.method == "ppo" else 1):
            report = learner_step(
                self.policy, experiences, self.loss, self.optimizer, bad_batch_dir=Path(tempfile.gettempdir())
            )
            graded, forwarded = graded + report.graded_tokens, forwarded + report.forwarded_tokens
        seconds = time.perf_counter() - begin
        self.errors.append(1.0 - mean(rewards))
        for so_far, now in ((self.graded, graded), (self.forwarded, forwarded), (self.seconds, seconds)):
            so_far.append((so_far[-1] if so_far else 0) + now)

    def _settlement(
        self, number: int, prompt: list[int], answer: list[int], log_probs: list[float], reward: float
    ) -> Settlement:
        turn = Turn(
            id=TurnId(episode=number, agent="a00", tick=self.policy.version.step), team="blue", policy="shared",
            version=self.policy.version, sampling=SamplingSettings(), prompt_ids=tuple(prompt), reply_ids=tuple(answer),
            log_probs=tuple(log_probs), action=None,
        )  # fmt: skip
        return Settlement(
            turn=turn, outcome=Outcome(turn=turn.id, facts=None, settled_at=0), reward=Reward(total=reward)
        )

    def smooth(self) -> list[float]:
        """Mean error over the last 20 steps (fewer at the beginning), after each step."""
        sums = [0.0]
        for error in self.errors:
            sums.append(sums[-1] + error)
        return [(sums[i + 1] - sums[max(0, i + 1 - WINDOW)]) / min(i + 1, WINDOW) for i in range(len(self.errors))]


def cost_to_reach(trial: Trial, error: float) -> dict[str, float]:
    """What the method had spent when its smoothed error was first that low; infinite where it never was."""
    found = next((i for i, value in enumerate(trial.smooth()) if i + 1 >= WINDOW and value <= error), None)
    if found is None:
        return dict.fromkeys(("steps", "graded", "forwarded", "seconds"), math.inf)
    return {
        "steps": found + 1,
        "graded": trial.graded[found],
        "forwarded": trial.forwarded[found],
        "seconds": trial.seconds[found],
    }


def paired_difference(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """Mean of ``a - b`` over seeds, with a 95 % bootstrap interval over seeds.

    >>> paired_difference([2.0, 2.0], [1.0, 1.0])
    {'value': 1.0, 'low': 1.0, 'high': 1.0}
    """
    differences = np.array(a) - np.array(b)
    drawn = np.random.default_rng(0).choice(differences, (10_000, len(differences))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {"value": float(differences.mean()), "low": float(low), "high": float(high)}


def compare(trials: dict[str, list[Trial]]) -> dict[str, Any]:
    """The figures of the experiment; ``trials`` by method, seeds in the same order.

    Fractions are of what ``pg`` (or ``filter``) has spent when it reaches the final error of ``pg`` of the same seed;
    medians over seeds.
    """
    final = {method: [trial.smooth()[-1] for trial in own] for method, own in trials.items()}
    targets = final["pg"]
    costs = {m: [cost_to_reach(t, e) for t, e in zip(own, targets, strict=True)] for m, own in trials.items()}
    rows = {}
    for method in trials:
        row: dict[str, float] = {
            "final_error": mean(final[method]),
            "final_error_std": stdev(final[method]) if len(final[method]) > 1 else 0.0,
        }
        for what in ("steps", "graded", "forwarded", "seconds"):
            row[f"{what}_to_pg_error"] = median(cost[what] for cost in costs[method])
            for rival in ("pg", "filter"):
                row[f"{what}_of_{rival}"] = median(
                    a[what] / b[what] if b[what] < math.inf else math.nan
                    for a, b in zip(costs[method], costs[rival], strict=True)
                )
        rows[method] = row
    gated = [method for method in rows if method.startswith("dgk")]
    best = min(gated, key=lambda method: rows[method]["seconds_of_pg"])
    lowest = min(gated, key=lambda method: rows[method]["final_error"])
    worse = paired_difference(final["pg"], final[lowest])
    above = paired_difference(final[lowest], final["dg"])
    return {
        # "Worse or equal": equal is a difference whose interval holds 0.
        "order_holds": worse["low"] > 0.0 and above["high"] >= 0.0,
        "order_of_means": rows["pg"]["final_error"] > rows[lowest]["final_error"] >= rows["dg"]["final_error"],
        "pg_over_dgk": worse,
        "dgk_over_dg": above,
        "best_rate": int(best.removeprefix("dgk_")) / 100,
        "graded_fraction": rows[best]["graded_of_pg"],
        "wall_fraction": rows[best]["seconds_of_pg"],
        "graded_fraction_filter": rows[best]["graded_of_filter"],
        "wall_fraction_filter": rows[best]["seconds_of_filter"],
        "methods": rows,
    }


# --------------------------------------------------------------------------------------------------- table and figure


def table(found: dict[str, Any]) -> str:
    head = (
        "| method | final error | steps | graded tokens | forwarded positions | seconds | graded / PG | wall / PG | "
        "graded / filter | wall / filter |\n|---|---|---|---|---|---|---|---|---|---|\n"
    )
    lines = []
    for method, row in found["methods"].items():
        cells = [f"{row['final_error']:.4f} ± {row['final_error_std']:.4f}"]
        for what in ("steps", "graded", "forwarded", "seconds"):
            cells.append(_number(row[f"{what}_to_pg_error"], "{:,.0f}"))
        for name in ("graded_of_pg", "seconds_of_pg", "graded_of_filter", "seconds_of_filter"):
            cells.append(_number(row[name], "{:.2f}"))
        lines.append(f"| {_label(method)} | " + " | ".join(cells) + " |")
    return head + "\n".join(lines) + "\n"


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "never"


def _between(found: dict[str, float]) -> str:
    return f"{found['value']:+.4f} ({found['low']:+.4f} to {found['high']:+.4f})"


def _label(method: str) -> str:
    names = {"pg": "PG", "ppo": "PPO", "filter": "PG, filtered", "dg": "DG"}
    return names.get(method) or f"DG-K {method.removeprefix('dgk_')} %"


def figure(trials: dict[str, list[Trial]]) -> str:
    """Error (mean over seeds) against steps, graded tokens, forwarded positions and seconds: one SVG, no library."""
    colours = ["#444", "#999", "#1f77b4", "#d62728", "#ff9f1c", "#2ca02c", "#7b2cbf", "#17becf"]
    axes = [
        ("steps", "steps"),
        ("graded", "graded tokens"),
        ("forwarded", "forwarded positions"),
        ("seconds", "seconds"),
    ]
    width, height, pad = 300, 230, 46
    steps = len(trials["pg"][0].errors)
    marks = sorted({round(WINDOW * (steps / WINDOW) ** (i / 60)) - 1 for i in range(61)})
    curves = {m: [mean(t.smooth()[i] for t in own) for i in marks] for m, own in trials.items()}
    low = max(min(min(c) for c in curves.values()), 1e-4)
    high = max(max(c) for c in curves.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width}" height="{2 * height + 40}" '
        'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (what, title) in enumerate(axes):
        left, top = (number % 2) * width + pad, (number // 2) * height + 14
        wide, tall = width - pad - 12, height - pad
        xs = {
            m: [mean(float(getattr(t, what)[i]) if what != "steps" else i + 1.0 for t in own) for i in marks]
            for m, own in trials.items()
        }
        least, most = min(min(x) for x in xs.values()), max(max(x) for x in xs.values())
        parts.append(f'<rect x="{left}" y="{top}" width="{wide}" height="{tall}" fill="none" stroke="#bbb"/>')
        parts.append(f'<text x="{left + wide / 2}" y="{top + tall + 26}" text-anchor="middle">{title} (log)</text>')
        for value in (least, most):
            at = left + wide * (value == most)
            parts.append(f'<text x="{at}" y="{top + tall + 12}" text-anchor="middle">{value:,.3g}</text>')
        for value in (low, high):
            at = top + tall * (value == low)
            parts.append(f'<text x="{left - 4}" y="{at + 3}" text-anchor="end">{value:.3g}</text>')
        for colour, (method, curve) in zip(colours, curves.items(), strict=False):
            points = " ".join(
                f"{left + wide * math.log(x / least) / math.log(most / least):.1f},"
                f"{top + tall * math.log(high / max(y, low)) / math.log(high / low):.1f}"
                for x, y in zip(xs[method], curve, strict=True)
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for number, (colour, method) in enumerate(zip(colours, curves, strict=False)):
        x, y = 12 + number * 73, 2 * height + 24
        parts.append(f'<rect x="{x}" y="{y - 8}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y - 2}">{_label(method)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def document(found: dict[str, Any]) -> str:
    about = found["settings"]
    return (
        "# Token reversal\n\n"
        f"Made by `python recipes/token_reversal.py --seeds {about['seeds']} --steps {about['steps']} --length "
        f"{about['length']} --tokens {about['tokens']} --docs`: {about['seeds']} seeds, answers of {about['length']} tokens "
        f"out of {about['tokens']}, {about['steps']} steps of {PROMPTS} prompts x {SAMPLES} samples. What each method is, and "
        "how the error is taken, stands at the top of the recipe.\n\n"
        "Final error: mean and standard deviation over seeds, after the last step. The other columns: what had been spent when "
        "the method reached the final error of PG with the same seed, median over seeds, and that as a share of what PG, or "
        "PG with samples without advantage left out, spent until the same error.\n\n"
        f"{table(found)}\n![error against steps, graded tokens, forwarded positions and seconds](token_reversal.svg)\n\n"
        f"Order holds (PG worse than the best DG-K, that worse than DG or not to be told from it): **{found['order_holds']}** "
        f"(PG minus DG-K {_between(found['pg_over_dgk'])}, DG-K minus DG {_between(found['dgk_over_dg'])}). Best rate "
        f"{found['best_rate']:.0%}: graded tokens {found['graded_fraction']:.3f} and wall-clock "
        f"{found['wall_fraction']:.3f} of PG; {found['graded_fraction_filter']:.3f} and {found['wall_fraction_filter']:.3f} "
        "of the filter.\n\n"
        "The rates of 30 and 50 % are ours: 50 % was added after single-seed runs in which 10 and 3 % failed, and the best rate "
        "is chosen on the seeds it is reported on, so its fractions are optimistic.\n\n"
        "The model has 0.1 million parameters, so wall-clock here is mostly sampling and Python; where the backward pass "
        "costs more, the share of graded tokens and forwarded positions says more.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2)
    parser.add_argument(
        "--methods", nargs="+", default=list(GATES), choices=list(GATES), help="pg and filter always run"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--docs", action="store_true", help="write docs/token_reversal.md and .svg")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    methods = [method for method in GATES if method in {"pg", "filter", "dg", *chosen.methods}]
    trials: dict[str, list[Trial]] = {method: [] for method in methods}
    for seed in range(chosen.seeds):
        now = {m: Trial(m, seed, chosen.length, chosen.tokens) for m in methods}
        for step in range(chosen.steps):
            for trial in now.values():
                trial.step()
            if (step + 1) % 100 == 0:
                state = ", ".join(f"{m} {t.smooth()[-1]:.3f} {t.seconds[-1]:.0f}s" for m, t in now.items())
                print(f"seed {seed}, step {step + 1}: {state}", flush=True)
        for method, trial in now.items():
            trials[method].append(trial)
    found = compare(trials)
    found["settings"] = {
        "seeds": chosen.seeds, "steps": chosen.steps, "length": chosen.length, "tokens": chosen.tokens,
        "threads": chosen.threads, "torch": torch.__version__,
    }  # fmt: skip
    print(table(found))
    if chosen.docs:
        (DOCS / "token_reversal.md").write_text(document(found), encoding="utf-8")
        (DOCS / "token_reversal.svg").write_text(figure(trials), encoding="utf-8")
    if chosen.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
