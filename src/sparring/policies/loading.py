"""Opening a Hugging Face model, with errors that say what is wrong: no pickle, no remote code, no random weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from sparring.errors import ModelError
from sparring.policies.memory import MemoryEstimate, available_memory, memory_estimate, refuse_if_too_large


def check_directory(source: str) -> None:
    """Refuse a local path that holds no loadable model; a name that is no path passes.

    Raises:
        ModelError: The directory is missing, is no model directory, or has pickled weights only.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise ModelError(f"model directory {source} does not exist")
        return
    if not path.is_dir():
        raise ModelError(f"{source} is a file: name the model's directory")
    if not (path / "config.json").is_file():
        raise ModelError(f"{source} is not a model directory: it has no config.json")
    if any(path.glob("*.safetensors")):
        return
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise ModelError(
            f"{source} has weights as a PyTorch pickle only, which can run code when read: convert them to safetensors "
            "(load where you trust them and save_pretrained)"
        )
    raise ModelError(f"{source} is not a model directory: it has no *.safetensors")


def read_config(source: str, *, trust_remote_code: bool) -> Any:
    """The transformers configuration, every dropout set to 0.

    Raises:
        ModelError: It cannot be found or read.
    """
    from transformers import AutoConfig

    check_directory(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # missing, offline, malformed, unknown type: transformers raises many kinds
        raise ModelError(f"model {source} cannot be read: {_first_line(error)}") from error
    for owner in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and (name.endswith(("dropout", "dropout_prob", "_pdrop", "dropout_rate"))):
                setattr(owner, name, 0.0)
    return config


def load_model(
    source: str,
    *,
    device: str,
    trust_remote_code: bool,
    lora_rank: int | None,
    adapters: int,
    micro_batch_tokens: int,
    gradient_checkpointing: bool,
    training: bool,
) -> tuple[Any, MemoryEstimate]:
    """A causal language model in fp32 on the device, dropout off, and the estimate it was admitted under.

    Raises:
        ModelError: Missing, unreadable, incomplete, or too large for the memory that is free.
    """
    from transformers import AutoModelForCausalLM

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device is {device} but this PyTorch sees no GPU: use device cpu")
    config = read_config(source, trust_remote_code=trust_remote_code)
    estimate = memory_estimate(
        config,
        lora_rank=lora_rank,
        adapters=adapters,
        micro_batch_tokens=micro_batch_tokens,
        gradient_checkpointing=gradient_checkpointing,
        training=training,
    )
    refuse_if_too_large(estimate, available_memory(device), model=source, device=device)
    loader: Any = AutoModelForCausalLM
    try:
        with _no_progress_bars():
            model, report = loader.from_pretrained(
                source,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # safetensors, JSON, OS and shape errors alike end here, each with its own words
        raise ModelError(f"weights of {source} cannot be read: {_first_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        wrong = sorted(str(key) for key in report.get(kind, ()))
        if wrong:
            what = "lack" if kind == "missing_keys" else "have the wrong shape at"
            raise ModelError(f"weights of {source} {what} {wrong[0]} (and {len(wrong) - 1} more)")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.to(device).eval(), estimate


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading from a disk takes a second; transformers' bar would stand in the middle of our own output."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def cache_argument(model: Any) -> str:
    """What the model's forward calls its key-value cache: ``cache``, or ``past_key_values`` in older code."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def head_is_plain(model: Any) -> bool:
    """True when the model's logits are its output layer on its decoder's hidden states, with nothing after (no cap, no
    scale), so that the layer may be run at wanted positions only. Found by trying it."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device).unsqueeze(0) % int(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        whole = model(input_ids=ids, use_cache=False).logits
    return bool(torch.allclose(head(hidden).float(), whole.float(), rtol=1e-4, atol=1e-4))


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
