"""A supervised start: a model copies scripted bots, or a file of chats, until it plays valid actions.

Read ``warmup`` from top to bottom. The prompts are those of ``rollout``, to the token; of a reply every token is learned,
its end included, and nothing else is. What comes out is a Hugging Face directory for ``train shared --model``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch

from sparring import models
from sparring.agents.agent import action_json, parse_action, prompt_messages
from sparring.config import WarmupConfig
from sparring.envs.contract import Bot, Env
from sparring.envs.load import load_env
from sparring.errors import ConfigError, PromptError, nearest
from sparring.files import write_atomic
from sparring.inference.sampler import InProcessSampler
from sparring.learning.settings import SMALL_MODEL, OptimizerSettings
from sparring.learning.supervised import reply_row, supervised_epochs
from sparring.loops.rollout import Stopwatch, Table, open_table, prompt_ids
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import SampleRequest, ScoreRow
from sparring.runs import lora_settings
from sparring.tokens.chat import ChatMessage
from sparring.types import ParseFailure, SamplingSettings, Seat, StepReport

HELD_OUT = 32
"""Replies, of episodes or chats that are not learned from, whose loss is measured."""
VALIDITY_PROMPTS = 64
"""Prompts of fresh bot play that the warmed-up model answers."""
LEAST_EPISODES = 12
"""Episodes of bot play that the examples are drawn from, however few they are."""
WARMUP_SHARE = 0.1
"""Of the steps, over which the learning rate rises; from there it falls to 0 at the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupReport:
    """What a warm-up came to; ``warmup.json`` beside the model."""

    out: str
    model: str
    source: str
    """Whose replies were learned."""
    adapters: str
    examples: int
    epochs: int
    steps: int
    batch_size: int
    learning_rate: float
    reply_tokens: int
    """Learned, over one epoch."""
    held_out: int
    held_out_loss_before: float | None
    """Cross-entropy of held-out replies, nats a token; None without any."""
    held_out_loss_after: float | None
    valid_share: float | None
    """Of replies sampled on fresh prompts of bot play, those read as an action; None without bots."""
    valid_prompts: int
    failures: Mapping[str, int]
    """Replies that were no action, by kind."""
    training_seconds: float
    seconds: float
    notices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    """The settings that were left to the size of the model."""

    examples: int
    batch_size: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Example:
    """One reply of a bot: the prompt as ``rollout`` makes it, and what the bot said."""

    prompt_ids: tuple[int, ...]
    messages: tuple[ChatMessage, ...]
    reply: str


