"""The policies of a run: made as its configuration says, saved in its checkpoints, found again by run, step and name.

Wherever a model can be named, a run can be: ``load_policy("runs/market")`` is its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring import models
from sparring.checkpoints import Checkpoint, latest, read_checkpoint
from sparring.config import LoraSettings, SelfplayConfig, SharedConfig, load_config
from sparring.config_live import FeedConfig
from sparring.errors import CheckpointError, ConfigError, nearest
from sparring.rundir import RUNS, find_run

if TYPE_CHECKING:
    from sparring.policies.acting import ActorWeights
    from sparring.policies.causal_lm import CausalLM

SHARED = "shared"
"""Name of the one policy of a run without adapters per team."""


def policy_name(config: SharedConfig | FeedConfig, team: str) -> str:
    """Which policy plays a team."""
    return team if config.adapters == "per_team" else SHARED


def build_policies(config: SharedConfig | FeedConfig, teams: Sequence[str], **other: Any) -> dict[str, CausalLM]:
    """The run's policies at their start, by name, for the teams that a policy plays.

    ``other`` options of ``CausalLM.load`` (``training``, ``device``) win over the configuration.
    """
    names = sorted({policy_name(config, team) for team in teams})
    options: dict[str, Any] = {
        "device": config.device, "seed": config.seed, "micro_batch_tokens": config.loss.micro_batch_tokens, **other,
    }  # fmt: skip
    if config.adapters == "none":
        return {SHARED: models.load(config.model, name=SHARED, **options)}
    lora = lora_settings(config.lora)
    if config.adapters == "shared":
        return {SHARED: models.load(config.model, name=SHARED, lora=lora, **options)}
    base = models.load(config.model, name="base", lora=lora, adapters=names, **options)
    return {name: base.adapter(name) for name in names}


def build_selfplay_policies(config: SelfplayConfig, **other: Any) -> dict[str, CausalLM]:
    """The policies of a self-play run at their start: ``shared``, or ``generator`` and ``answerer``."""
    names = ["generator", "answerer"] if config.topology == "dual" else [SHARED]
    options: dict[str, Any] = {
        "device": config.device, "seed": config.seed, "micro_batch_tokens": config.loss.micro_batch_tokens, **other,
    }  # fmt: skip
    if config.adapters == "none":
        return {name: models.load(config.model, name=name, **options) for name in names}
    lora = lora_settings(config.lora)
    if config.topology == "shared":
        return {SHARED: models.load(config.model, name=SHARED, lora=lora, **options)}
    base = models.load(config.model, name="base", lora=lora, adapters=names, **options)
    return {name: base.adapter(name) for name in names}


def lora_settings(lora: LoraSettings) -> Any:
    """The settings of a configuration as the policies room takes them."""
    from sparring.policies.causal_lm import LoraSettings as PolicyLora

    return PolicyLora(rank=lora.rank, alpha=lora.alpha)


def tensor_file(name: str) -> str:
    """The file of a policy's weights in a checkpoint."""
    return f"policy-{name}.safetensors"


def restore_policies(policies: Mapping[str, CausalLM], checkpoint: Checkpoint) -> None:
    """Loads every policy's weights; CheckpointError if the checkpoint lacks one or shapes differ."""
    for name, policy in policies.items():
        weights = checkpoint.tensors.get(tensor_file(name))
        if weights is None:
            raise CheckpointError(f"{checkpoint.path}: no policy {name!r} in it; it belongs to another configuration")
        policy.load_state(weights)


def is_run(name: str | Path) -> bool:
    """Whether this is a run's directory, or the name of one under ``runs/``."""
    return any((place / "config.toml").is_file() for place in (Path(name), RUNS / name))


def is_selfplay(run: Path) -> bool:
    """Whether a run is one of self-play, by the settings that only such a run has."""
    return _has_setting(run, "judge_samples")


def is_feed(run: Path) -> bool:
    """Whether a run is one of ``train feed``."""
    return _has_setting(run, "suite_env")


def _has_setting(run: Path, name: str) -> bool:
    import tomllib

    try:
        return name in tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{run / 'config.toml'} cannot be read: {error}") from error


def selfplay_config(run: Path) -> SelfplayConfig:
    """The configuration a self-play run was started with."""
    return load_config(SelfplayConfig, toml=run / "config.toml", overrides=())


def run_config(run: Path) -> SharedConfig:
    """The configuration that a run of ``train shared`` was started with."""
    return load_config(SharedConfig, toml=run / "config.toml", overrides=())


