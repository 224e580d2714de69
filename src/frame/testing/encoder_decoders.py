"""Tiny random checkpoints of models with an encoder and a decoder, for tests against transformers. No downloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .checkpoints import roughen, write_tokenizer
from .families import Family

_IDS: Mapping[str, Any] = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Other heads and layers than sizes suggest; biases that stop growing within the tests' prompts.
_T5: Mapping[str, Any] = {
    **_IDS,
    "d_model": 64,
    "d_kv": 12,
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "n_positions": 256,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "initializer_factor": 3.0,
    "decoder_start_token_id": 0,
}
_GATED: Mapping[str, Any] = {**_T5, "feed_forward_proj": "gated-gelu"}
_BART: Mapping[str, Any] = {
    **_IDS,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 256,
    "init_std": 0.1,
    "decoder_start_token_id": 2,
}

ENCODER_DECODER_FAMILIES: Mapping[str, Family] = {
    "t5": Family("T5ForConditionalGeneration", "t5", _T5, 0.3),
    "t5-gated": Family(
        "T5ForConditionalGeneration", "t5", {**_GATED, "tie_word_embeddings": False}, 0.3, in_matrix=True
    ),
    "mt5": Family("MT5ForConditionalGeneration", "mt5", _GATED, 0.3, in_matrix=True),
    "umt5": Family("UMT5ForConditionalGeneration", "umt5", _GATED, 0.3, in_matrix=True),
    "bart": Family("BartForConditionalGeneration", "bart", {**_BART, "tie_word_embeddings": False}),
    "mbart": Family("MBartForConditionalGeneration", "mbart", {**_BART, "scale_embedding": True, "init_std": 0.4}, 0.3),
}


def make_encoder_decoder(
    folder: Path,
    family: str,
    *,
    tokenizer: bool = False,
    own_head: bool = False,
    forced_bos: int | None = None,
    **overrides: Any,
) -> Path:
    """Writes a random checkpoint of a row of `ENCODER_DECODER_FAMILIES` into `folder` and returns it.

    `overrides` replace values of the row's configuration. With `tokenizer` the byte-level tokenizer of tests is written
    too; with `own_head` the head's weights are not those of the embedding. `forced_bos` is the token with which
    generation_config.json has every output begin.
    """
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    row = ENCODER_DECODER_FAMILIES[family]
    config = AutoConfig.for_model(row.model_type, architectures=[row.architecture], **{**row.config, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        roughen(model, row.embedding_scale)
        if own_head:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.generation_config.forced_bos_token_id = forced_bos
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def continued(folder: Path, encoder: Sequence[int], decoder: Sequence[int], count: int) -> list[int]:
    """What transformers greedily goes on with behind the ids of `decoder`, all of them computed anew for each token."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    ids, read = list(decoder), torch.tensor([list(encoder)])
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=read, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(decoder) :]
