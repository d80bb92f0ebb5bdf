"""What ``sparring serve``, ``log`` and ``rollback`` do: settings and runs on one side, servers on the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.config_live import LogConfig, RollbackConfig, ServeIntakeConfig, ServeMarketConfig, ServeModelConfig
from sparring.errors import CheckpointError, ConfigError, PublicationError, SparringError
from sparring.http import serve, token_from
from sparring.publishing import Follower, Publication, last_good, rollback
from sparring.rundir import find_run

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from sparring.inference.server import ModelServer
    from sparring.policies.causal_lm import CausalLM


def serve_model(config: ServeModelConfig) -> None:
    """``sparring serve model``: until it is stopped.

    Raises:
        ConfigError, ModelError, CheckpointError, PublicationError: Before it listens.
    """
    from sparring.inference.engine import Engine, use_threads
    from sparring.inference.server import ModelServer, ServerLimits
    from sparring.runs import is_run, load_policy

    if config.threads is not None:
        use_threads(config.threads)
    token = token_from(config.token_variable)
    run = find_run(config.source) if is_run(config.source) else None
    follower = Follower(run) if run is not None else None
    policy = _first(run, follower, config) if run is not None and follower is not None else None
    if policy is None:
        policy = load_policy(config.source, training=False, device=config.device)
    takes_adapters = config.adapter_root is not None
    server = ModelServer(
        policy, alias=config.alias,
        engine=Engine(
            most_running=config.most_running, most_waiting=config.most_waiting, cache_bytes=config.cache_megabytes << 20
        ),
        limits=ServerLimits(
            most_new_tokens=config.most_new_tokens, most_adapters=config.most_adapters, adapter_root=config.adapter_root
        ),
        read_adapter=_reader(policy) if takes_adapters else None,
    )  # fmt: skip
    server.trouble = follower.trouble if follower is not None else None
    stop = threading.Event()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if run is not None and follower is not None:
            arguments = (run, follower, server, config, stop)
            threading.Thread(target=_follow, args=arguments, name="follower", daemon=True).start()
        try:
            yield
        finally:
            stop.set()
            await asyncio.to_thread(server.engine.close)

    serve(
        server.app(lifespan=lifespan), host=config.host, port=config.port, token=token, rate=config.rate,
        what=server.current.name,
    )  # fmt: skip


def _say(text: str) -> None:
    print(f"sparring: {text}", file=sys.stderr, flush=True)


def _first(run: Path, follower: Follower, config: ServeModelConfig) -> CausalLM | None:
    """What a run has published; where that is damaged, the last publication that is whole, and says so. None where the
    run's loop publishes nothing: then its newest checkpoint is served.

    Raises:
        PublicationError: Nothing that was published is whole; or nothing was published where publication is guarded.
    """
    from sparring.runs import feed_config, is_feed

    published = follower.poll()
    if published is not None:
        try:
            policy = _published(run, published, config)
            follower.serving(published)
            return policy
        except SparringError as error:
            follower.failed(str(error))
    if follower.trouble is None:
        if is_feed(run) and feed_config(run).publish:
            raise PublicationError(
                f"{run} has published nothing yet, and only what its suite lets through is served: start "
                f"`sparring train feed` first, which publishes the weights it starts from"
            )
        _say(f"{run} publishes nothing: serving its newest checkpoint, until something is published")
        return None
    _say(follower.trouble)
    good = last_good(run)
    if good is None:
        raise PublicationError(f"{follower.trouble}; no earlier publication is whole either")
    _say(f"serving {good.version}, the last publication that is whole")
    return _published(run, good, config)


def _follow(
    run: Path, follower: Follower, server: ModelServer, config: ServeModelConfig, stop: threading.Event
) -> None:
    """Publications are loaded beside what is served, in a thread of their own; what runs goes on."""
    told: str | None = server.trouble
    while not stop.wait(config.poll_seconds):
        published = follower.poll()
        if published is not None:
            try:
                _put(run, published, server, config)
                follower.serving(published)
                _say(f"serving {published.version}")
            except SparringError as error:
                follower.failed(f"{published.version} cannot be loaded: {error}; what was served goes on")
            except Exception as error:  # a bug of ours must not end the following, and not in silence
                follower.failed(f"{published.version} cannot be loaded ({type(error).__name__}: {error})")
        server.trouble = follower.trouble
        if follower.trouble is not None and follower.trouble != told:
            _say(follower.trouble)
        told = follower.trouble


def _put(run: Path, published: Publication, server: ModelServer, config: ServeModelConfig) -> None:
    """Weights of a publication into service. An adapter goes onto the base that is there; a whole model beside it."""
    from sparring.checkpoints import read_checkpoint
    from sparring.runs import tensor_file
    from sparring.types import PolicyVersion

    now, version = server.current.policy, PolicyVersion.parse(published.version)
    if now.adapter_name is None:
        server.swap(_published(run, published, config), version=version)
        return
    state = read_checkpoint(run / published.checkpoint).tensors.get(tensor_file(now.name))
    if state is None:
        raise CheckpointError(f"{published.checkpoint} has no policy {now.name!r}")
    name = f"{now.name}_{published.serial}"

    def put() -> CausalLM:
        """While nothing is decoded: the model's modules change."""
        made = now.add_adapter(name, trainable=False, state=state)
        made.name = now.name
        return made

    server.swap(server.engine.between_steps(put).result(), version=version)


