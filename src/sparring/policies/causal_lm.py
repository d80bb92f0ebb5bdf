"""Language models as policies: one shared model, or one base with a named LoRA adapter for each policy that learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from sparring.errors import CheckpointError, ConfigError, ModelError, nearest
from sparring.policies.contract import ScoreRow, TrainablePolicy
from sparring.policies.language_model import LanguageModel
from sparring.policies.loading import load_model
from sparring.policies.memory import MemoryEstimate
from sparring.tokens.chat import ChatTokenizer
from sparring.types import PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Low-rank adapters (Hu et al. 2021) in place of full fine-tuning.

    >>> LoraSettings(rank=8).rank
    8
    """

    rank: int = 16
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get one; ``all-linear`` means all but the output layer."""


class CausalLM:
    """A policy: a language model, or one adapter on it, with a name and a version. A ``TrainablePolicy``.

    Load with :meth:`load`; with several adapters, :meth:`adapter` gives a policy for each, on the same base weights.

    Attributes:
        name: The policy's name.
        version: Which weights; set by the learner after each step.
        chat: The model's chat template and tokenizer.
        core: The model and its forward passes, shared by all adapters.
        adapter_name: The adapter this policy uses; None means the whole model (or, beside adapters, the bare base).
        estimate: What the model was expected to take in memory; None when it was made from a module.
    """

    def __init__(
        self,
        core: LanguageModel,
        chat: ChatTokenizer,
        *,
        name: str = "shared",
        adapter_name: str | None = None,
        version: PolicyVersion | None = None,
        source: str = "",
        estimate: MemoryEstimate | None = None,
    ) -> None:
        rows = int(core.model.get_input_embeddings().weight.shape[0])
        if chat.vocabulary_size > rows:
            raise ModelError(
                f"{source or name}: the tokenizer makes {chat.vocabulary_size} ids and the model knows {rows}: "
                "the tokenizer belongs to another model"
            )
        self.core, self.chat, self.name, self.adapter_name = core, chat, name, adapter_name
        self.version = version or PolicyVersion(incarnation=1, step=0)
        self.source, self.estimate = source, estimate
        self._views: dict[str, CausalLM] = {}
        self._reference: dict[str, Tensor] | None = None
        self._lora: LoraSettings | None = None

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        name: str = "shared",
        device: str = "cpu",
        lora: LoraSettings | None = None,
        adapters: Sequence[str] = (),
        seed: int = 0,
        micro_batch_tokens: int = 8192,
        gradient_checkpointing: bool = False,
        enable_thinking: bool | None = None,
        trust_remote_code: bool = False,
        training: bool = True,
    ) -> CausalLM:
        """Load from a Hugging Face directory or name. For registered names (``tiny``) see ``sparring.models.load``.

        Args:
            source: Directory, or a name on the hub (``HF_HUB_OFFLINE`` respected).
            name: The policy's name.
            device: ``cpu``, ``cuda`` or ``cuda:0``.
            lora: Train adapters and leave the model; None trains all weights.
            adapters: Names of several adapters, each a policy of its own. None with ``lora``: one called ``name``.
            seed: Of the adapters' first weights.
            micro_batch_tokens: Token positions of one forward pass of :meth:`log_probs`.
            gradient_checkpointing: Compute layers again in the backward pass, for less memory.
            enable_thinking: Passed to chat templates that know it.
            trust_remote_code: Run Python that comes with the model. Off unless you ask for it.
            training: False for a model that only replies (a smaller memory estimate, no gradients).

        Raises:
            ModelError: Missing, unreadable, without chat template, or too large for the memory that is free.
            ConfigError: ``adapters`` without ``lora``, or a name that cannot name an adapter.
        """
        if adapters and lora is None:
            raise ConfigError("adapters need LoRA: set lora.rank, or leave the adapters out")
        names = list(adapters) or ([name] if lora is not None else [])
        model, estimate = load_model(
            str(source),
            device=device,
            trust_remote_code=trust_remote_code,
            lora_rank=lora.rank if lora is not None else None,
            adapters=len(names),
            micro_batch_tokens=micro_batch_tokens,
            gradient_checkpointing=gradient_checkpointing,
            training=training,
        )
        chat = ChatTokenizer.from_pretrained(
            source, enable_thinking=enable_thinking, trust_remote_code=trust_remote_code
        )
        core = LanguageModel(
            model,
            micro_batch_tokens=micro_batch_tokens,
            gradient_checkpointing=gradient_checkpointing,
            pad_id=chat.pad_id,
        )
        policy = cls(core, chat, name=name, source=str(source), estimate=estimate)
        policy._lora = lora
        for number, adapter in enumerate(names):
            policy.add_adapter(adapter, seed=seed + number)
        if lora is not None and not adapters:
            policy.adapter_name = name
        if not training:
            for parameter in core.model.parameters():
                parameter.requires_grad_(False)
        return policy

    # Adapters

    def add_adapter(
        self, name: str, *, trainable: bool = True, state: Mapping[str, Tensor] | None = None, seed: int = 0
    ) -> CausalLM:
        """A new adapter on the same base, as a policy. With ``state``, it starts there (a frozen version as opponent).

        Raises:
            ConfigError: The policy was loaded without LoRA, or the name is taken.
            CheckpointError: The state does not fit.
        """
        from peft import LoraConfig, TaskType

        if self._lora is None:
            raise ConfigError("this policy trains the whole model: load it with lora to give it adapters")
        targets = self._lora.target_modules
        config = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=self._lora.rank,
            lora_alpha=self._lora.alpha,  # type: ignore[arg-type]  # PEFT divides it by the rank: a float serves
            lora_dropout=0.0,
            bias="none",
            target_modules=targets if isinstance(targets, str) else list(targets),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.core.add_adapter(name, config, trainable=trainable)
        if state is not None:
            self.adapter(name).load_state(state)
        return self.adapter(name)

    def load_adapter(self, name: str, directory: Path) -> CausalLM:
        """A PEFT adapter from its directory, put on this model beside what is there, as a policy that only replies.

        Raises:
            ModelError: The directory holds no LoRA adapter of this model.
            ConfigError: The name is taken or cannot name an adapter.
        """
        return self.put_adapter(name, *read_adapter(directory), source=str(directory))

    def put_adapter(self, name: str, config: Any, state: Mapping[str, Tensor], *, source: str = "") -> CausalLM:
        """An adapter that was read (:func:`read_adapter`), put on this model; errors as :meth:`load_adapter`."""
        try:
            self.core.add_adapter(name, config, trainable=False)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ModelError(f"{source}: the adapter does not fit this model: {str(error)[:200]}") from error
        view = CausalLM(self.core, self.chat, name=name, adapter_name=name, version=self.version, source=source)
        try:
            view.load_state(state)
        except CheckpointError as error:
            self.core.remove_adapter(name)
            raise ModelError(f"{source}: the adapter does not fit this model: {error}") from error
        return view

    def remove(self) -> None:
        """Take this policy's adapter off the model and free its numbers; the policy is of no use afterwards.

        Raises:
            ConfigError: It has no adapter, or it is gone already.
        """
        if self.adapter_name is None:
            raise ConfigError(f"policy {self.name} has no adapter that could be removed")
        self._views.pop(self.adapter_name, None)
        self.core.remove_adapter(self.adapter_name)

    def adapter(self, name: str) -> CausalLM:
        """The policy of one adapter: the same base, its own trainable parameters, name and version.

        Raises:
            ConfigError: There is no such adapter.
        """
        if name == self.adapter_name:
            return self
        if name not in self.core.adapters:
            raise ConfigError(f"there is no adapter {name!r}{nearest(name, self.core.adapters)}")
        if name not in self._views:
            view = CausalLM(
                self.core, self.chat, name=name, adapter_name=name, version=self.version, source=self.source
            )
            view._lora, view._views, view.estimate = self._lora, self._views, self.estimate
            self._views[name] = view
        return self._views[name]

    def activated(self) -> AbstractContextManager[None]:
        """Within the block the model's forward passes are this policy's."""
        return self.core.activated(self.adapter_name)

    # What the learner needs

    def log_probs(self, rows: Sequence[ScoreRow], *, temperature: float, top_p: float = 1.0) -> Tensor:
        """fp32 log-probs with gradient, shape (sum of K over rows,), rows in order, positions in order; nats.

        They are of the distribution that a sampler with these settings draws from: logits over the temperature (0
        counts as 1), renormalised over the nucleus when ``top_p`` < 1 (the scored token always belongs to it).

        Raises:
            ValueError: Positions are not ascending or outside 1 to T - 1.
        """
        with self.activated():
            return self.core.log_probs(rows, temperature=temperature, top_p=top_p)

    @property
    def shares_prefixes(self) -> bool:
        """Whether :meth:`log_probs` computes what rows share once."""
        return self.core.rows_because is None

    def positions(self, rows: Sequence[ScoreRow]) -> int:
        """Token positions that :meth:`log_probs` runs forward for these rows, padding left out."""
        return self.core.positions(rows)

    def keep_reference(self) -> None:
        """Remember the present weights (of an adapter: its own) as the reference for a KL term."""
        self._reference = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}

    def reference_state(self) -> dict[str, Tensor] | None:
        """The remembered weights for a checkpoint, or None."""
        return None if self._reference is None else dict(self._reference)

    def load_reference(self, state: Mapping[str, Tensor]) -> None:
        """Set the remembered weights from a checkpoint.

        Raises:
            CheckpointError: A name, shape or type differs.
        """
        _check_state(state, self._tensors(), what=f"reference of policy {self.name}")
        self._reference = {name: tensor.detach().to(self.core.device).clone() for name, tensor in state.items()}

    def reference_log_probs(self, rows: Sequence[ScoreRow], *, temperature: float) -> Tensor:
        """As :meth:`log_probs` under the remembered weights, without gradient.

        Raises:
            ConfigError: :meth:`keep_reference` was never called.
        """
        if self._reference is None:
            raise ConfigError(f"policy {self.name} kept no first weights: call keep_reference before training with KL")
        with torch.no_grad(), self._swapped(self._reference):
            return self.log_probs(rows, temperature=temperature)

    @contextmanager
    def _swapped(self, other: Mapping[str, Tensor]) -> Iterator[None]:
        """The policy's tensors with other data within the block. Graphs made outside it are not disturbed, as long as
        no backward pass runs inside."""
        mine = self._tensors()
        kept = {name: tensor.data for name, tensor in mine.items()}
        try:
            for name, tensor in mine.items():
                tensor.data = other[name]
            yield
        finally:
            for name, tensor in mine.items():
                tensor.data = kept[name]

    def trainable_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """By the names that :meth:`state` uses; tied weights once. Empty for the bare base beside adapters."""
        if self.adapter_name is not None:
            named = self.core.adapter_parameters(self.adapter_name)
        elif self.core.adapters:
            named = {}
        else:
            named = dict(self.core.model.named_parameters())
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def matrix_names(self) -> list[str]:
        """Names of the trainable 2-D weights of linear layers, apart from embeddings, output layer and norms."""
        head, embedding = self.core.model.get_output_embeddings(), self.core.model.get_input_embeddings()
        tied = {id(layer.weight) for layer in (head, embedding) if layer is not None}
        linear = {
            id(module.weight)
            for module in self.core.model.modules()
            if isinstance(module, torch.nn.Linear) and id(module.weight) not in tied and module.weight.ndim == 2
        }
        return [name for name, parameter in self.trainable_parameters().items() if id(parameter) in linear]

    @property
    def parameter_count(self) -> int:
        """Numbers in the model, the adapters apart; tied weights once."""
        return sum(p.numel() for name, p in self.core.model.named_parameters() if "lora_" not in name)

    @property
    def trainable_count(self) -> int:
        """Numbers that this policy trains."""
        return sum(p.numel() for p in self.trainable_parameters().values())

    # State

    def _tensors(self) -> dict[str, Tensor]:
        if self.adapter_name is not None:
            return dict(self.core.adapter_parameters(self.adapter_name))
        if self.core.adapters:
            return {
                f"{adapter}/{name}": parameter
                for adapter in self.core.adapters
                for name, parameter in self.core.adapter_parameters(adapter).items()
            }
        model = self.core.model
        kept = set(model.state_dict())  # leaves out buffers that are not saved
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
        return {**dict(model.named_parameters()), **buffers}

    def state(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Weights by stable name, on the CPU. Without ``copy`` they are the live ones on a CPU: write them out at once.

        The whole model's; or the adapter's own, under PEFT's file names, so that it can be loaded as any adapter of the
        same shape; or, on the base beside several adapters, all of theirs as ``adapter/name``.
        """
        return {name: tensor.detach().to("cpu", copy=copy) for name, tensor in self._tensors().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights in. All is checked before anything is changed.

        Raises:
            CheckpointError: A name, shape or type differs; the message names the first.
        """
        mine = self._tensors()
        _check_state(state, mine, what=f"policy {self.name}")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(state[name])

    def fingerprint(self) -> tuple[PolicyVersion, int]:
        """Differs from before whenever the weights have been written to: version, and torch's count of writes."""
        return self.version, sum(tensor._version for tensor in self._tensors().values())

    # Saving as others read it

    def save_model(self, directory: Path) -> None:
        """Write a Hugging Face model (fp32 safetensors, configuration, tokenizer, chat template), this policy's adapter
        merged into its weights. The live model is not touched."""
        core, plain = self.core, {}
        with torch.no_grad(), self.activated():
            modules = dict(core.model.named_modules())
            for name, tensor in core.model.state_dict().items():
                if "lora_" in name:
                    continue
                value, owner = tensor, modules.get(name.rpartition(".base_layer.")[0])
                if owner is not None and self.adapter_name is not None and name.endswith(".base_layer.weight"):
                    value = tensor + owner.get_delta_weight(self.adapter_name).to(tensor.dtype)
                plain[name.replace(".base_layer.", ".")] = value.detach().cpu().contiguous()
        model_class: Any = type(core.model)
        with torch.device("meta"):
            fresh = model_class(core.model.config)
        fresh.load_state_dict(plain, strict=True, assign=True)
        fresh.tie_weights()
        fresh.generation_config = core.model.generation_config
        fresh.save_pretrained(str(directory))
        self.save_tokenizer(directory)

    def save_adapter(self, directory: Path) -> None:
        """Write a PEFT adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.

        Raises:
            ConfigError: This policy has no adapter.
        """
        from safetensors.torch import save_file

        if self.adapter_name is None:
            adapters = ", ".join(self.core.adapters)
            hint = (
                f"export one of its adapters ({adapters})" if adapters else "it trained the whole model: use format hf"
            )
            raise ConfigError(f"policy {self.name} has no adapter to export: {hint}")
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.state().items()}
        save_file(tensors, str(directory / "adapter_model.safetensors"), metadata={"format": "pt"})
        config = self.core.peft.peft_config[self.adapter_name]
        inference, base = config.inference_mode, config.base_model_name_or_path
        try:
            config.inference_mode = True
            config.base_model_name_or_path = base or self.source
            config.save_pretrained(str(directory))
        finally:
            config.inference_mode, config.base_model_name_or_path = inference, base
        self.save_tokenizer(directory)

    def save_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer and its chat template."""
        tokenizer: Any = self.chat.tokenizer
        tokenizer.save_pretrained(str(directory))


MOST_RANK = 1024
"""Of adapters that come as files: what they claim is allocated before their tensors are compared with it."""


def read_adapter(directory: Path) -> tuple[Any, dict[str, Tensor]]:
    """A PEFT adapter's configuration and tensors (fp32).

    Raises:
        ModelError: The directory holds no LoRA adapter that can be read.
    """
    from peft import LoraConfig
    from safetensors.torch import load_file

    if not (directory / "adapter_model.safetensors").is_file():
        raise ModelError(f"{directory}: no adapter_model.safetensors in it; give a PEFT adapter's directory")
    try:
        config = LoraConfig.from_pretrained(str(directory))
        state = {
            name: tensor.float() for name, tensor in load_file(str(directory / "adapter_model.safetensors")).items()
        }
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ModelError(f"{directory}: the adapter cannot be read: {str(error)[:200]}") from error
    if type(config.r) is not int or not 1 <= config.r <= MOST_RANK:
        raise ModelError(f"{directory}: the adapter's rank is {config.r!r}; this server takes 1 to {MOST_RANK}")
    return config, state


def as_trainable(policy: CausalLM) -> TrainablePolicy:
    """The same object; here so that the type checker holds the class to its contract."""
    return policy


def _check_state(state: Mapping[str, Tensor], mine: Mapping[str, Tensor], *, what: str) -> None:
    for name in mine:
        if name not in state:
            raise CheckpointError(f"checkpoint of {what} lacks {name}{nearest(name, state) if len(state) < 50 else ''}")
    for name, tensor in state.items():
        if name not in mine:
            raise CheckpointError(f"checkpoint of {what} has {name}, which the model does not know")
        if tensor.shape != mine[name].shape:
            shapes = f"shape {tuple(tensor.shape)}, the model needs {tuple(mine[name].shape)}"
            raise CheckpointError(f"checkpoint of {what}: {name} has {shapes}")
        if tensor.dtype != mine[name].dtype:
            raise CheckpointError(f"checkpoint of {what}: {name} is {tensor.dtype}, the model needs {mine[name].dtype}")