def warmup(config: WarmupConfig) -> WarmupReport:
    """Trains the model on replies and writes it to ``config.out``, whole or not at all.

    With adapters the directory holds the model with the adapter merged in, and the adapter alone in ``adapter/``.

    Raises:
        ConfigError, ModelError, EnvError: Before anything is trained; errors in a file of chats name its line.
        TrainingError: Loss or gradient was not finite.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    watch = Stopwatch()
    out = models.free_directory(config.out)
    lora = lora_settings(config.lora) if config.adapters == "shared" else None
    policy: CausalLM = models.load(
        config.model, name="warmup", device=config.device, seed=config.seed, lora=lora,
        micro_batch_tokens=config.micro_batch_tokens,
    )  # fmt: skip
    chosen = _by_size(config, policy)
    env = load_env(config.env, rules=config.rules, settings=config.env_settings)
    notices = list(policy.chat.notices)

    # What is learned, what is held out, and the prompts that are answered at the end.
    if config.chats is not None:
        learned, held_out = _from_chats(config.chats, policy, limit=config.examples, seed=config.seed)
        source, questions = str(config.chats), list[_Example]()
        if getattr(env, "bots", None):
            questions = _drawn(
                bot_play(policy, env, config, first_episode=0), VALIDITY_PROMPTS, LEAST_EPISODES, config.seed
            )
    else:
        source = f"bots of {env.name}"
        play = bot_play(policy, env, config, first_episode=0)
        learned = [_row(policy, example) for example in _drawn(play, chosen.examples, LEAST_EPISODES, config.seed)]
        questions = _drawn(play, VALIDITY_PROMPTS, LEAST_EPISODES // 2, config.seed)  # of the episodes that follow
        held_out = [_row(policy, example) for example in questions[:HELD_OUT]]
    if not held_out:
        notices.append("nothing was held out: the file has a single chat, so there is no held-out loss")

    before = _loss(policy, held_out)
    total = config.epochs * -(-len(learned) // chosen.batch_size)
    optimizer = OptimizerSettings(
        learning_rate=chosen.learning_rate, warmup_steps=int(WARMUP_SHARE * total), decay_steps=total
    )
    with _progress(quiet=config.quiet) as progress:
        training = Stopwatch()
        steps = supervised_epochs(
            policy, learned, optimizer=optimizer, epochs=config.epochs, batch_size=chosen.batch_size, seed=config.seed,
            bad_batch_dir=out.parent / f"{out.name}-bad-batches", micro_batch_tokens=config.micro_batch_tokens,
            report=progress,
        )  # fmt: skip
        training_seconds = training.seconds()
    after = _loss(policy, held_out)
    share, failures = _valid_share(policy, env, questions, config.seed)
    report = WarmupReport(
        out=str(out), model=config.model, source=source, adapters=config.adapters, examples=len(learned),
        epochs=config.epochs, steps=len(steps), batch_size=chosen.batch_size, learning_rate=chosen.learning_rate,
        reply_tokens=sum(len(row.positions) for row in learned), held_out=len(held_out), held_out_loss_before=before,
        held_out_loss_after=after, valid_share=share, valid_prompts=len(questions), failures=failures,
        training_seconds=training_seconds, seconds=watch.seconds(), notices=tuple(notices),
    )  # fmt: skip

    def save(work: Path) -> None:
        policy.save_model(work)
        if config.adapters == "shared":
            policy.save_adapter(work / "adapter")
        write_atomic(work / "warmup.json", msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")

    models.write_beside(out, save)
    return replace(report, seconds=watch.seconds())


def _by_size(config: WarmupConfig, policy: CausalLM) -> _Chosen:
    """Settings that are not given follow from the model's size: a small model needs thousands of examples and takes
    them in a minute or two; a pretrained one of a hundred million needs hundreds, and takes them in minutes on a CPU."""
    small = policy.parameter_count < SMALL_MODEL
    rate = 1e-3 if small else 2e-4
    if config.adapters == "shared":
        rate = 2e-3 if small else 1e-3
    return _Chosen(
        examples=config.examples or (8000 if small else 400),
        batch_size=config.batch_size or (32 if small else 4),
        learning_rate=config.learning_rate or rate,
    )


# -------------------------------------------------------------------------------------------------------- bot play


def bot_play(policy: CausalLM, env: Env, config: WarmupConfig, *, first_episode: int) -> Iterator[tuple[int, _Example]]:
    """(number of the episode, example) of every decision of bots, episode after episode, without end.

    Each decision is a bot's of the environment's ``demonstrators`` (by team: bots with shares), else any of its ``bots``.

    Raises:
        ConfigError: It has neither, or they name a bot or team that is not there.
    """
    casts = _casts(env)
    seed = (config.seed + 10_000_000) % 2**63  # other worlds than those of a training run of the same seed
    settings = SamplingSettings()
    episode = first_episode
    while True:
        table = open_table(env, number=0, episode=episode, seed=seed, agents_per_team=config.agents_per_team)
        done = False
        while not done and (observations := env.observe()):
            actions: dict[str, object] = {}
            for seat in table.seats:
                if seat.agent not in observations:
                    continue
                observation = observations[seat.agent]
                rng = Random(f"{seed}/{episode}/{seat.agent}/{table.tick}")
                bots, shares = casts[seat.team]
                action = rng.choices(bots, shares)[0](observation, rng)
                actions[seat.agent] = action
                yield episode, _Example(
                    prompt_ids=prompt_ids(policy, table, seat, observation, settings),
                    messages=_messages(table, seat, observation), reply=action_json(action),
                )  # fmt: skip
            done = env.step(actions).done
            table.tick += 1
        episode += 1


def _messages(table: Table, seat: Seat, observation: object) -> tuple[ChatMessage, ...]:
    env = table.env
    return prompt_messages(
        rules=env.rules, team_text=env.team_rules[seat.team], persona=table.personas[seat.agent],
        parts=env.render(observation),
    )  # fmt: skip


def _casts(env: Env) -> dict[str, tuple[list[Bot], list[float]]]:
    """By team: whose play is copied, and in which shares."""
    bots: Mapping[str, Bot] = getattr(env, "bots", None) or {}
    shown: Mapping[str, Sequence[tuple[str, float]]] | None = getattr(env, "demonstrators", None)
    if not bots:
        raise ConfigError(f"{env.name} has no bots to copy: give it `bots`, or learn from a file with --chats")
    if shown is None:
        return {team: (list(bots.values()), [1.0] * len(bots)) for team in env.teams}
    casts = {}
    for team in env.teams:
        if not shown.get(team):
            raise ConfigError(f"demonstrators of {env.name} leave out team {team!r}{nearest(team, shown)}")
        for name, share in shown[team]:
            if name not in bots or not share > 0.0:
                raise ConfigError(
                    f"demonstrators of {env.name}: no bot {name!r} with a share above 0{nearest(name, bots)}"
                )
        casts[team] = ([bots[name] for name, _ in shown[team]], [share for _, share in shown[team]])
    return casts


def _drawn(play: Iterator[tuple[int, _Example]], count: int, episodes: int, seed: int) -> list[_Example]:
    """``count`` examples at random from at least so many whole episodes of a play that goes on."""
    found: list[_Example] = []
    begun: set[int] = set()
    for episode, example in play:
        # The first example of the episode after the last one is dropped: the play goes on in an episode not drawn from.
        if episode not in begun and len(begun) >= episodes and len(found) >= count:
            break
        begun.add(episode)
        found.append(example)
    Random(f"{seed}/examples").shuffle(found)
    return found[:count]


def _row(policy: CausalLM, example: _Example) -> ScoreRow:
    """The prompt that was played with, then the reply's ids, its end included; nothing but the reply is learned."""
    _, reply = policy.chat.supervised(example.messages, example.reply)
    return reply_row(example.prompt_ids, reply)