def _published(run: Path, published: Publication, config: ServeModelConfig) -> CausalLM:
    """The weights of a publication, with their version."""
    from sparring.runs import load_policy
    from sparring.types import PolicyVersion

    policy = load_policy(run, step=published.step, training=False, device=config.device)
    policy.version = PolicyVersion.parse(published.version)
    return policy


def _reader(base: CausalLM) -> Callable[[Path], Callable[[str], CausalLM]]:
    """How a PEFT adapter's directory is read, and then put on the model."""
    from sparring.policies.causal_lm import read_adapter

    def read(directory: Path) -> Callable[[str], CausalLM]:
        config, state = read_adapter(directory)
        return lambda name: base.put_adapter(name, config, state, source=directory.name)

    return read


def serve_intake(config: ServeIntakeConfig) -> None:
    """``sparring serve intake``: until it is stopped.

    Raises:
        ConfigError, LogError: Before it listens.
    """
    from sparring.intake.server import Gateway
    from sparring.intake.trajectory_log import TrajectoryLog

    token, key = token_from(config.token_variable), token_from(config.upstream_token_variable)
    with TrajectoryLog(config.log, most_items=config.most_waiting) as log:
        gateway = Gateway(
            log, upstream=config.upstream, upstream_key=key, idle_seconds=60.0 * config.idle_minutes,
            most_bytes=config.most_megabytes << 20,
        )  # fmt: skip
        serve(gateway.app(), host=config.host, port=config.port, token=token, rate=config.rate, what="intake")


def serve_market(config: ServeMarketConfig) -> None:
    """``sparring serve market``: until it is stopped.

    Raises:
        ConfigError: Before it listens.
    """
    from sparring.envs.market.server import MarketServer

    token = token_from(config.token_variable)
    server = MarketServer(
        config.env_settings, most_worlds=config.most_worlds, buffer=config.buffer,
        idle_seconds=60.0 * config.idle_minutes,
    )  # fmt: skip
    serve(server.app(), host=config.host, port=config.port, token=token, rate=config.rate, what="market")


# ------------------------------------------------------------------------------------------------------------ operators


@dataclass(frozen=True, kw_only=True, slots=True)
class LogReport:
    """What a log holds."""

    path: str
    counts: dict[str, int]
    producers: dict[str, dict[str, int]]
    sessions: dict[str, int]
    batches_logged: int
    batches_trained: int
    bytes_waiting: int

    def flat(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def render(self) -> str:
        lines = [self.path, "  " + ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)]
        lines.append(
            f"  batches: {self.batches_logged} logged, {self.batches_trained} trained; {self.bytes_waiting} bytes wait"
        )
        if self.sessions:
            lines.append("  sessions: " + ", ".join(f"{count} {state}" for state, count in self.sessions.items()))
        lines += [
            f"  producer {name}: " + ", ".join(f"{count} {status}" for status, count in found.items())
            for name, found in self.producers.items()
        ]
        return "\n".join(lines)


def look_into_log(config: LogConfig) -> Any:
    """``sparring log``: counts, one item, or an erasure.

    Raises:
        ConfigError: There is no such log, or an erasure was not confirmed.
        LogError: It cannot be read or written.
    """
    from sparring.intake.trajectory_log import TrajectoryLog

    path = config.log / "log.sqlite" if config.log.is_dir() else config.log
    if not path.is_file():
        raise ConfigError(
            f"log is {str(config.log)!r}: there is no log; give its SQLite file, or a run of `train feed`"
        )
    with TrajectoryLog(path) as log:
        if config.key is not None:
            return _item_report(log, config.key)
        if config.erase is not None:
            if not config.confirm:
                held = sum(log.producers().get(config.erase, {}).values())
                raise ConfigError(
                    f"erase would remove what {config.erase!r} sent ({held} items) for ever: add --confirm true"
                )
            return {"erased": log.erase(config.erase), "producer": config.erase}
        newest, trained = log.newest_batch()
        return LogReport(
            path=str(path), counts=log.counts(), producers=log.producers(), sessions=log.sessions(), batches_logged=newest,
            batches_trained=trained, bytes_waiting=log.bytes_waiting(),
        )  # fmt: skip


def _item_report(log: Any, key: str) -> dict[str, Any]:
    import msgspec

    from sparring.intake.wire import decode_body

    found = log.find(key)
    if found is None:
        raise ConfigError(f"key is {key!r}: the log has no such item")
    item, status, reason = found
    row: dict[str, Any] = {
        "number": item.number, "key": item.key, "producer": item.producer, "kind": item.kind, "agent": item.agent,
        "session": item.session or "", "status": status.value, "reason": reason or "", "bytes": len(item.body),
    }  # fmt: skip
    if item.reward is not None:
        row["reward"] = item.reward
    if item.body and item.kind == "turns":
        row["content"] = json.dumps(msgspec.to_builtins(decode_body(item.body)), ensure_ascii=False)
    return row


def roll_back(config: RollbackConfig) -> dict[str, Any]:
    """``sparring rollback``.

    Raises:
        ConfigError, PublicationError: See ``publishing.rollback``.
    """
    from sparring.types import PolicyVersion

    try:
        to = PolicyVersion.parse(config.to) if config.to is not None else None
    except ValueError as error:
        raise ConfigError(f"to: {error}") from error
    after = rollback(find_run(config.run), to=to)
    return {"serves": after.version, "withdrawn": ", ".join(after.withdrawn), "checkpoint": after.checkpoint}