def feed_config(run: Path) -> FeedConfig:
    """The configuration that a run of ``train feed`` was started with."""
    return load_config(FeedConfig, toml=run / "config.toml", overrides=())


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """A run's checkpoint: that of a step, or the newest whole one."""
    directory = run / "checkpoints"
    if step is None:
        found = latest(directory)
        if found is None:
            raise CheckpointError(
                f"{run}: no checkpoint yet; let it run for checkpoint.every ticks, or stop it with Ctrl-C"
            )
        return found
    wanted = directory / f"step-{step:06d}"
    if not wanted.is_dir():
        have = [place.name for place in sorted(directory.glob("step-*"))]
        raise CheckpointError(f"{run}: no checkpoint of step {step} (there are: {', '.join(have) or 'none'})")
    return wanted


def load_policy(name: str | Path, /, *, policy: str | None = None, step: int | None = None, **options: Any) -> CausalLM:
    """A policy to play with: of a run (its newest checkpoint, or that of ``step``), or a model by name or path.

    ``RUN#POLICY`` names one policy of a run that trained several, as ``policy`` does.

    Raises:
        ConfigError: The run has several policies and ``policy`` names none of them.
        CheckpointError, ModelError: See there.
    """
    if policy is None and not is_run(name) and is_run(str(name).rpartition("#")[0] or name):
        name, _, policy = str(name).rpartition("#")
    if not is_run(name):
        return models.load(str(name), **options)
    run = find_run(name)
    checkpoint = read_checkpoint(find_checkpoint(run, step))
    saved = [
        file.removeprefix("policy-").removesuffix(".safetensors")
        for file in checkpoint.tensors
        if file.startswith("policy-")
    ]
    wanted = policy or (saved[0] if len(saved) == 1 else None)
    if wanted not in saved:
        raise ConfigError(
            f"policy: {run} has the policies {', '.join(sorted(saved))}; name one{nearest(str(policy), saved)}"
        )
    if is_selfplay(run):
        built = build_selfplay_policies(selfplay_config(run), **options)
    else:
        config = feed_config(run) if is_feed(run) else run_config(run)
        built = build_policies(config, [wanted] if config.adapters == "per_team" else [SHARED], **options)
    restore_policies({wanted: built[wanted]}, checkpoint)
    return built[wanted]


# Small policies


def load_small_policies(run: str | Path, *, step: int | None = None) -> dict[str, tuple[ActorWeights, int]]:
    """The policies of a run of ``train independent``: by name, a stack's acting weights and the policy's row in it.

    Raises:
        ConfigError: It is no such run.
        CheckpointError: It has no whole checkpoint (of that step).
    """
    import msgspec

    from sparring.policies.actor_critic import POLICIES, SavedPolicies

    place = find_run(run)
    checkpoint = read_checkpoint(find_checkpoint(place, step))
    if POLICIES not in checkpoint.documents:
        raise ConfigError(f"{place} has no small policies: only runs of `sparring train independent` do")
    try:
        stacks = msgspec.msgpack.decode(checkpoint.documents[POLICIES], type=list[SavedPolicies])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{checkpoint.path}: {POLICIES} is of another version ({error})") from error
    found = {}
    for number, saved in enumerate(stacks):
        incarnation = int((place / "incarnation").read_text())
        weights = saved.acting(checkpoint.tensors[f"stack-{number}.safetensors"], incarnation)
        found.update({name: (weights, row) for row, name in enumerate(saved.names)})
    return found


def export_onnx(run: str | Path, out: str | Path, *, policy: str | None = None) -> dict[str, str]:
    """Write small policies of a run as ``OUT/NAME.onnx``, each compared with what it was made from.

    Args:
        run: Directory or name.
        out: Directory; made if it is missing.
        policy: One of them; None writes all.

    Returns:
        File by policy.

    Raises:
        ConfigError: There is no such policy, or the directory holds something already.
        ModelError: A file does not say what its policy says.
    """
    from sparring.policies.onnx_policy import export

    found = load_small_policies(run)
    if policy is not None and policy not in found:
        raise ConfigError(f"policy: {run} has no policy {policy!r}{nearest(policy, found)}")
    directory = Path(out)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"out is {str(out)!r}, which holds something: name a new or empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    written = {}
    for name in [policy] if policy is not None else list(found):
        weights, row = found[name]
        path = directory / f"{name}.onnx"
        export(path, weights, row)
        written[name] = str(path)
    return written
