"""Learn from trajectories that others made, while the model goes on being served.

Read ``train_feed`` from top to bottom. Each batch is logged before it is trained; every few batches: save, rename,
acknowledge, evaluate, publish, in this order. A kill anywhere between two of these is healed by the next start: the
checkpoint says which batches it has consumed, the log agrees with it, and a checkpoint that was not judged is judged.
What was left out, on purpose: no replay buffer, and no second pass over a trajectory.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from sparring.checkpoints import (
    checkpoint_step,
    incarnation,
    latest,
    list_checkpoints,
    read_checkpoint,
    read_state,
    rotate,
    write_checkpoint,
)
from sparring.config import to_toml
from sparring.config_live import FeedConfig
from sparring.envs.load import load_env
from sparring.errors import PromptError, SparringError
from sparring.evaluation.quick import QuickSuite
from sparring.http import token_from
from sparring.intake.feed import FeedClient, FeedError, Pulled
from sparring.intake.trajectory_log import Batch, FullError, Item, TrajectoryLog
from sparring.intake.wire import Call, decode_body
from sparring.learning.advantages import BaselineState, credit
from sparring.learning.batch import to_experiences
from sparring.learning.gate import Gate, GateState
from sparring.learning.optimizers import NamedOptimizer, OptimizerState, optimizer_state
from sparring.learning.saved import learner_tensors, restore_learners
from sparring.learning.settings import usual_learning_rate
from sparring.learning.step import learner_step
from sparring.loops.rollout import Stopwatch
from sparring.metrics import MetricsWriter, Progress, Transcript, collapse_alarms
from sparring.policies.causal_lm import CausalLM
from sparring.policies.contract import ScoreRow
from sparring.publishing import Decision, Kind, checkpoints_in_use, decided, history, publish, read_pointer, reconcile
from sparring.rundir import RunDirectory, Session, stop_on_signals
from sparring.runs import SHARED, build_policies, restore_policies, tensor_file
from sparring.tokens.chat import ChatMessage
from sparring.types import (
    Outcome,
    PolicyVersion,
    Reward,
    Settlement,
    StepReport,
    TeamReport,
    TickReport,
    Turn,
    TurnId,
)

LOG = "log.sqlite"
NO_TEAM = "agents"
"""Team of trajectories that name none: they share one baseline."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run but its weights, moments and gate history: what a checkpoint's ``state.json`` holds."""

    batch: int
    """The last batch that was consumed."""
    baselines: BaselineState
    gate: GateState
    optimizers: dict[str, OptimizerState]
    versions: dict[str, PolicyVersion]
    counts: dict[str, int]
    window: list[TickReport]
    told: int = 0
    """The last batch that a Feed API was told of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedReport:
    """What a run came to; ``report.json``."""

    run: str
    batches: int
    step: int
    trajectories: int
    """Consumed, each once."""
    calls: int
    """Trained calls of purpose action."""
    retokenised: int
    """Of these, came as text: tokenised here and scored by a forward pass."""
    left_out: Mapping[str, int]
    """Calls that were not trained, by reason."""
    stale: int
    """Trajectories that were too old."""
    unreadable: int
    """Trajectories of the Feed API that do not hold what they should, when it was last asked."""
    published: int
    refused: int
    serves: str | None
    """Version that is served."""
    seconds: float
    stopped: bool
    notices: tuple[str, ...]


def train_feed(config: FeedConfig, *, resume: Path | None = None) -> FeedReport:
    """Runs, or resumes, a loop over a log (or a Feed API) and returns its report when it is stopped.

    Raises:
        ConfigError, ModelError, CheckpointError, LogError: Before anything is written, where that is possible.
        FencedError: Another trainer has taken the log; nothing of it is lost.
        TrainingError: Loss or gradient was not finite; the batch lies in the run's directory.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    policies = build_policies(config, [NO_TEAM])
    policy = policies[SHARED]
    if config.optimizer.learning_rate is None:
        rate = usual_learning_rate(policy.parameter_count, adapters=config.adapters != "none")
        config = replace(config, optimizer=replace(config.optimizer, learning_rate=rate))
    optimizers = {
        SHARED: NamedOptimizer(policy.trainable_parameters(), policy.matrix_names(), config.optimizer, seed=config.seed)
    }
    if config.loss.kl_coefficient > 0.0:
        policy.keep_reference()
    gate, baselines = Gate(config.gate, seed=config.seed), BaselineState()
    suite = None
    if config.publish:
        env = load_env(config.suite_env, rules="brief", settings=config.suite_settings)
        suite = QuickSuite(env, count=config.suite_situations, sampling=config.suite_sampling, seed=config.seed)
    remote = None
    if config.source.startswith(("http://", "https://")):
        remote = FeedClient(
            config.source, token=token_from(config.token_variable), identities_seconds=60.0 * config.identities_minutes
        )
    session = Session.now(device=config.device, threads=torch.get_num_threads())

    directory = RunDirectory.begin(
        resume, name=config.run, config_toml=to_toml(config), seed=config.seed, session=session, kind="feed"
    )
    with directory as run, stop_on_signals() as stop:
        number, consumed, counts = incarnation(run.path), 0, Counter[str]()
        window, told, pulled = deque[TickReport](maxlen=20), 0, Pulled(new=0, unreadable=0, conflicting=0, reason="")
        newest = latest(run.checkpoints) if resume is not None else None
        step = 0
        if newest is not None:
            checkpoint = read_checkpoint(newest)
            state = read_state(checkpoint, SavedState)
            restore_policies(policies, checkpoint)
            restore_learners(
                checkpoint.tensors, state.optimizers, state.gate, policies, optimizers, gate, where=str(newest)
            )
            consumed, baselines, step = state.batch, state.baselines, state.versions[SHARED].step
            counts.update(state.counts)
            told = state.told
            window.extend(state.window)
        if resume is not None:
            run.cut_back(consumed)
        run.write_config(to_toml(config))
        policy.version = PolicyVersion(incarnation=number, step=step)

        with (
            closing(remote) if remote is not None else nullcontext(),
            TrajectoryLog(run.path / LOG if remote is not None else Path(config.source)) as log,
            MetricsWriter(run.metrics) as metrics,
            Progress(total=config.batches or 0, start=consumed, quiet=config.quiet) as progress,
        ):
            for notice in run.notices:
                progress.note(notice)
            transcript = Transcript(run.episodes)
            lease = log.lease(str(run.path))
            log.reconcile(lease, consumed)  # the checkpoint is the truth
            _, repaired = reconcile(run.path)  # and what is published names a whole one
            if repaired is not None:
                progress.note(f"warning: {repaired}")

            def save() -> None:
                """Save, rename, acknowledge (here and at the Feed API); then evaluate and publish."""
                metrics.sync()
                transcript.sync()
                saved = SavedState(
                    batch=consumed, told=told, baselines=baselines, gate=gate.state()[1], counts=dict(counts),
                    window=list(window),
                    optimizers={name: optimizer_state(o)[1] for name, o in optimizers.items()},
                    versions={SHARED: policy.version},
                )  # fmt: skip
                write_checkpoint(
                    run.checkpoints, consumed, tensors={tensor_file(SHARED): policy.state()}
                    | learner_tensors(policies, optimizers, gate),
                    documents={"state.json": msgspec.json.encode(saved)}, consumed={"batch": consumed},
                )  # fmt: skip
                log.acknowledge(lease, consumed)
                tell()
                decide()
                rotate(run.checkpoints, config.checkpoint.keep, spare=checkpoints_in_use(run.path))
                log.forget(lease, checkpoint_step(list_checkpoints(run.checkpoints)[0]) or 0)

            def tell() -> None:
                """What is trained and saved, to the Feed API; what it does not hear now, it hears the next time."""
                nonlocal told
                keys = log.trained_keys(told, consumed) if remote is not None else []
                if remote is None or not keys:
                    return
                try:
                    remote.mark(keys, f"{run.path.name}/{consumed}")
                    told = consumed
                except FeedError as error:
                    progress.note(f"warning: {error}; told again after the next checkpoint")

            def decide() -> None:
                """Judge the newest checkpoint, unless that was done, and publish it if it is not worse."""
                if suite is None or decided(run.path, policy.version):
                    return
                decision = judged(run.path, policy, suite, _place(run, consumed))
                told = "published" if decision.published else "refused"
                progress.note(f"{decision.version} {told}: {decision.reason}")

            if newest is None:
                save()  # what is served until something better is there
            else:
                tell()  # killed between its rename and this
                policy.version = state.versions[SHARED]
                decide()  # killed between its rename and its publication
                policy.version = PolicyVersion(incarnation=number, step=step)
            watch, stopping, saved_at, asked = Stopwatch(), False, consumed, float("-inf")
            while not stopping and (config.batches is None or consumed < config.batches):
                # The next batch: as it was logged, or of what has come since.
                batch_watch = Stopwatch()
                if remote is not None and time.monotonic() - asked >= config.poll_seconds:
                    asked = time.monotonic()
                    try:
                        before, pulled = pulled, remote.pull(log)
                    except (FeedError, FullError) as error:
                        progress.note(f"warning: {error}; asked again in {config.poll_seconds:g} s")
                    else:
                        if (pulled.unreadable, pulled.conflicting) != (before.unreadable, before.conflicting):
                            progress.note(
                                f"warning: of the Feed API's trajectories {pulled.unreadable} cannot be read "
                                f"({pulled.reason or 'none now'}), {pulled.conflicting} changed after they came"
                            )
                batch = log.next_batch(
                    lease,
                    consumed,
                    least=config.least,
                    most=config.most,
                    stale=lambda item: stale(item, policy, config),
                )
                if batch is None:
                    stopping = stop()
                    time.sleep(0.0 if stopping else min(0.2, config.poll_seconds))
                    continue

                # Its calls as settled turns; advantages, the gate, one step.
                settled = settle(batch, policy, counts)
                report = None
                if settled:
                    credits, baselines = credit(settled, config.advantages, baselines)
                    decision = gate.weigh(credits.turns)
                    report = learner_step(
                        policy, to_experiences(decision.turns, policy=SHARED), config.loss, optimizers[SHARED],
                        bad_batch_dir=run.path / "bad-batches",
                    )  # fmt: skip
                consumed = batch.number
                counts["trajectories"] += len(batch.items)
                counts["calls"] += len(settled)

                # Reports, and the checkpoint that stands for all of it.
                tick = tick_report(consumed, settled, report, batch_watch.seconds(), window)
                window.append(tick)
                metrics.write(tick)
                progress.update(tick)
                for settlement in settled:
                    transcript.write(settlement, tick=consumed, reply=policy.chat.decode(settlement.turn.reply_ids))
                transcript.flush()
                stopping = stop()
                if consumed - saved_at >= config.checkpoint.every or stopping or consumed == config.batches:
                    save()
                    saved_at = consumed
            if consumed > saved_at:
                save()
            served, kinds = read_pointer(run.path), Counter(line.kind for line in history(run.path))
            final = FeedReport(
                run=str(run.path), batches=consumed, step=policy.version.step, trajectories=counts["trajectories"],
                calls=counts["calls"], retokenised=counts["retokenised"], stale=log.counts()["stale"],
                unreadable=pulled.unreadable,
                left_out={key.partition("/")[2]: n for key, n in sorted(counts.items()) if key.startswith("left/")},
                published=kinds[Kind.PUBLISHED], refused=kinds[Kind.REFUSED], seconds=watch.seconds(),
                serves=served.version if served is not None else None,
                stopped=config.batches is None or consumed < config.batches, notices=run.notices,
            )  # fmt: skip
        run.write_report(final)
        return final


