"""A small policy for each agent (or for agents alike), learning by PPO from the rollouts that its agents stream.

Read ``train_independent`` from top to bottom: collect, submit, learn, publish, report, save. Left out on purpose: values
are never computed while acting (they are those of the weights that learn, over the whole batch at once), statistics
change between updates only, and nothing is collected while learning unless ``overlap`` asks for it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from sparring.agent_metrics import iteration_row, table
from sparring.checkpoints import Checkpoint, incarnation, latest, read_checkpoint, rotate, write_checkpoint
from sparring.config import IndependentConfig, to_toml
from sparring.envs.agents import ArrayEnv, GroupArrays, JointState
from sparring.envs.load_agents import load_array_env
from sparring.errors import CheckpointError, ConfigError
from sparring.intake.codec import decode, encode
from sparring.intake.recorder import Recorder
from sparring.intake.registry import Readiness, Registry, SubmitStatus
from sparring.learning.ppo import Moments
from sparring.learning.ppo_update import Normalizers, StackLearner, update
from sparring.metrics import MetricsWriter
from sparring.policies.acting import ActorWeights, act, draw_noise, for_environment
from sparring.policies.actor_critic import POLICIES, ActorCriticStack, SavedPolicies, Shape, seed_of
from sparring.rundir import RunDirectory, Session, stop_on_signals
from sparring.types import IterationReport, PolicyVersion, Rollout, Spaces, Spread, UpdateReport

RECENT = 100
"""Episodes of a policy that the report's mean return is taken over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndependentReport:
    """What a run came to; ``report.json``."""

    run: str
    iterations: int
    env_steps: int
    episodes: Mapping[str, int]
    """By policy: episodes that its agents ended."""
    return_mean: Mapping[str, float]
    """By policy: over its last 100 episodes."""
    updates: Mapping[str, int]
    failed_updates: Mapping[str, int]
    """Updates that were undone because numbers were no longer finite."""
    submissions: Mapping[str, int]
    """Rollouts by ``policy/status``; dropped ones became too old while they waited."""
    env_steps_per_second: float
    """Of this session, learning included."""
    seconds: float
    stopped: bool
    """Ended early, by a signal; resume with --resume."""
    notices: tuple[str, ...]


class SavedStack(msgspec.Struct, frozen=True, kw_only=True):
    """Of a stack: what ``stack-N.safetensors`` does not hold."""

    names: list[str]
    steps: list[int]
    """Version by policy."""
    counts: list[list[int]]
    """By policy: rows behind the statistics of observations, states and returns."""


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run but arrays: what a checkpoint's ``state.json`` holds."""

    iteration: int
    env_steps: int
    stacks: list[SavedStack]
    submissions: dict[str, int]
    carried: list[dict[str, list[int]]]
    pool: list[list[int]]
    """By past policy: its versions, stack after stack."""
    episodes: dict[str, int]
    recent: dict[str, list[float]]
    failed: dict[str, int]
    frozen: list[list[int]]
    """By copy: episode, the agent that learns in it, the past policy of the others; -1 for none."""


@dataclass(kw_only=True, slots=True)
class Play:
    """Where the environment and those who act in it stand."""

    env: ArrayEnv
    joint: JointState | None
    recorders: list[Recorder]
    returns: list[np.ndarray]
    """By group: rewards of open episodes, (A, E)."""
    lengths: list[np.ndarray]
    frozen: np.ndarray
    """(E, 3): see SavedRun."""
    ended: list[tuple[str, float, int]] = field(default_factory=list)
    """Agent, return, length of episodes that ended in this iteration."""


