"""The Hugging Face configuration of a text model: config.json, completed by transformers only where that is needed.

The configuration classes of transformers know each family's defaults and older spellings, but importing the first one
takes longer than everything else in the start of a small engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

#: Keys whose values transformers' classes change while reading them, so that the attribute differs from the file.
_REWRITTEN = frozenset(
    {"dtype", "torch_dtype", "rope_scaling", "rope_theta", "auto_map", "quantization_config", "attn_config"}
)
#: Keys that a file with `rope_parameters` has inside of those, or not at all.
_IN_ROPE_PARAMETERS = frozenset({"partial_rotary_factor", "original_max_position_embeddings"})


@dataclass(frozen=True)
class ConfigReading:
    """What a family's model says of its config.json, where that differs from others or need not be asked of a class.

    `names` are usual names of values → what files of the family call these, `defaults` values that files leave out.
    `read_as` is the model type of transformers whose class completes files of types that transformers lacks, and old
    files that have the values of a text model beside a `vision_config`. In a
    `plain_rope`, one table turns all that is turned, so that `rope_theta` and `rope_scaling` of old files say it all;
    where they have no scaling it is the family's `rope_scaling`.
    Null is the value of names in `nullable`; of others it stands for a default that the class computes.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read_as: str = ""
    plain_rope: bool = False
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    nullable: Sequence[str] = ()


def _with_floats(value: Any) -> Any:
    """`value` with the numbers that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(one) for key, one in value.items()}
    return [_with_floats(one) for one in value] if isinstance(value, list) else value


class ModelConfig:
    """The configuration of a model: its attributes are `values` of config.json; transformers gives missing ones."""

    def __init__(self, values: Mapping[str, Any], reading: ConfigReading | None = None) -> None:
        self._reading = reading = reading or ConfigReading()
        usual = {name: values[old] for name, old in reading.names.items() if old in values}
        self._values = {**reading.defaults, **usual, **_with_floats(values)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._values and name not in _REWRITTEN:
            value = self._values[name]
            if value is not None or name in self._reading.nullable:
                return value
        old_rope = self._old_rope()
        if name == "rope_parameters" and old_rope is not None:
            return old_rope
        if name in _IN_ROPE_PARAMETERS and (old_rope is not None or "rope_parameters" in self._values):
            raise AttributeError(f"the configuration has no {name!r}")
        return getattr(self.complete, name)

    def _old_rope(self) -> dict[str, Any] | None:
        """Returns `rope_parameters` made from the old keys of a file; None where only transformers can."""
        values = self._values
        if not self._reading.plain_rope or "rope_parameters" in values or not values.get("rope_theta"):
            return None
        scaling = dict(values.get("rope_scaling") or self._reading.rope_scaling)
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        return {**scaling, "rope_theta": values["rope_theta"]}

    @cached_property
    def complete(self) -> Any:
        """The object of transformers; a plain one for model types that it lacks."""
        from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

        values = dict(self._values)
        model_type = values.pop("model_type", "")
        if self._reading.read_as and (model_type not in CONFIG_MAPPING or "vision_config" in values):
            model_type = self._reading.read_as
        try:
            return AutoConfig.for_model(model_type, **values)
        except ValueError:
            return PretrainedConfig.from_dict({**values, "model_type": model_type})
