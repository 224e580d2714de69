"""The Hugging Face configuration of a text model: config.json, completed by transformers only where that is needed.

The configuration classes of transformers know each family's defaults and older spellings, but importing the first one
takes longer than everything else in the start of a small engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

#: Keys whose values transformers' classes change while reading them, so that the attribute differs from the file.
_REWRITTEN = frozenset(
    {"dtype", "torch_dtype", "rope_scaling", "rope_theta", "auto_map", "quantization_config", "attn_config"}
)
#: Keys that a file with `rope_parameters` has inside of those, or not at all.
_IN_ROPE_PARAMETERS = frozenset({"partial_rotary_factor", "original_max_position_embeddings"})
#: Model types that rotate whole heads by one table, for which `rope_theta` and `rope_scaling` of old files are enough.
_PLAIN_ROPE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2"})
#: Model types whose files leave out keys that have the class's default → these keys.
_FAMILY_DEFAULTS = {
    **{name: {"use_sliding_window": False} for name in ("qwen2", "qwen3", "qwen3_moe")},
    "minicpm": {"tie_word_embeddings": True},
}
#: Model types of no class in transformers → usual names of facts → what their files call these.
_NAMES = {
    "exaone": {
        "num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function",
    },
    "baichuan": {"num_key_value_heads": "num_attention_heads", "max_position_embeddings": "model_max_length"},
}  # fmt: skip


def _with_floats(value: Any) -> Any:
    """`value` with the numbers that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(one) for key, one in value.items()}
    return [_with_floats(one) for one in value] if isinstance(value, list) else value


#: Model types that transformers lacks → the one whose class reads their files.
_READ_AS = {"kimi_k2": "deepseek_v3"}


class ModelConfig:
    """The configuration of a model: its attributes are `values` of config.json; transformers gives missing ones."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        kind = values.get("model_type", "")
        usual = {name: values[old] for name, old in _NAMES.get(kind, {}).items() if old in values}
        self._values = {**_FAMILY_DEFAULTS.get(kind, {}), **usual, **_with_floats(values)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # null stands for a default that the class computes
        if self._values.get(name) is not None and name not in _REWRITTEN:
            return self._values[name]
        old_rope = self._old_rope()
        if name == "rope_parameters" and old_rope is not None:
            return old_rope
        if name in _IN_ROPE_PARAMETERS and (old_rope is not None or "rope_parameters" in self._values):
            raise AttributeError(f"the configuration has no {name!r}")
        return getattr(self.complete, name)

    def _old_rope(self) -> dict[str, Any] | None:
        """Returns `rope_parameters` made from the old keys of a file; None where only transformers can."""
        values = self._values
        if values.get("model_type") not in _PLAIN_ROPE or "rope_parameters" in values or not values.get("rope_theta"):
            return None
        scaling = dict(values.get("rope_scaling") or {})
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        return {**scaling, "rope_theta": values["rope_theta"]}

    @cached_property
    def complete(self) -> Any:
        """The object of transformers; a plain one for model types that it lacks."""
        from transformers import AutoConfig, PretrainedConfig

        values = dict(self._values)
        model_type = values.pop("model_type", "")
        model_type = _READ_AS.get(model_type, model_type)
        try:
            return AutoConfig.for_model(model_type, **values)
        except ValueError:
            return PretrainedConfig.from_dict({**values, "model_type": model_type})
