"""The Hugging Face configuration of a text model, read from config.json as far as that goes.

transformers' configuration classes know each family's defaults and older spellings, but importing the first of them
takes longer than everything else that starts a small engine. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

#: Transformers' classes change these on reading, so their value in the file is not the attribute's.
_REWRITTEN = frozenset({"dtype", "torch_dtype", "rope_scaling", "rope_theta", "auto_map", "quantization_config"})
#: A file with `rope_parameters` has these inside of it, or not at all.
_IN_ROPE_PARAMETERS = frozenset({"partial_rotary_factor", "original_max_position_embeddings"})
#: Model types that turn whole heads by one table: what an old file's `rope_theta` and `rope_scaling` say is all of it.
_PLAIN_ROPE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2"})
#: What files of these model types leave out where the class's default is meant.
_FAMILY_DEFAULTS = {name: {"use_sliding_window": False} for name in ("qwen2", "qwen3", "qwen3_moe")}


class ModelConfig:
    """Attributes of a model's configuration: `values` of config.json, and from transformers what is not among them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {**_FAMILY_DEFAULTS.get(values.get("model_type", ""), {}), **values}

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
        """`rope_parameters` from a file that says it in the old form; None where transformers must be asked."""
        values = self._values
        if values.get("model_type") not in _PLAIN_ROPE or "rope_parameters" in values or not values.get("rope_theta"):
            return None
        scaling = dict(values.get("rope_scaling") or {})
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        return {**scaling, "rope_theta": values["rope_theta"]}

    @cached_property
    def complete(self) -> Any:
        """Transformers' own object; a plain one for model types that it lacks."""
        from transformers import AutoConfig, PretrainedConfig

        values = dict(self._values)
        model_type = values.pop("model_type", "")
        try:
            return AutoConfig.for_model(model_type, **values)
        except ValueError:
            return PretrainedConfig.from_dict({**values, "model_type": model_type})