def train_independent(config: IndependentConfig, *, resume: Path | None = None) -> IndependentReport:
    """Runs, or resumes, a training run under ``runs/`` and returns its report.

    Raises:
        ConfigError, CheckpointError, EnvError: Before anything is written, where that is possible.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    env = load_array_env(
        config.env, config.copies, seed=config.seed, settings=config.env_settings, vector=config.vector
    )
    env.reset()
    joint = JointState(env, own_state=config.critic == "state") if config.algorithm == "mappo" else None
    state_size = joint.now[0].shape[2] if joint is not None else 0
    ppo = replace(config.ppo, epochs=1) if config.algorithm == "reinforce" else config.ppo
    algorithm = "reinforce" if config.algorithm == "reinforce" else "ppo"
    session = Session.now(device="cpu", threads=torch.get_num_threads())

    directory = RunDirectory.begin(
        resume, name=config.run, config_toml=to_toml(config), seed=config.seed, session=session, kind="independent"
    )
    with directory as run, stop_on_signals() as stop:
        number = incarnation(run.path)
        stacks: dict[Spaces, StackLearner] = {}

        def begin_policy(name: str, spaces: Spaces) -> StackLearner:
            learner = stacks.get(spaces)
            if learner is None:
                shape = Shape(
                    spaces=spaces, hidden=config.net.hidden, activation=config.net.activation, state_size=state_size,
                    squash=config.net.squash and not spaces.choices,
                )  # fmt: skip
                sizes = (spaces.observation_size, state_size)
                learner = stacks[spaces] = StackLearner.of(ActorCriticStack(shape), ppo, sizes=sizes)
            _stack(learner).add(name, seed=config.seed)
            learner.join(PolicyVersion(incarnation=number, step=0))
            return learner

        def version(policy: str) -> PolicyVersion:
            learner = registry.learner(policy)
            return learner.versions[learner.policies.names.index(policy)]

        registry: Registry[StackLearner] = Registry(
            begin_policy, version=version, share=config.share, policies=config.policies, state_size=state_size,
            capacity=config.ready.capacity, max_version_lag=ppo.max_version_lag,
            readiness=Readiness(
                min_steps=config.ready.min_steps, trajectories=config.ready.trajectories,
                together=config.ready.together, quorum=config.ready.quorum, timeout=config.ready.timeout,
            ),
        )  # fmt: skip
        for group in env.groups:
            for agent in group.agents:
                registry.register(agent, group.spaces)
        _check(config, env, registry)
        play = _play(env, joint, config, state_size)
        pool: deque[list[ActorWeights]] = deque(maxlen=config.opponents.keep)
        iteration, env_steps, episodes, failed = 0, 0, dict[str, int](), dict[str, int]()
        recent = {name: deque[float](maxlen=RECENT) for name in registry.policies}
        notices = list(run.notices)
        newest = latest(run.checkpoints) if resume is not None else None
        if newest is not None:
            checkpoint = read_checkpoint(newest)
            state = _load(checkpoint, registry, stacks, play, pool, number, notices)
            iteration, env_steps, episodes, failed = state.iteration, state.env_steps, state.episodes, state.failed
            for name, values in state.recent.items():
                recent[name].extend(values)
        run.cut_back(iteration)
        run.write_config(to_toml(config))
        began, done_before = time.perf_counter(), env_steps

        def learn(batches: Mapping[str, list[Rollout]], progress: float) -> list[UpdateReport]:
            """One update of every stack that has something to learn from; results come back by policy."""
            found: list[UpdateReport] = []
            for learner in stacks.values():
                own = {name: batches[name] for name in learner.policies.names if name in batches}
                if own:
                    found += update(learner, own, algorithm=algorithm, progress=progress, seed=config.seed).values()
            return found

        with MetricsWriter(run.metrics) as metrics, ThreadPoolExecutor(max_workers=1) as background:
            for notice in notices:
                _say(config, notice)
            learning: Future[list[UpdateReport]] | None = None
            stopping = False
            while env_steps < config.steps and not stopping:
                started = time.perf_counter()
                iteration += 1

                # Collect with the weights that were published last; in an overlapped run the next ones are being made.
                weights = [_acting(stacks[group.spaces], registry, group) for group in env.groups]
                if config.opponents.share > 0.0 and (iteration - 1) % config.opponents.every == 0:
                    pool.append(weights)
                rollouts = collect(play, weights, pool, config, iteration)
                env_steps += config.rollout * config.copies
                collected = time.perf_counter()

                # What was being learned is there now; results come by policy.
                updates: list[UpdateReport] = []
                if learning is not None:
                    updates, learning = learning.result(), None
                    registry.done([report.policy for report in updates])
                for rollout in rollouts:
                    registry.submit(rollout, now=iteration)
                batches = registry.take(registry.ready(now=iteration))
                progress = min(env_steps / config.steps, 1.0)
                stopping = stop()  # asked once an iteration: a signal after this is answered by the next one
                saving = iteration % config.checkpoint.every == 0 or env_steps >= config.steps or stopping
                if config.overlap and not saving:
                    learning = background.submit(learn, batches, progress)
                else:
                    updates += learn(batches, progress)
                    registry.done(list(batches))

                # Report, and the checkpoint that stands for all of it.
                for report in updates:
                    failed[report.policy] = failed.get(report.policy, 0) + report.failed
                by_policy = _by_policy(play.ended, registry)
                for name, ended in by_policy.items():
                    episodes[name] = episodes.get(name, 0) + len(ended)
                    recent[name].extend(value for value, _ in ended)
                play.ended.clear()
                shown = IterationReport(
                    iteration=iteration, env_steps=env_steps, updates=tuple(updates),
                    returns={name: Spread.of([value for value, _ in ended]) for name, ended in by_policy.items()},
                    lengths={name: Spread.of([length for _, length in ended]) for name, ended in by_policy.items()},
                    recent={name: float(np.mean(values)) for name, values in recent.items() if values},
                    dropped=_dropped(registry), collect_seconds=collected - started,
                    seconds=time.perf_counter() - started,
                )  # fmt: skip
                metrics.write_row(iteration_row(shown))
                if saving or iteration % 10 == 0:
                    _say(config, f"iteration {iteration}, {env_steps:,} of {config.steps:,} steps\n{table(shown)}")
                if saving:
                    metrics.sync()
                    tensors, documents = _save(
                        iteration, env_steps, registry, stacks, play, pool, episodes, recent, failed
                    )
                    write_checkpoint(
                        run.checkpoints, iteration, tensors=tensors, documents=documents,
                        consumed={"iteration": iteration, "env_steps": env_steps},
                    )  # fmt: skip
                    rotate(run.checkpoints, config.checkpoint.keep)
        seconds = time.perf_counter() - began
        final = IndependentReport(
            run=str(run.path), iterations=iteration, env_steps=env_steps, episodes=episodes,
            return_mean={name: float(np.mean(values)) for name, values in recent.items() if values},
            updates={name: version(name).step for name in registry.policies}, failed_updates=failed,
            submissions=dict(sorted(registry.counts.items())),
            env_steps_per_second=(env_steps - done_before) / max(seconds, 1e-9), seconds=seconds,
            stopped=env_steps < config.steps, notices=tuple(notices),
        )  # fmt: skip
        run.write_report(final)
        return final


# ----------------------------------------------------------------------------------------------------- collecting


def collect(
    play: Play, weights: Sequence[ActorWeights], pool: Sequence[Sequence[ActorWeights]], config: IndependentConfig,
    iteration: int,
) -> list[Rollout]:  # fmt: skip
    """So many ticks of all copies, as rollouts. Chance is keyed by seed, agent and iteration: no state is kept of it.

    Args:
        play: Goes on.
        weights: By group, a row an agent.
        pool: Past weights, likewise.
        config: The run's.
        iteration: From 1.
    """
    env, shares = play.env, config.opponents.share > 0.0
    noise = [
        np.stack([
            draw_noise(
                group.spaces, np.random.Generator(np.random.Philox(seed_of(config.seed, agent, iteration))),
                (config.rollout, env.copies),
            )
            for agent in group.agents
        ], axis=1)
        for group in env.groups
    ]  # fmt: skip
    for t in range(config.rollout):
        played = []
        if shares:
            _seat_past_policies(play, pool, config)
        for g, group in enumerate(env.groups):
            masks = group.masks if env.masked else None
            actions, log_probs = act(weights[g], group.observations, masks, noise[g][t])
            learns = group.acting
            if shares:
                past = _past_seats(play, g, group)
                learns = learns & (past < 0)
                for index in np.unique(past[past >= 0]).tolist():
                    theirs, _ = act(pool[index][g], group.observations, masks, noise[g][t])
                    actions = np.where((past == index)[..., None], theirs, actions)
            states = None if play.joint is None else play.joint.now[g]
            play.recorders[g].act(group.observations, learns, actions, log_probs, masks, states)
            played.append(for_environment(weights[g], actions))
            play.lengths[g] += group.acting
        env.step(played)
        if play.joint is not None:
            play.joint.advance(env)
        for g, group in enumerate(env.groups):
            finals = None if play.joint is None else play.joint.final[g]
            play.recorders[g].settle(group.rewards, group.terminated, group.truncated, group.finals, finals)
            _count(play, g, group)
    out: list[Rollout] = []
    for g, group in enumerate(env.groups):
        acting = group.acting & (_past_seats(play, g, group) < 0) if shares else group.acting
        states = None if play.joint is None else play.joint.now[g]
        out += play.recorders[g].cut(weights[g].versions, group.observations, acting, states)
    return out


def _count(play: Play, g: int, group: GroupArrays) -> None:
    """Returns and lengths of the agents' episodes, as they are played."""
    returns, lengths = play.returns[g], play.lengths[g]
    returns += group.rewards
    over = group.terminated | group.truncated
    if over.any():
        for agent, copy in np.argwhere(over).tolist():
            play.ended.append((group.agents[agent], float(returns[agent, copy]), int(lengths[agent, copy])))
        returns[over], lengths[over] = 0.0, 0


