"""Tiny random Hugging Face checkpoints of the rows in `families`, for tests against transformers. No downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .families import FAMILIES

_SPECIAL = ("<pad>", "<bos>", "<eos>")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    tokenizer: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    **overrides: Any,
) -> Path:
    """Writes a random checkpoint of a row of `FAMILIES` into `folder` and returns it.

    `overrides` replace values of the row's configuration. Weights are large enough that the best token stands out.
    With `tokenizer` a byte-level tokenizer and a chat template are written too.
    """
    if family not in FAMILIES:
        raise ValueError(f"no model family {family!r}; there are: {', '.join(FAMILIES)}")
    from transformers import AutoConfig, AutoModelForCausalLM

    row = FAMILIES[family]
    config = AutoConfig.for_model(
        row.model_type, architectures=[row.architecture], **{**row.config, "initializer_range": 0.2, **overrides}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        roughen(model, row.embedding_scale)
    for name, parameter in model.named_parameters():
        if name.endswith("router.scale"):
            parameter.data.mul_(row.router_scale)
    sharding = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(dtype).save_pretrained(folder, **sharding)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def roughen(model: Any, embedding_scale: float) -> None:
    """Makes norm weights and biases random: at their constant start a model that ignores them would pass."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(embedding_scale)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "bias" in name or (parameter == parameter.flatten()[0]).all():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of routers, for choosing
                buffer.add_(torch.randn_like(buffer) * 0.3)


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level tokenizer of 259 tokens (bytes after <pad>, <bos>, <eos>) and a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
