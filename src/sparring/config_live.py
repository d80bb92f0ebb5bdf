"""Settings of what runs beside others: servers, the log, and the loop that learns from what comes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparring.config import (
    CheckpointSettings,
    Device,
    LoraSettings,
    above_zero,
    at_least,
    check_common,
    check_lora,
    check_sampling,
)
from sparring.errors import ConfigError
from sparring.learning.settings import (
    AdvantageSettings,
    GateSettings,
    LossSettings,
    OptimizerSettings,
    check_gate_and_loss,
)
from sparring.settings_io import Scalar, check_types
from sparring.types import SamplingSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeModelConfig:
    """``sparring serve model SOURCE``: a model behind an OpenAI-compatible address; new versions without a pause.

    >>> ServeModelConfig(source="tiny").port
    8001
    """

    source: str
    """A run (what it publishes is followed), or a model by name or directory."""
    alias: str = "policy"
    """Model name under which clients get the newest weights; versioned names stay what they are."""
    host: str = "127.0.0.1"
    """Any other address wants token_variable."""
    port: int = 8001
    """0 takes a free one."""
    token_variable: str | None = None
    """Environment variable that holds the token that clients must send."""
    rate: float | None = None
    """Most requests a second, over all clients."""
    most_running: int = 64
    """Requests that are decoded at once."""
    most_waiting: int = 256
    """Requests that wait; more are answered 429."""
    most_new_tokens: int = 4096
    """Longest reply that a request may ask for."""
    cache_megabytes: int = 2048
    """Keys and values of the requests that are decoded, for each version that is in use; who does not fit waits."""
    adapter_root: Path | None = None
    """Directory below which /v1/load_lora_adapter may load (no links, no ..); none refuses all."""
    most_adapters: int = 16
    """Adapters that may be loaded at once."""
    poll_seconds: float = 0.2
    """How often the run's publications are looked at."""
    device: Device = "cpu"
    """Where the model runs."""
    threads: int | None = None
    """CPU threads of the computation; none leaves it to PyTorch."""

    def __post_init__(self) -> None:
        check_types(self)
        _address(self.host, self.port, self.rate)
        check_common(0, self.threads, None)
        for name in ("most_running", "most_waiting", "most_new_tokens", "cache_megabytes", "most_adapters"):
            at_least(name, getattr(self, name), 1)
        above_zero("poll_seconds", self.poll_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeIntakeConfig:
    """``sparring serve intake``: trajectories in over HTTP, each kept once, and a proxy that records every call.

    >>> ServeIntakeConfig(log=Path("live/log.sqlite")).port
    8002
    """

    log: Path
    """The log's SQLite file; it is made where it is missing."""
    upstream: str | None = None
    """Model server behind the proxy, with its /v1: http://127.0.0.1:8001/v1."""
    upstream_token_variable: str | None = None
    """Environment variable that holds that server's token."""
    host: str = "127.0.0.1"
    """Any other address wants token_variable."""
    port: int = 8002
    """0 takes a free one."""
    token_variable: str | None = None
    """Environment variable that holds the token that producers must send."""
    rate: float | None = None
    """Most requests a second, over all clients."""
    most_waiting: int = 1_000_000
    """Trajectories that may wait to be trained; more are answered 429."""
    most_megabytes: int = 64
    """Of one body, also after unpacking."""
    idle_minutes: float = 60.0
    """Sessions of which nothing is heard for so long end by themselves."""

    def __post_init__(self) -> None:
        check_types(self)
        _address(self.host, self.port, self.rate)
        at_least("most_waiting", self.most_waiting, 1)
        at_least("most_megabytes", self.most_megabytes, 1)
        above_zero("idle_minutes", self.idle_minutes)
        if self.upstream is not None and not self.upstream.startswith(("http://", "https://")):
            raise ConfigError(f"upstream is {self.upstream!r}: it must start with http:// or https://")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeMarketConfig:
    """``sparring serve market``: markets over HTTP, for clients of the original contract, and for ``--env URL``.

    >>> ServeMarketConfig().port
    8003
    """

    env_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The market's own settings; a client of /v2 may set others for its own world."""
    host: str = "127.0.0.1"
    """Any other address wants token_variable."""
    port: int = 8003
    """0 takes a free one."""
    token_variable: str | None = None
    """Environment variable that holds the token that clients must send."""
    rate: float | None = None
    """Most requests a second, over all clients."""
    most_worlds: int = 64
    """Markets of /v2 at once; a loop has one for each of its worlds."""
    buffer: int = 10_000
    """Trajectories of a world that are kept for readers."""
    idle_minutes: float = 60.0
    """A market that nobody asked for so long makes room for a new one."""

    def __post_init__(self) -> None:
        check_types(self)
        _address(self.host, self.port, self.rate)
        at_least("most_worlds", self.most_worlds, 1)
        at_least("buffer", self.buffer, 1)
        above_zero("idle_minutes", self.idle_minutes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """``sparring log LOG``: look inside a log of trajectories.

    >>> LogConfig(log=Path("live/log.sqlite")).key is None
    True
    """

    log: Path
    """The SQLite file, or a run's directory."""
    key: str | None = None
    """Show this item."""
    erase: str | None = None
    """Remove the content of all that this producer sent; give confirm too."""
    confirm: bool = False
    """Erasing cannot be undone."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.confirm and self.erase is None:
            raise ConfigError("confirm is set, but there is nothing to confirm: name a producer in erase")


@dataclass(frozen=True, kw_only=True, slots=True)
class RollbackConfig:
    """``sparring rollback RUN``: serve an earlier version again, and withdraw the present one.

    >>> RollbackConfig(run="live").to is None
    True
    """

    run: str
    """The run."""
    to: str | None = None
    """Version, as in v1.20; none takes the one before."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig:
    """``sparring train feed``: learn from trajectories that others made, while the model goes on being served.

    >>> FeedConfig(source="live/log.sqlite").least
    10
    """

    source: str
    """A log (SQLite file), or the address of a Feed API (http://...)."""
    model: str = "tiny"
    """Registered name (`sparring models list`), directory, or Hugging Face name."""
    adapters: Literal["none", "shared"] = "none"
    """Train all weights, or one LoRA adapter."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    least: int = 10
    """Trajectories of a batch; with fewer the loop waits."""
    most: int = 200
    """Trajectories of a batch at most."""
    batches: int | None = None
    """Stop after so many; none goes on until it is stopped."""
    poll_seconds: float = 1.0
    """How often the source is asked when there is too little."""
    identities_minutes: float = 10.0
    """How often the identity map of a Feed API is asked for again."""
    token_variable: str | None = None
    """Environment variable that holds the Feed API's token."""
    publish: bool = True
    """Evaluate each checkpoint, and publish what is not worse; false never publishes."""
    suite_env: str = "market"
    """Environment whose held-out panel judges a candidate."""
    suite_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The environment's own settings, which it checks itself."""
    suite_situations: int = 120
    """Held-out situations that candidate and served version decide."""
    suite_sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(max_new_tokens=64))
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    loss: LossSettings = field(default_factory=lambda: LossSettings(max_version_lag=50))
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=lambda: CheckpointSettings(every=5))
    seed: int = 0
    """Of the gate, the baselines and the suite."""
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
        check_common(self.seed, self.threads, self.run)
        check_sampling(self.suite_sampling)
        check_lora(self.adapters, self.lora)
        check_gate_and_loss(self.gate, self.loss)
        at_least("least", self.least, 1)
        at_least("most", self.most, self.least)
        at_least("suite_situations", self.suite_situations, 1)
        if self.batches is not None:
            at_least("batches", self.batches, 1)
        above_zero("poll_seconds", self.poll_seconds)
        above_zero("identities_minutes", self.identities_minutes)
        if self.advantages.kind == "group":
            raise ConfigError("advantages.kind is 'group': what comes from outside has no groups; take loo or running")


def _address(host: str, port: int, rate: float | None) -> None:
    if not host:
        raise ConfigError("host is empty: give an address, such as 127.0.0.1")
    if not 0 <= port <= 65535:
        raise ConfigError(f"port is {port}: give a number from 0 to 65535")
    if rate is not None:
        above_zero("rate", rate)