def _seat_past_policies(play: Play, pool: Sequence[Any], config: IndependentConfig) -> None:
    """At the beginning of a copy's episode: does a past policy play in it, and which agent learns?"""
    agents = sum(len(group.agents) for group in play.env.groups)
    for copy in np.flatnonzero(play.frozen[:, 0] != play.env.episodes).tolist():
        episode = int(play.env.episodes[copy])
        rng = np.random.Generator(np.random.Philox(seed_of(config.seed, "opponents", copy, episode)))
        drawn, learner, index = rng.random(), int(rng.integers(agents)), int(rng.integers(len(pool)))
        play.frozen[copy] = (episode, learner, index) if drawn < config.opponents.share else (episode, -1, -1)


def _past_seats(play: Play, g: int, group: GroupArrays) -> np.ndarray:
    """(A, E): the past policy that plays an agent, -1 where the one that learns does."""
    first = sum(len(other.agents) for other in play.env.groups[:g])
    seats = first + np.arange(len(group.agents))[:, None]
    found: np.ndarray = np.where(play.frozen[:, 1] == seats, -1, play.frozen[:, 2])
    return found


# ------------------------------------------------------------------------------------------------------ beginning


def _check(config: IndependentConfig, env: ArrayEnv, registry: Registry[StackLearner]) -> None:
    agents = [agent for group in env.groups for agent in group.agents]
    for agent in config.policies:
        if agent not in agents:
            raise ConfigError(f"policies.{agent}: {config.env} has no such agent (there are: {', '.join(agents)})")
    if config.opponents.share > 0.0 and len(agents) < 2:
        raise ConfigError(f"opponents.share is {config.opponents.share}, but {config.env} has one agent: write 0")


