"""Tiny random checkpoints of pooling models, for tests against transformers. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .checkpoints import roughen, write_tokenizer
from .families import FAMILIES, Family

_TOKENS = 512
_ENCODER: Mapping[str, Any] = {
    "vocab_size": _TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
    "num_labels": 3,
}
_BERT: Mapping[str, Any] = {**_ENCODER, "max_position_embeddings": 128, "pad_token_id": 0}
_ROBERTA: Mapping[str, Any] = {**_ENCODER, "type_vocab_size": 1}
_ELECTRA: Mapping[str, Any] = {**_BERT, "embedding_size": 32}
_DISTILBERT: Mapping[str, Any] = {
    "vocab_size": _TOKENS,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "num_labels": 3,
}
#: Windows of 16 tokens on both sides in two layers of three.
_MODERNBERT: Mapping[str, Any] = {
    **_BERT,
    "num_hidden_layers": 4,
    "local_attention": 32,
    "initializer_cutoff_factor": 2.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_DECODER: Mapping[str, Any] = {**FAMILIES["qwen3"].config, "num_labels": 3}
_QWEN2: Mapping[str, Any] = {**FAMILIES["qwen2"].config, "num_labels": 1}

POOLING_FAMILIES: Mapping[str, Family] = {
    "bert": Family("BertModel", "bert", _BERT),
    "bert-classes": Family("BertForSequenceClassification", "bert", _BERT),
    "bert-reranker": Family("BertForSequenceClassification", "bert", {**_BERT, "num_labels": 1}),
    "roberta": Family("RobertaModel", "roberta", _ROBERTA),
    "roberta-classes": Family("RobertaForSequenceClassification", "roberta", _ROBERTA),
    "xlm-roberta": Family("XLMRobertaModel", "xlm-roberta", _ROBERTA),
    "xlm-roberta-reranker": Family("XLMRobertaForSequenceClassification", "xlm-roberta", {**_ROBERTA, "num_labels": 1}),
    "bert-tokens": Family("BertForTokenClassification", "bert", _BERT),
    "roberta-tokens": Family("RobertaForTokenClassification", "roberta", _ROBERTA),
    "xlm-roberta-tokens": Family("XLMRobertaForTokenClassification", "xlm-roberta", _ROBERTA),
    "distilbert": Family("DistilBertModel", "distilbert", _DISTILBERT),
    "distilbert-classes": Family("DistilBertForSequenceClassification", "distilbert", _DISTILBERT),
    "distilbert-tokens": Family("DistilBertForTokenClassification", "distilbert", _DISTILBERT),
    "electra": Family("ElectraModel", "electra", _ELECTRA),
    "electra-classes": Family("ElectraForSequenceClassification", "electra", _ELECTRA),
    "electra-tokens": Family("ElectraForTokenClassification", "electra", {**_ELECTRA, "embedding_size": 64}),
    "modernbert": Family("ModernBertModel", "modernbert", _MODERNBERT),
    "modernbert-biases": Family(
        "ModernBertModel", "modernbert", {**_MODERNBERT, "norm_bias": True, "attention_bias": True, "mlp_bias": True}
    ),
    "modernbert-classes": Family("ModernBertForSequenceClassification", "modernbert", _MODERNBERT),
    "modernbert-mean-reranker": Family(
        "ModernBertForSequenceClassification",
        "modernbert",
        {**_MODERNBERT, "num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "modernbert-tokens": Family("ModernBertForTokenClassification", "modernbert", _MODERNBERT),
    "qwen3": Family("Qwen3Model", "qwen3", _DECODER),
    "qwen3-classes": Family("Qwen3ForSequenceClassification", "qwen3", _DECODER),
    "qwen2-reranker": Family("Qwen2ForSequenceClassification", "qwen2", _QWEN2),
    "gemma": Family("GemmaModel", "gemma", FAMILIES["gemma"].config),
    "gemma-classes": Family("GemmaForSequenceClassification", "gemma", {**FAMILIES["gemma"].config, "num_labels": 3}),
    "glm4-classes": Family("Glm4ForSequenceClassification", "glm4", {**FAMILIES["glm4"].config, "num_labels": 3}),
    "nemotron-reranker": Family(
        "NemotronForSequenceClassification", "nemotron", {**FAMILIES["nemotron"].config, "num_labels": 1}
    ),
    "bloom-classes": Family("BloomForSequenceClassification", "bloom", {**FAMILIES["bloom"].config, "num_labels": 3}),
    "opt-350m-classes": Family("OPTForSequenceClassification", "opt", {**FAMILIES["opt-350m"].config, "num_labels": 3}),
    "gpt-neox-reranker": Family(
        "GPTNeoXForSequenceClassification", "gpt_neox", {**FAMILIES["gpt-neox"].config, "num_labels": 1}
    ),
    "llama-classes": Family("LlamaForSequenceClassification", "llama", {**FAMILIES["llama"].config, "num_labels": 2}),
}


def make_pooling_checkpoint(
    folder: Path, family: str, *, seed: int = 0, tokenizer: bool = False, **overrides: Any
) -> Path:
    """Writes a random checkpoint of a row of `POOLING_FAMILIES` into `folder` and returns it.

    `overrides` replace values of the row's configuration. With `tokenizer` a byte-level one is written too, which puts
    a pair of texts as `<bos> first <eos> second <eos>`.
    """
    if family not in POOLING_FAMILIES:
        raise ValueError(f"no pooling family {family!r}; there are: {', '.join(POOLING_FAMILIES)}")
    row = POOLING_FAMILIES[family]
    values = {**row.config, "initializer_range": 0.2, **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(row, values)
        roughen(model, row.embedding_scale)
    model.save_pretrained(folder)
    if tokenizer:
        write_pair_tokenizer(folder)
    return folder


def _model(row: Family, values: Mapping[str, Any]) -> Any:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    config = AutoConfig.for_model(row.model_type, architectures=[row.architecture], **values)
    auto = AutoModel
    if row.architecture.endswith("Classification"):
        of_tokens = row.architecture.endswith("ForTokenClassification")
        auto = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    return auto.from_config(config, dtype=torch.float32)


def write_pair_tokenizer(folder: Path) -> None:
    """The byte-level tokenizer of tests, with special tokens around a text and between two."""
    from tokenizers import Tokenizer, processors

    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <eos> $B:1 <eos>:1",
        special_tokens=[("<bos>", 1), ("<eos>", 2)],
    )
    tokenizer.save(str(path))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
