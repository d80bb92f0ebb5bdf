"""What a language model will need in memory, worked out from its configuration before a byte of it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.errors import ModelError

GIB = 1024**3
FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes, by what takes them.

    >>> sizes = dict(weights=40, gradients=40, optimizer=80, activations=0, logits=0, reference=0)
    >>> MemoryEstimate(parameters=10, **sizes).total
    160
    """

    parameters: int
    """How many numbers the model has (not bytes); tied weights count once."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What one micro-batch keeps for its backward pass."""
    logits: int
    """Logits and their gradient at the positions of one micro-batch that are worth one, a quarter of it at most."""
    reference: int
    """The first weights, if kept for a KL term."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.reference

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations", "logits", "reference")
        parts = ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in names if getattr(self, name))
        return f"{self.total / GIB:.2f} GiB ({parts})"


def count_parameters(config: Any) -> tuple[int, int]:
    """Numbers in a model of this transformers configuration, and in its linear layers' matrices; allocates nothing.

    Raises:
        ModelError: transformers has no causal language model of this configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    maker: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = maker.from_config(config)
            model.tie_weights()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"not a causal language model that transformers can build: {error}") from error
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return sum(p.numel() for p in model.parameters()), linear


def memory_estimate(
    config: Any,
    *,
    lora_rank: int | None = None,
    adapters: int = 1,
    micro_batch_tokens: int = 8192,
    gradient_checkpointing: bool = False,
    keep_reference: bool = False,
    training: bool = True,
    optimizer_values: int = 2,
) -> MemoryEstimate:
    """Estimate for full fine-tuning (``lora_rank`` None) or LoRA on all linear layers, in fp32 master weights.

    Activations follow the usual decoder block: per token and layer some 10 hidden vectors, 4 of the MLP's width and the
    keys and values; with gradient checkpointing one hidden vector a layer and one whole layer.

    Args:
        config: A transformers configuration.
        lora_rank: Rank of the adapters, or None to train all weights.
        adapters: How many adapters share the base.
        micro_batch_tokens: Token positions of one forward pass.
        gradient_checkpointing: Layers are computed again in the backward pass.
        keep_reference: The first weights are kept beside the present ones.
        training: False for a model that only replies.
        optimizer_values: Numbers the optimiser keeps for each trained one (AdamW: 2).
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    parameters, linear = count_parameters(config)
    hidden = int(getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 768)
    layers = int(getattr(text, "num_hidden_layers", 0) or getattr(text, "n_layer", 0) or 12)
    inner = int(getattr(text, "intermediate_size", 0) or getattr(text, "n_inner", 0) or 4 * hidden)
    heads = int(getattr(text, "num_attention_heads", 0) or getattr(text, "n_head", 0) or 1)
    kv_heads = int(getattr(text, "num_key_value_heads", 0) or heads)
    head_size = int(getattr(text, "head_dim", 0) or hidden // heads)
    trained = parameters
    if lora_rank is not None:
        # A matrix (a, b) gets rank * (a + b) numbers; a + b >= 2 sqrt(ab), and some 2.5 sqrt(ab) for an MLP's.
        matrices = max(7 * layers, 1)
        trained = int(adapters * lora_rank * 2.5 * matrices * (linear / matrices) ** 0.5)
    per_layer = 10 * hidden + 4 * inner + 4 * kv_heads * head_size
    kept_layers = hidden * layers + per_layer if gradient_checkpointing else per_layer * layers
    weights = parameters + (trained if lora_rank is not None else 0)
    if not training:
        trained, kept_layers = 0, per_layer
    return MemoryEstimate(
        parameters=parameters,
        weights=FP32 * weights,
        gradients=FP32 * trained,
        optimizer=FP32 * optimizer_values * trained,
        activations=FP32 * micro_batch_tokens * kept_layers,
        logits=2 * FP32 * (micro_batch_tokens // 4) * int(text.vocab_size) if training else 0,
        reference=FP32 * trained if keep_reference else 0,
    )


def available_memory(device: str = "cpu") -> int | None:
    """Bytes that can still be had: on the GPU, or in RAM within the container's limit; None where nothing tells."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            found.append(int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return max(min(found), 0) if found else None


def refuse_if_too_large(estimate: MemoryEstimate, available: int | None, *, model: str, device: str) -> None:
    """Raises:
    ModelError: The estimate exceeds what is available; the message names what would help.
    """
    if available is None or estimate.total <= available:
        return
    if estimate.weights > available:
        fix = "even its weights do not fit: take a smaller model or a machine with more memory"
    else:
        fix = "train a LoRA adapter (lora.rank), turn on gradient_checkpointing, or lower micro_batch_tokens"
    place = "RAM" if device == "cpu" else f"memory on {device}"
    raise ModelError(f"{model} needs about {estimate} and {available / GIB:.2f} GiB of {place} is free: {fix}")