def _play(env: ArrayEnv, joint: JointState | None, config: IndependentConfig, state_size: int) -> Play:
    lanes = [group.acting.shape for group in env.groups]
    return Play(
        env=env, joint=joint,
        recorders=[
            Recorder(
                group.agents, env.copies, config.rollout, group.spaces, masked=env.masked and bool(group.spaces.choices),
                state_size=state_size,
            )
            for group in env.groups
        ],
        returns=[np.zeros(lane, np.float64) for lane in lanes], lengths=[np.zeros(lane, np.int64) for lane in lanes],
        frozen=np.full((env.copies, 3), -1),
    )  # fmt: skip


def _stack(learner: StackLearner) -> ActorCriticStack:
    assert isinstance(learner.policies, ActorCriticStack)
    return learner.policies


def _acting(learner: StackLearner, registry: Registry[StackLearner], group: GroupArrays) -> ActorWeights:
    """The weights that a group's agents act with, a row an agent."""
    normalized = learner.settings.normalize_observations
    scales = learner.scales("observations") if normalized else (None, None)
    names = learner.policies.names
    rows = np.array([names.index(registry.policy(agent)) for agent in group.agents])
    return _stack(learner).acting(learner.versions, *scales).rows(rows)


# --------------------------------------------------------------------------------------------------------- saving