# ------------------------------------------------------------------------------------------------------------ batches


def stale(item: Item, policy: CausalLM, config: FeedConfig) -> str | None:
    """Why an item is not learned from, or None. Calls that do not know their version are taken for current ones."""
    if item.kind != "turns":
        return f"{item.kind} are learned from by `sparring train independent`"
    if config.loss.max_version_lag is None:
        return None
    steps = [
        PolicyVersion.parse(call.version).step for call in decode_body(item.body).calls if call.version is not None
    ]
    lag = max((abs(policy.version.step - step) for step in steps), default=0)
    return f"{lag} steps old, more than {config.loss.max_version_lag}" if lag > config.loss.max_version_lag else None


def settle(batch: Batch, policy: CausalLM, counts: Counter[str]) -> list[Settlement]:
    """Every call of purpose action, with its reward; what cannot be trained is counted by reason."""
    settled = []
    rows = int(policy.core.model.get_input_embeddings().weight.shape[0])
    context = policy.core.context_length
    for item in batch.items:
        logged = decode_body(item.body)
        for index, call in enumerate(logged.calls):
            value = (
                call.reward if call.reward is not None else logged.reward if logged.reward is not None else item.reward
            )
            reason = None
            if call.purpose != "action":
                reason = "another purpose"
            elif value is None:
                reason = "no reward"
            elif call.exact and max(*call.prompt_ids, *call.reply_ids) >= rows:
                reason = "ids of another model"
            elif call.exact and context is not None and len(call.prompt_ids) + len(call.reply_ids) > context:
                reason = "longer than the context"
            elif call.temperature == 0.0:
                reason = "greedy: nothing was sampled"
            if reason is None and not call.exact:
                try:
                    call = retokenised(call, policy)
                    counts["retokenised"] += 1
                except PromptError:
                    reason = "longer than the context"
            if reason is not None:
                counts[f"left/{reason}"] += 1
                continue
            turn_id = TurnId(episode=item.number, agent=logged.agent, tick=index)
            turn = Turn(
                id=turn_id, team=logged.team or NO_TEAM, policy=SHARED, sampling=call.sampling,
                version=PolicyVersion.parse(call.version) if call.version is not None else policy.version,
                prompt_ids=call.prompt_ids, reply_ids=call.reply_ids, log_probs=call.log_probs, action=None,
            )  # fmt: skip
            settled.append(Settlement(
                turn=turn, outcome=Outcome(turn=turn_id, facts=None, settled_at=batch.number), reward=Reward(total=value)
            ))  # fmt: skip
    return settled


