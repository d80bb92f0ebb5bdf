"""What ``sparring serve``, ``log`` and ``rollback`` do: settings and runs on one side, servers on the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.config_live import LogConfig, RollbackConfig, ServeIntakeConfig, ServeMarketConfig, ServeModelConfig
from sparring.errors import ConfigError, SparringError
from sparring.http import serve, token_from
from sparring.publishing import Follower, Publication, current, rollback
from sparring.rundir import find_run

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from sparring.policies.causal_lm import CausalLM


def serve_model(config: ServeModelConfig) -> None:
    """``sparring serve model``: until it is stopped.

    Raises:
        ConfigError, ModelError, CheckpointError: Before it listens.
    """
    from sparring.inference.engine import Engine, use_threads
    from sparring.inference.server import ModelServer, ServerLimits
    from sparring.runs import is_run

    if config.threads is not None:
        use_threads(config.threads)
    token = token_from(config.token_variable)
    run = find_run(config.source) if is_run(config.source) else None
    follower = Follower(run) if run is not None else None
    policy = None
    if run is not None and follower is not None:
        published = follower.poll()
        policy = _published(run, published, config) if published is not None else None
        if follower.trouble is not None:
            print(f"sparring: {follower.trouble}", file=sys.stderr, flush=True)
    if policy is None:
        from sparring.runs import load_policy

        policy = load_policy(config.source, training=False, device=config.device)
    load, unload = (None, None) if config.adapter_root is None else _adapter_loading(policy)
    server = ModelServer(
        policy, alias=config.alias, engine=Engine(most_running=config.most_running, most_waiting=config.most_waiting),
        limits=ServerLimits(most_new_tokens=config.most_new_tokens, adapter_root=config.adapter_root),
        load_adapter=load, unload_adapter=unload,
    )  # fmt: skip
    stop = threading.Event()

    def follow() -> None:
        """Publications are loaded beside, in a thread of their own; what runs goes on."""
        assert run is not None and follower is not None
        told: str | None = None
        while not stop.wait(config.poll_seconds):
            published = follower.poll()
            if published is not None:
                try:
                    server.swap(_published(run, published, config))
                    print(f"serving {published.version}", file=sys.stderr, flush=True)
                except SparringError as error:
                    follower.trouble = f"{published.version} cannot be loaded: {error}; what was served goes on"
            if follower.trouble is not None and follower.trouble != told:
                told = follower.trouble
                print(f"sparring: {told}", file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        thread = threading.Thread(target=follow, name="follower", daemon=True) if follower is not None else None
        if thread is not None:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            await asyncio.to_thread(server.engine.close)

    serve(
        server.app(lifespan=lifespan),
        host=config.host,
        port=config.port,
        token=token,
        rate=config.rate,
        what=server.current.name,
    )


def _published(run: Path, published: Publication, config: ServeModelConfig) -> CausalLM:
    """The weights of a publication, with their version."""
    from sparring.runs import load_policy
    from sparring.types import PolicyVersion

    step = int(published.checkpoint.rpartition("-")[2])
    policy = load_policy(run, step=step, training=False, device=config.device)
    policy.version = PolicyVersion.parse(published.version)
    return policy


def _adapter_loading(base: CausalLM) -> tuple[Any, Any]:
    """How PEFT adapters are put on a model and taken off again."""

    def load(name: str, directory: Path) -> CausalLM:
        return base.load_adapter(name, directory)

    def unload(policy: CausalLM) -> None:
        if policy.adapter_name is not None:
            base.core.remove_adapter(policy.adapter_name)

    return load, unload


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
        ConfigError, CheckpointError: See ``publishing.rollback``.
    """
    run = find_run(config.run)
    before = current(run)
    after = rollback(run, config.to)
    return {
        "serves": after.current.version, "withdrawn": before.current.version if before is not None else "",
        "checkpoint": after.current.checkpoint,
    }  # fmt: skip