# ----------------------------------------------------------------------------------------------------------- chats


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class _Chat(msgspec.Struct, frozen=True):
    messages: list[_Message]


def _from_chats(file: Path, policy: CausalLM, *, limit: int | None, seed: int) -> tuple[list[ScoreRow], list[ScoreRow]]:
    """Rows of every assistant's message in a JSONL of chats: (learned, held out); chats are held out whole."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"chats: cannot read {file}: {error.strerror or error}") from error
    decoder = msgspec.json.Decoder(_Chat)
    chats: list[list[ScoreRow]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            chats.append(_chat_rows(decoder.decode(line), policy))
        except (msgspec.DecodeError, UnicodeDecodeError, PromptError, ConfigError) as error:
            raise ConfigError(f"{file}:{number}: {error}") from error
    if not chats:
        raise ConfigError(
            f'{file} holds no chats: one a line, as in {{"messages": [{{"role": "user", "content": "Hi"}}, ...]}}'
        )
    Random(f"{seed}/chats").shuffle(chats)
    aside = min(len(chats) - 1, max(1, min(HELD_OUT, len(chats) // 10)))
    held_out = [row for chat in chats[:aside] for row in chat]
    learned = [row for chat in chats[aside:] for row in chat]
    return learned[:limit], held_out


def _chat_rows(chat: _Chat, policy: CausalLM) -> list[ScoreRow]:
    """A row for each message of the assistant's, on all that came before it (the oldest dropped where too long)."""
    messages = [ChatMessage(message.role, message.content) for message in chat.messages]
    limit = policy.core.context_length or 1_000_000
    rows = []
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        if place == 0:
            raise ConfigError("the chat begins with the assistant: there is nothing that it replies to")
        _, reply = policy.chat.supervised(messages[:place], message.content)
        prompt = policy.chat.fit(messages[:place], limit - len(reply))
        rows.append(reply_row(prompt.token_ids, reply))
    if not rows:
        raise ConfigError("no message with role 'assistant': there is nothing to learn")
    return rows


# ------------------------------------------------------------------------------------------------------- measuring


def _loss(policy: CausalLM, rows: Sequence[ScoreRow]) -> float | None:
    """Mean cross-entropy of the rows' replies, nats a token."""
    if not rows:
        return None
    with torch.no_grad():
        return -float(policy.log_probs(rows, temperature=1.0).double().mean())


def _valid_share(
    policy: CausalLM, env: Env, questions: Sequence[_Example], seed: int
) -> tuple[float | None, dict[str, int]]:
    """Share of sampled replies that are an action, as ``rollout`` reads them, and what was wrong with the others."""
    if not questions:
        return None, {}
    requests = [SampleRequest(prompt_ids=q.prompt_ids, key=(seed, number)) for number, q in enumerate(questions)]
    failures: Counter[str] = Counter()
    for reply in InProcessSampler(policy).sample(requests, SamplingSettings()):
        action = parse_action(
            policy.chat.decode(reply.token_ids), env.action_type, truncated=reply.truncated,
            thinking_opened=policy.chat.thinking_opened,
        )  # fmt: skip
        if isinstance(action, ParseFailure):
            failures[action.kind.value] += 1
    return 1 - failures.total() / len(questions), dict(failures)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    """Shows each step on standard error: a bar on a terminal, a line now and then elsewhere."""
    if quiet:
        yield lambda step, total: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("warm-up"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=None, loss="")

            def advance(step: StepReport, total: int) -> None:
                bar.update(task, total=total, advance=1, loss=f"loss {step.loss:.3f}")

            yield advance
    else:
        done, watch = 0, Stopwatch()

        def line(step: StepReport, total: int) -> None:
            nonlocal done
            done += 1
            if done % max(1, total // 20) == 0 or done == total:
                print(
                    f"warm-up: step {done}/{total}  loss {step.loss:.3f}  {watch.seconds():.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

        yield line