def _save(
    iteration: int, env_steps: int, registry: Registry[StackLearner], stacks: Mapping[Spaces, StackLearner], play: Play,
    pool: Sequence[Sequence[ActorWeights]], episodes: Mapping[str, int], recent: Mapping[str, Sequence[float]],
    failed: Mapping[str, int],
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, bytes]]:  # fmt: skip
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    saved, carried, policies = [], [], []
    for i, learner in enumerate(stacks.values()):
        own = {
            "parameters": learner.policies.parameters, "first": learner.first, "second": learner.second,
            "adam_steps": torch.from_numpy(learner.steps),
        }  # fmt: skip
        counts = []
        for row, normalizers in enumerate(learner.normalizers):
            kinds = (normalizers.observations, normalizers.states, normalizers.returns)
            counts.append([moments.count for moments in kinds])
            for kind, moments in zip(_KINDS, kinds, strict=True):
                own[f"{kind}/{row}/mean"] = torch.from_numpy(moments.mean)
                own[f"{kind}/{row}/squares"] = torch.from_numpy(moments.squares)
        if learner.settings.normalize_observations:
            own |= dict(
                zip(("acting/mean", "acting/scale"), map(torch.from_numpy, learner.scales("observations")), strict=True)
            )
        tensors[f"stack-{i}.safetensors"] = own
        names, steps = list(learner.policies.names), [each.step for each in learner.versions]
        saved.append(SavedStack(names=names, steps=steps, counts=counts))
        policies.append(SavedPolicies(shape=_stack(learner).shape, names=names, steps=steps))
    for g, recorder in enumerate(play.recorders):
        arrays, versions = recorder.snapshot()
        carried.append(versions)
        alive = play.env.groups[g].acting if play.joint is None else play.joint.alive[g]
        arrays |= {"returns": play.returns[g], "lengths": play.lengths[g], "alive": alive}
        arrays["seen"] = play.env.groups[g].observations
        tensors[f"open-{g}.safetensors"] = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
    past: dict[str, torch.Tensor] = {}
    for i, groups in enumerate(pool):
        for g, weights in enumerate(groups):
            past |= {f"{i}/{g}/{name}": torch.from_numpy(array) for name, array in _arrays(weights).items()}
    tensors["pool.safetensors"] = past
    state = SavedRun(
        iteration=iteration, env_steps=env_steps, stacks=saved, submissions=dict(registry.counts), carried=carried,
        pool=[[v.step for weights in groups for v in weights.versions] for groups in pool], episodes=dict(episodes),
        recent={name: list(values) for name, values in recent.items()}, failed=dict(failed),
        frozen=play.frozen.tolist(),
    )  # fmt: skip
    return tensors, {
        "state.json": msgspec.json.encode(state), "waiting.rollouts": encode(registry.waiting()),
        POLICIES: msgspec.msgpack.encode(policies), "environment.msgpack": msgspec.msgpack.encode(play.env.snapshot()),
    }  # fmt: skip


_KINDS = ("observations", "states", "returns")


