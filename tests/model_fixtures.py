"""A random tiny Llama with grouped-query attention, and a byte-level tokenizer with a chat template; pad = EOS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["buy sell hold market price cash secret canary honest scam withdraw 0123456789"] * 4


def make_tokenizer(template: str | None = CHATML, *, adds_bos: bool = True) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    if adds_bos:  # as many real tokenizers do: calling them on text puts a BOS in front
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    if template is not None:
        fast.chat_template = template
    return fast


def make_model(seed: int = 0, vocab_size: int = 320) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.3,  # far from uniform, so that mistakes show
    )
    return LlamaForCausalLM(config).eval()


def save_model(directory: Path, seed: int = 0) -> Path:
    make_model(seed).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
