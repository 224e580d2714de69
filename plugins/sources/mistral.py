"""The model source `mistral`: describes a checkpoint in the form of Mistral's own tools by one in transformers' form.

The tokenizer is that of the folder: tekken.json, which mistral-common reads, or tokenizer.json. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frame.interfaces import ModelSource
from frame.settings import ConfigError

from .described import Description, described

_PARAMETERS, _WEIGHTS = "params.json", "consolidated*.safetensors"
_TOKENIZERS = ("tekken.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "SYSTEM_PROMPT.txt")
#: Sizes of params.json → config.json; all must be there.
_SIZES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads", "vocab_size": "vocab_size",
}  # fmt: skip
#: Settings that change what is computed, and that frame does not read of this form.
_UNREAD = ("quantization", "vision_encoder", "multimodal", "llama_4_scaling", "q_lora_rank")
_LENGTHS = ("max_position_embeddings", "max_seq_len")
_END = "</s>"
#: Tokens of a model whose file states no length.
_LENGTH = 32768


class MistralSource(ModelSource):
    """Folders with params.json and consolidated*.safetensors, and without config.json."""

    @classmethod
    def supports(cls, name: str) -> str | None:
        folder = Path(name)
        if not os.path.isdir(folder) or not os.path.isfile(folder / _PARAMETERS) or not any(folder.glob(_WEIGHTS)):
            return f"it is no folder with {_PARAMETERS} and {_WEIGHTS}"
        return "the folder has a config.json" if os.path.isfile(folder / "config.json") else None

    def fetch(self, name: str, revision: str | None, *, weights: bool) -> Path:
        folder = Path(name)
        tokenizers = [folder / file for file in _TOKENIZERS if (folder / file).is_file()]
        files = [folder / _PARAMETERS, *sorted(folder.glob(_WEIGHTS)), *tokenizers]
        return described(files, self.setup.download_dir, _describe)


def _describe(files: Sequence[Path], folder: Path) -> Description:
    del folder
    path = files[0]
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(values).__name__}")
    if unread := [key for key in _UNREAD if values.get(key)]:
        raise ConfigError(
            f"{path} states {unread[0]}, which frame does not read of this form; name a folder in transformers' form"
        )
    try:
        return Description(_settings(values, path), _ends(files))
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} lacks a setting, or has one of a wrong type: {error!r}") from None


def _settings(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """config.json for a model with these parameters; raises `ConfigError` naming one that is missing."""
    for key in _SIZES:
        if not isinstance(values.get(key), int):
            raise ConfigError(f"{path} must state {key} as an integer, got {values.get(key)!r:.80}")
    moe = values.get("moe") or {}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(values.get("rope_theta") or 10000.0)}
    length = next((values[key] for key in _LENGTHS if values.get(key)), _LENGTH)
    if yarn := values.get("yarn"):
        rope |= {"rope_type": "yarn", "factor": float(yarn["factor"]), "beta_fast": float(yarn.get("beta", 32)),
                 "beta_slow": float(yarn.get("alpha", 1)),
                 "original_max_position_embeddings": yarn["original_max_position_embeddings"]}  # fmt: skip
        if not yarn.get("apply_scale", True):
            rope["attention_factor"] = 1.0
    window = values.get("sliding_window")
    settings = {
        "architectures": ["MixtralForCausalLM" if moe else "MistralForCausalLM"],
        "model_type": "mixtral" if moe else "mistral",
        **{_SIZES[key]: values[key] for key in _SIZES},
        "num_key_value_heads": values.get("n_kv_heads") or values["n_heads"],
        "head_dim": values.get("head_dim") or values["dim"] // values["n_heads"],
        "rms_norm_eps": values.get("norm_eps", 1e-5),
        "max_position_embeddings": length,
        "sliding_window": window if isinstance(window, int) else None,
        "tie_word_embeddings": bool(values.get("tied_embeddings", False)),
        "rope_parameters": rope,
        "dtype": "bfloat16",
    }
    if isinstance(window, list):
        raise ConfigError(f"{path} states a sliding_window for each layer, which frame does not read of this form")
    if moe:
        settings |= {"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["num_experts_per_tok"]}
    return settings


def _ends(files: Sequence[Path]) -> list[int]:
    """The end token that a tekken.json names; 2, that of all of Mistral's tokenizers, where it names none."""
    tekken = next((path for path in files if path.name == "tekken.json"), None)
    if tekken is not None:
        try:
            special = json.loads(tekken.read_text(encoding="utf-8")).get("special_tokens") or ()
            return [int(token["rank"]) for token in special if token.get("token_str") == _END] or [2]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{tekken} is no tokenizer of Mistral's: {error!r}") from None
    return [2]