def _load(
    checkpoint: Checkpoint, registry: Registry[StackLearner], stacks: Mapping[Spaces, StackLearner], play: Play,
    pool: deque[list[ActorWeights]], number: int, notices: list[str],
) -> SavedRun:  # fmt: skip
    """Everything back to a checkpoint. An environment that cannot be put back begins new episodes; a notice says so."""
    try:
        state = msgspec.json.decode(checkpoint.documents["state.json"], type=SavedRun)
        place = msgspec.msgpack.decode(checkpoint.documents["environment.msgpack"])
    except (KeyError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{checkpoint.path}: state.json is missing or of another version ({error})") from error
    if [saved.names for saved in state.stacks] != [list(learner.policies.names) for learner in stacks.values()]:
        raise ConfigError("the checkpoint has other policies: env, share and policies cannot change in a resume")
    for i, (saved, learner) in enumerate(zip(state.stacks, stacks.values(), strict=True)):
        own = checkpoint.tensors[f"stack-{i}.safetensors"]
        if own["parameters"].shape != learner.policies.parameters.shape:
            raise ConfigError(
                "the checkpoint's policies have other shapes: net and algorithm cannot change in a resume"
            )
        learner.policies.parameters.copy_(own["parameters"])
        learner.first, learner.second, learner.steps = own["first"], own["second"], own["adam_steps"].numpy()
        learner.versions = [PolicyVersion(incarnation=number, step=step) for step in saved.steps]
        learner.normalizers = [
            Normalizers(**{
                kind: Moments(
                    count=count, mean=own[f"{kind}/{row}/mean"].numpy(), squares=own[f"{kind}/{row}/squares"].numpy()
                )
                for kind, count in zip(_KINDS, counts, strict=True)
            })
            for row, counts in enumerate(saved.counts)
        ]  # fmt: skip
    registry.restore(decode(checkpoint.documents["waiting.rollouts"]), state.submissions)
    current = [_acting(stacks[group.spaces], registry, group) for group in play.env.groups]
    for i, steps in enumerate(state.pool):
        left = deque(PolicyVersion(incarnation=number, step=step) for step in steps)
        pool.append([
            _weights(weights, {
                name.removeprefix(f"{i}/{g}/"): tensor.numpy()
                for name, tensor in checkpoint.tensors["pool.safetensors"].items() if name.startswith(f"{i}/{g}/")
            }, tuple(left.popleft() for _ in weights.versions))
            for g, weights in enumerate(current)
        ])  # fmt: skip
    if place is None:
        notices.append(
            "the environment cannot be put back: open episodes begin anew, so this is not bit for bit the same run"
        )
        return state
    play.env.restore(place)
    alive = []
    play.frozen = np.array(state.frozen)
    for g, recorder in enumerate(play.recorders):
        arrays = {name: tensor.numpy() for name, tensor in checkpoint.tensors[f"open-{g}.safetensors"].items()}
        recorder.restore(arrays, state.carried[g])
        play.returns[g], play.lengths[g] = arrays["returns"].copy(), arrays["lengths"].copy()
        play.env.groups[g].observations[:] = arrays["seen"]  # of agents that need not act now, too
        alive.append(arrays["alive"])
    if play.joint is not None:
        play.joint.restore(play.env, alive)
    return state


def _arrays(weights: ActorWeights) -> dict[str, np.ndarray]:
    """The arrays of acting weights by name, for a checkpoint."""
    found = {f"layer/{i}/{n}": pair[n == "bias"] for i, pair in enumerate(weights.layers) for n in ("weight", "bias")}
    found |= {"head/weight": weights.head[0], "head/bias": weights.head[1]}
    extra = {"log_stds": weights.log_stds, "mean": weights.mean, "scale": weights.scale}
    found |= {name: array for name, array in extra.items() if array is not None}
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def _weights(like: ActorWeights, arrays: Mapping[str, np.ndarray], versions: tuple[PolicyVersion, ...]) -> ActorWeights:
    return replace(
        like, versions=versions, head=(arrays["head/weight"], arrays["head/bias"]),
        layers=tuple((arrays[f"layer/{i}/weight"], arrays[f"layer/{i}/bias"]) for i in range(len(like.layers))),
        log_stds=arrays.get("log_stds"), mean=arrays.get("mean"), scale=arrays.get("scale"),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- reports


def _by_policy(
    ended: Sequence[tuple[str, float, int]], registry: Registry[StackLearner]
) -> dict[str, list[tuple[float, int]]]:
    found: dict[str, list[tuple[float, int]]] = {}
    for agent, value, length in ended:
        found.setdefault(registry.policy(agent), []).append((value, length))
    return found


def _dropped(registry: Registry[StackLearner]) -> int:
    lost = (SubmitStatus.FULL, SubmitStatus.STALE, SubmitStatus.INVALID, "dropped")
    return sum(count for key, count in registry.counts.items() if key.rpartition("/")[2] in lost)


def _say(config: IndependentConfig, text: str) -> None:
    if not config.quiet:
        print(text, file=sys.stderr, flush=True)