def retokenised(call: Call, policy: CausalLM) -> Call:
    """A call that came as text: its ids by the model's template, its log-probs by a forward pass of the weights at hand.

    Raises:
        PromptError: It does not fit the model's context.
    """
    messages = [ChatMessage(role=message.role, content=message.content) for message in call.messages]
    prompt, reply = policy.chat.supervised(messages, call.reply or "")
    context = policy.core.context_length
    if context is not None and len(prompt) + len(reply) > context:
        raise PromptError(f"{len(prompt) + len(reply)} tokens exceed the context of {context}")
    row = ScoreRow(token_ids=(*prompt, *reply), positions=tuple(range(len(prompt), len(prompt) + len(reply))))
    with torch.no_grad():
        found = policy.log_probs([row], temperature=call.temperature, top_p=call.top_p)
    return msgspec.structs.replace(
        call, prompt_ids=prompt, reply_ids=reply, log_probs=tuple(found.tolist()), messages=(), reply=None,
        version=str(policy.version),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- publishing, reports


def judged(run: Path, policy: CausalLM, suite: QuickSuite, checkpoint: Path) -> Decision:
    """Measure a candidate and publish it or not. A suite that fails publishes nothing."""
    now, baseline = read_pointer(run), None
    try:
        result = suite.measure(policy, checkpoint)
        if now is not None and now.suite is not None and now.suite.panel != suite.panel:
            served = run / now.checkpoint  # measured on another panel: its weights play this one, too
            baseline = suite.measure(policy, served, weights=read_checkpoint(served).tensors[tensor_file(SHARED)])
    except SparringError as error:
        failed = publish(run, checkpoint, None, version=policy.version)
        return replace(failed, reason=f"the suite failed: {error}")
    return publish(run, checkpoint, result, version=policy.version, baseline=baseline)


def _place(run: RunDirectory, batch: int) -> Path:
    return run.checkpoints / f"step-{batch:06d}"


def tick_report(
    batch: int, settled: Sequence[Settlement], step: StepReport | None, seconds: float, window: Sequence[TickReport]
) -> TickReport:
    """A batch as metrics show it."""
    teams = []
    for team in sorted({s.turn.team for s in settled}):
        mine = [s for s in settled if s.turn.team == team]
        total = sum(s.reward.total or 0.0 for s in mine)
        teams.append(TeamReport(
            team=team, replies=len(mine), valid_replies=len(mine), settled=len(mine), reward_mean=total / len(mine),
            reward_parts={}, kept_replies=0, action_counts={}, reply_tokens=sum(len(s.turn.reply_ids) for s in mine),
        ))  # fmt: skip
    report = TickReport(
        tick=batch, teams=tuple(teams), steps=(step,) if step is not None else (), sampled_tokens=0,
        prompt_tokens=sum(len(s.turn.prompt_ids) for s in settled), sampling_seconds=0.0, seconds=seconds,
    )  # fmt: skip
    return replace(report, alarms=collapse_alarms([*window, report]))
