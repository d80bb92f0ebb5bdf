"""What can be set: one frozen class a command, read from TOML and dotted overrides, written whole into each run.

``load_config(SharedConfig, toml=Path("my.toml"), overrides=["--gate.rate", "0.03"])``. How settings are read and
written is in ``settings_io.py``; what those of learning mean is in ``learning/settings.py``. The environment's own
settings pass through ``env_settings`` unread: the environment checks them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparring.errors import ConfigError, nearest
from sparring.learning.settings import (
    AdvantageSettings,
    GateSettings,
    LossSettings,
    OptimizerSettings,
    PPOSettings,
    check_gate_and_loss,
)
from sparring.settings_io import (
    Option,
    Scalar,
    changed_settings,
    check_types,
    describe,
    flatten,
    from_settings,
    load_config,
    to_toml,
)
from sparring.types import KeyValueSettings, SamplingSettings

__all__ = [
    "CheckEnvConfig",
    "CheckpointSettings",
    "DemoConfig",
    "EvalConfig",
    "ExportConfig",
    "IndependentConfig",
    "LoraSettings",
    "Option",
    "PlayConfig",
    "Scalar",
    "SelfplayConfig",
    "SharedConfig",
    "WarmupConfig",
    "changed_settings",
    "describe",
    "flatten",
    "from_settings",
    "load_config",
    "to_toml",
]

Device = Literal["cpu", "cuda"]
PLAYER_KINDS = ("policy", "bot", "frozen", "openai")
_REWARDS = ("outcome", "classic", "env")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Low-rank adapters, where ``adapters`` asks for them.

    >>> LoraSettings().rank
    16
    """

    rank: int = 16
    """Inner width of each adapter; more learns more and costs more."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least("lora.rank", self.rank, 1)
        above_zero("lora.alpha", self.alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """When the run is saved, and how much is kept.

    >>> CheckpointSettings().every
    25
    """

    every: int = 25
    """Ticks between two checkpoints; the last tick always makes one."""
    keep: int = 5
    """How many of the newest checkpoints stay on disk."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least("checkpoint.every", self.every, 1)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedConfig:
    """``sparring train shared``: many agents in teams learn with one shared model, or with one adapter a team.

    >>> SharedConfig(ticks=3, gate=GateSettings(rate=0.1)).gate.rate
    0.1
    """

    model: str = "tiny"
    """Registered name (`sparring models list`), directory, or Hugging Face name."""
    env: str = "market"
    """Built-in environment, package.module:Class, or the address of `sparring serve market` (http://...)."""
    env_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The environment's own settings, which it checks itself."""
    seed: int = 0
    """One seed is one run, on one machine type and thread count."""
    ticks: int = 100
    """Length of the run; in each tick every agent decides once."""
    worlds: int = 4
    """Environments played side by side."""
    agents_per_team: int = 4
    """Agents of each team in each world."""
    reward: str = "outcome"
    """outcome, classic, env (the environment's own), or package.module:function."""
    rules: Literal["brief", "full"] = "brief"
    """How much of the list of actions every prompt repeats."""
    players: Mapping[str, str] = field(default_factory=dict)
    """Who plays a team: policy (default), bot:NAME, frozen:RUN_OR_MODEL (or RUN#POLICY), openai:URL#MODEL."""
    trainable: tuple[str, ...] = ()
    """Teams that learn; none named means every team that the policy plays."""
    adapters: Literal["none", "shared", "per_team"] = "none"
    """Train all weights, one LoRA adapter, or one adapter for each team."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    kv: KeyValueSettings = field(default_factory=KeyValueSettings)
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    min_batch: int = 16
    """Settled replies of a policy that make a step; fewer wait for the next tick."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    device: Device = "cpu"
    """Where the model runs."""
    threads: int | None = None
    """CPU threads of the computation; none leaves it to PyTorch."""
    run: str | None = None
    """Name of the run's directory under runs/; none makes one from the date."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("ticks", "worlds", "agents_per_team", "min_batch"):
            at_least(name, getattr(self, name), 1)
        check_common(self.seed, self.threads, self.run)
        _reward(self.reward)
        check_sampling(self.sampling)
        _key_values(self.kv)
        check_lora(self.adapters, self.lora)
        for team, player in self.players.items():
            _player(f"players.{team}", player)
        for team in self.trainable:
            player = self.players.get(team, "policy")
            if player != "policy":
                raise ConfigError(f"trainable names {team!r}, but players.{team} is {player!r}: only a policy learns")
        check_gate_and_loss(self.gate, self.loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetSettings:
    """The network of a small policy: actor and critic apart, of the same widths.

    >>> NetSettings().hidden
    (64, 64)
    """

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu"] = "tanh"
    squash: bool = False
    """Continuous actions: squash samples into the bounds by tanh; else cut them off there."""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.hidden or min(self.hidden) < 1:
            raise ConfigError(f"net.hidden is {self.hidden}: give at least one width of 1 or more, as in 64,64")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadySettings:
    """When a policy has enough to learn from.

    >>> ReadySettings().quorum
    1.0
    """

    min_steps: int | None = None
    """Steps of its agents that a policy waits for."""
    trajectories: int | None = None
    """Rollouts that a policy waits for."""
    together: bool = False
    """All policies wait for one another; else each learns as soon as it has enough."""
    quorum: float = 1.0
    """together: share of the policies that suffices."""
    timeout: int | None = None
    """together: after so many iterations with one policy ready, those that are learn without the others."""
    capacity: int = 1 << 20
    """Steps that may wait for one policy; more are refused, and counted."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("min_steps", "trajectories", "timeout", "capacity"):
            if getattr(self, name) is not None:
                at_least(f"ready.{name}", getattr(self, name), 1)
        if not 0.0 < self.quorum <= 1.0:
            raise ConfigError(f"ready.quorum is {self.quorum!r}: give a share above 0 and at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpponentSettings:
    """Frozen past policies as opponents, in environments of two or more agents.

    >>> OpponentSettings().share
    0.0
    """

    share: float = 0.0
    """Share of the episodes in which only one agent is played by the policy that learns, the others by a past one."""
    every: int = 10
    """Iterations between two policies that are kept."""
    keep: int = 20
    """Past policies in the pool, the oldest dropped first; each is drawn equally often."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError(f"opponents.share is {self.share!r}: give a share from 0 to 1")
        at_least("opponents.every", self.every, 1)
        at_least("opponents.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndependentConfig:
    """``sparring train independent``: a small policy for each agent, or for agents alike, by PPO.

    >>> IndependentConfig(env="CartPole-v1").algorithm
    'ippo'
    """

    env: str = "CartPole-v1"
    """Gymnasium's name, pettingzoo:MODULE (#aec for turns), or package.module:Class."""
    env_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """Keywords of the environment's constructor."""
    algorithm: Literal["ippo", "mappo", "reinforce"] = "ippo"
    """PPO with own critics, PPO with critics that see everything, or REINFORCE with a baseline."""
    steps: int = 100_000
    """Length of the run: steps of the environment, over all copies."""
    copies: int = 8
    """Environments side by side."""
    vector: bool = False
    """Take Gymnasium's own vectorised form of the environment."""
    rollout: int = 256
    """Steps of each copy between two updates."""
    share: Literal["none", "spaces"] = "none"
    """Every agent has a policy of its own, or all agents of equal spaces have one."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Policy by agent, where share does not say what is wanted."""
    critic: Literal["joint", "state"] = "joint"
    """mappo: critics see the observations of all agents, or the environment's own state."""
    net: NetSettings = field(default_factory=NetSettings)
    ppo: PPOSettings = field(default_factory=PPOSettings)
    ready: ReadySettings = field(default_factory=ReadySettings)
    opponents: OpponentSettings = field(default_factory=OpponentSettings)
    overlap: bool = False
    """Collect while learning, with weights one update older; off, which learns better, each waits for the other."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    seed: int = 0
    """One seed is one run, on one machine type and thread count."""
    threads: int | None = 1
    """CPU threads of the computation; none leaves it to PyTorch (small networks are fastest with 1)."""
    run: str | None = None
    """Name of the run's directory under runs/; none makes one from the date."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "copies", "rollout"):
            at_least(name, getattr(self, name), 1)
        check_common(self.seed, self.threads, self.run)
        if self.critic == "state" and self.algorithm != "mappo":
            raise ConfigError("critic is 'state', but only algorithm = 'mappo' has a critic that sees more: set it")
        if self.overlap and self.ppo.max_version_lag < 1:
            raise ConfigError("overlap is true, so data are one update old: set ppo.max_version_lag to 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfplayConfig:
    """``sparring train selfplay``: a generator sets tasks on knowledge graphs, an answerer solves them, both learn.

    >>> SelfplayConfig(rounds=2).judge_samples
    8
    """

    model: str = "tiny"
    """Registered name (`sparring models list`), directory, or Hugging Face name."""
    topology: Literal["shared", "dual"] = "shared"
    """One policy for both roles, or one for each."""
    adapters: Literal["none", "lora"] = "none"
    """Train all weights, or a LoRA adapter for each policy."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    world: str = "investigation"
    """investigation, geonames, or metaqa (with world_settings.root)."""
    world_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The world's own settings, which it checks itself."""
    worlds: int = 4
    """Fresh graphs of each round."""
    full: bool = False
    """Prompts with whole instructions, and questions as sentences, for models that were not warmed up on the brief form."""
    access: Literal["context", "tools"] = "context"
    """How the answerer reaches the graph: a shuffled list of edges, or tools over several turns."""
    max_steps: int = 8
    """Turns of an attempt with tools."""
    subagents: int = 0
    """Sub-agents that an attempt with tools may spawn; they look things up at the same time, and are not trained."""
    subagent_steps: int = 4
    """Turns of each sub-agent."""
    context_edges: int = 8
    """Edges that a prompt shows, evidence and distractors together."""
    min_hops: int = 1
    """Shortest path that the generator is asked for."""
    max_hops: int = 3
    """Longest path, at most 6."""
    seed: int = 0
    """One seed is one run, on one machine type and thread count."""
    rounds: int = 4
    """Generator and answerer learn in turns; each round has fresh graphs."""
    schedule: Literal["generator_answerer", "answerer_generator_answerer"] = "generator_answerer"
    """Phases of a round."""
    canonical_graph: Literal["fixed", "generate"] = "fixed"
    """Whether a task's context is drawn by us, or from the (verified) canonical graph of the completion."""
    generator_steps: int = 4
    """Learner steps of a generator phase, each on a batch of its own."""
    generator_prompts: int = 8
    generator_samples: int = 4
    """Completions of each prompt: the group that advantages are relative to."""
    judge_samples: int = 8
    """Attempts of the answerer at each new task, which make its solve rate."""
    answerer_steps: int = 8
    """Learner steps of an answerer phase, each on a batch of its own."""
    answerer_tasks: int = 8
    answerer_samples: int = 8
    """Attempts at each task: the group that advantages are relative to."""
    anchor_share: float = 0.25
    """Share of the answerer's tasks that always come from the script, so that the mix never drifts off alone."""
    opponents: int = 2
    """Answerers of past rounds that are kept, and judge new tasks beside the present one."""
    epochs: int = 1
    """Learner steps on each batch; more than one wants loss.kind = "clipped"."""
    answerer_reward: str = "outcome"
    """outcome, classic (the published version's), or package.module:function with the signature of a TRL reward."""
    generator_sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(max_new_tokens=128))
    answerer_sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(max_new_tokens=80))
    advantages: AdvantageSettings = field(default_factory=lambda: AdvantageSettings(kind="group", scale="none"))
    gate: GateSettings = field(default_factory=lambda: GateSettings(mode="off"))
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(learning_rate=1e-4))
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    eval_tasks: int = 200
    """Held-out tasks that base, cloned and trained answer at the end; 0 leaves the evaluation out."""
    dry_run: bool = False
    """Scripted players in place of a model: the real parser, validator and rewards, and no learning."""
    device: Device = "cpu"
    """Where the model runs."""
    threads: int | None = None
    """CPU threads of the computation; none leaves it to PyTorch."""
    run: str | None = None
    """Name of the run's directory under runs/; none makes one from the date."""
    quiet: bool = False
    """Show no progress."""

    @property
    def draws(self) -> bool:
        """Completions hold a canonical graph."""
        return self.canonical_graph == "generate"

    def __post_init__(self) -> None:
        check_types(self)
        for name in (
            "worlds", "max_steps", "context_edges", "min_hops", "rounds", "generator_steps", "generator_prompts",
            "answerer_steps", "answerer_tasks", "epochs",
        ):  # fmt: skip
            at_least(name, getattr(self, name), 1)
        for name in ("generator_samples", "answerer_samples"):
            at_least(name, getattr(self, name), 2)
        at_least("judge_samples", self.judge_samples, 8)
        at_least("opponents", self.opponents, 0)
        at_least("subagents", self.subagents, 0)
        at_least("subagent_steps", self.subagent_steps, 1)
        if self.subagents and self.access != "tools":
            raise ConfigError(
                f"subagents is {self.subagents}: only an answerer with tools has any; write access = 'tools'"
            )
        at_least("eval_tasks", self.eval_tasks, 0)
        check_common(self.seed, self.threads, self.run)
        check_sampling(self.generator_sampling)
        check_sampling(self.answerer_sampling)
        if not self.min_hops <= self.max_hops <= 6:
            raise ConfigError(f"max_hops is {self.max_hops}: give at least min_hops = {self.min_hops} and at most 6")
        if self.context_edges < self.max_hops:
            raise ConfigError(
                f"context_edges is {self.context_edges}: give at least max_hops = {self.max_hops}, or the evidence does "
                "not fit"
            )
        if not 0.0 <= self.anchor_share <= 1.0:
            raise ConfigError(f"anchor_share is {self.anchor_share!r}: give a share from 0 to 1")
        if self.adapters == "none" and self.lora != LoraSettings():
            raise ConfigError("lora is set, but adapters is 'none': write adapters = 'lora'")
        if self.epochs > 1 and self.loss.kind != "clipped":
            raise ConfigError(f"epochs is {self.epochs}: more than one step on a batch wants loss.kind = 'clipped'")
        if self.answerer_reward not in ("outcome", "classic") and ":" not in self.answerer_reward:
            raise ConfigError(
                f"answerer_reward is {self.answerer_reward!r}: outcome, classic, or package.module:function"
            )
        check_gate_and_loss(self.gate, self.loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupConfig:
    """``sparring warmup``: a supervised start, from the play of scripted bots or from a file of chats.

    >>> WarmupConfig(out="my-start").epochs
    1
    """

    out: str
    """Directory of the warmed-up model, to be given to `train shared --model`."""
    model: str = "tiny"
    """The model to start from: registered name, directory, or Hugging Face name."""
    env: str = "market"
    """Whose bots are copied: built-in environment, or package.module:Class."""
    env_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The environment's own settings, which it checks itself."""
    agents_per_team: int = 4
    """Agents of each team while the bots play."""
    rules: Literal["brief", "full"] = "brief"
    """How much of the list of actions every prompt repeats; as in the training to come."""
    chats: Path | None = None
    """JSONL of chats ({"messages": [{"role": ..., "content": ...}]}) to learn from in place of bots."""
    examples: int | None = None
    """Replies to learn from; none takes 8000 for a model below 20 million numbers, 400 above, or all of ``chats``."""
    epochs: int = 1
    """Passes over the examples."""
    batch_size: int | None = None
    """Replies in one step; none takes 32 for a model below 20 million numbers, 4 above."""
    learning_rate: float | None = None
    """Peak change of a weight per step, roughly; none chooses by size and adapters (tiny 1e-3, smollm2 2e-4)."""
    adapters: Literal["none", "shared"] = "none"
    """Train all weights, or one LoRA adapter."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    micro_batch_tokens: int = 4096
    """Token positions between two backward passes: bounds memory, changes no gradient."""
    seed: int = 0
    """One seed is one run, on one machine type and thread count."""
    device: Device = "cpu"
    """Where the model runs."""
    threads: int | None = None
    """CPU threads of the computation; none leaves it to PyTorch."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("agents_per_team", "examples", "epochs", "batch_size", "micro_batch_tokens"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.learning_rate is not None:
            above_zero("learning_rate", self.learning_rate)
        check_common(self.seed, self.threads, None)
        check_lora(self.adapters, self.lora)
        if not self.out.strip():
            raise ConfigError("out is empty: name a directory for the warmed-up model")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """``sparring eval RUN``: start, trained, filtered cloning and every bot on one held-out panel of situations.

    >>> EvalConfig(run="runs/market").situations
    320
    """

    run: str
    """The run's directory, or its name under runs/."""
    situations: int = 320
    """Decisions in the panel; the same ones for every player."""
    seed: int = 0
    """Of the panel, the replies and the bootstrap."""
    step: int | None = None
    """Checkpoint to evaluate; none takes the newest."""
    opponents: tuple[str, ...] = ()
    """Runs or models whose attackers play live too, such as a red trained against this run's frozen blue."""
    cloning: bool = True
    """Train and show filtered cloning too: it is what a gain of RL must beat."""
    device: Device = "cpu"
    """Where the model runs."""
    threads: int | None = None
    """CPU threads of the computation; none leaves it to PyTorch."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least("situations", self.situations, 1)
        check_common(self.seed, self.threads, None)
        if self.step is not None:
            at_least("step", self.step, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """``sparring demo``: the main job on the embedded model, and what came of it.

    >>> DemoConfig().full
    False
    """

    full: bool = False
    """Run at full length, in place of the few minutes of the short demo."""
    seed: int = 0
    """One seed is one demo, on one machine type and thread count."""
    run: str | None = None
    """Name of the run's directory under runs/; none makes one from the date."""
    threads: int | None = None
    """CPU threads of the computation; none leaves it to PyTorch."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        check_types(self)
        check_common(self.seed, self.threads, self.run)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayConfig:
    """``sparring play ENV``: a person takes a seat.

    >>> PlayConfig(team="blue").others
    'tiny'
    """

    env: str = "market"
    """Built-in environment, or package.module:Class."""
    env_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The environment's own settings, which it checks itself."""
    team: str = "blue"
    """The team of your seat."""
    others: str = "tiny"
    """Who plays the other seats: a model, a checkpoint, or bot:NAME."""
    agents_per_team: int = 2
    """Agents of each team, you among them."""
    seed: int = 0
    """One seed is one world."""
    device: Device = "cpu"
    """Where the model runs."""
    threads: int | None = None
    """CPU threads of the computation; none leaves it to PyTorch."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least("agents_per_team", self.agents_per_team, 1)
        check_common(self.seed, self.threads, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """``sparring export SOURCE``: a trained policy as others read it.

    >>> ExportConfig(source="runs/market", out="my-model").format
    'hf'
    """

    source: str
    """A run, a checkpoint, or a model."""
    out: str
    """Directory to write; it must not exist, or be empty."""
    format: Literal["hf", "peft", "merged", "onnx"] = "hf"
    """Whole model, LoRA adapter alone, model with the adapter merged in, or (small policies) ONNX."""
    policy: str | None = None
    """Which policy, where a run trained several; none exports all to onnx."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckEnvConfig:
    """``sparring check-env ENV``: does an environment keep the contract?

    >>> CheckEnvConfig(env="market").seed
    0
    """

    env: str
    """Built-in environment, or package.module:Class."""
    env_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The environment's own settings, which it checks itself."""
    seed: int = 0
    """Of the episodes that are played."""

    def __post_init__(self) -> None:
        check_types(self)
        check_common(self.seed, None, None)


def check_run_name(name: str) -> None:
    """Raise ConfigError for what cannot name a directory under ``runs/`` on every machine."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or name == "none":
        raise ConfigError(f"run is {name!r}: give a name of letters, digits, dots, dashes and underscores")


# Checks


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}: give at least {least}")


def above_zero(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise ConfigError(f"{name} is {value!r}: give a finite number above 0")


def check_common(seed: int, threads: int | None, run: str | None) -> None:
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}: give a whole number from 0 to 2**63 - 1")
    if threads is not None:
        at_least("threads", threads, 1)
    if run is not None:
        check_run_name(run)


def _reward(name: str) -> None:
    if name in _REWARDS:
        return
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"reward is {name!r}{nearest(name, _REWARDS)}; your own is package.module:function")


def check_sampling(sampling: SamplingSettings) -> None:
    check_types(sampling)
    above_zero("sampling.temperature", sampling.temperature)
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"sampling.top_p is {sampling.top_p!r}: give a share above 0 and at most 1")
    at_least("sampling.max_new_tokens", sampling.max_new_tokens, 1)


def _key_values(kv: KeyValueSettings) -> None:
    check_types(kv)
    for name, bits in (("kv.key_bits", kv.key_bits), ("kv.value_bits", kv.value_bits)):
        if bits is not None and bits not in (2.0, 3.0, 3.5, 4.0):
            raise ConfigError(f"{name} is {bits:g}: choose 2, 3, 3.5 or 4 bits, or leave it out")
    if (kv.key_bits is None) != (kv.value_bits is None):
        missing = "kv.key_bits" if kv.key_bits is None else "kv.value_bits"
        raise ConfigError(f"{missing} is not set: keys and values are both coded, or neither (2, 3, 3.5 or 4 bits)")
    if kv.key_bits is None and kv != KeyValueSettings():
        raise ConfigError("kv.window is set, but nothing is coded: set kv.key_bits and kv.value_bits too")
    at_least("kv.window", kv.window, 0)


def check_lora(adapters: str, lora: LoraSettings) -> None:
    if adapters == "none" and lora != LoraSettings():
        raise ConfigError("lora is set, but adapters is 'none' and no adapter is trained: write adapters = 'shared'")


def _player(name: str, player: str) -> None:
    kind, colon, rest = player.partition(":")
    if kind not in PLAYER_KINDS:
        raise ConfigError(f"{name} is {player!r}{nearest(kind, PLAYER_KINDS)}")
    if kind == "policy":
        fits, form = not colon, "policy"
    elif kind == "openai":
        url, _, model = rest.partition("#")
        fits = url.startswith(("http://", "https://")) and url.count("/") >= 2 and bool(model)
        form = "openai:http://HOST:PORT/v1#MODEL"
    else:
        fits, form = bool(rest.strip()), "bot:NAME" if kind == "bot" else "frozen:RUN_OR_MODEL"
    if not fits:
        raise ConfigError(f"{name} is {player!r}: write {form}")
