"""What a quantization_config says, checked: one sentence for what is not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def require(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises `ValueError` for a value of the setting `name` that is none of `choices`."""
    if value not in choices:
        raise ValueError(
            f"{name} of the quantization_config is {value!r:.80}; frame reads: {', '.join(map(str, choices))}"
        )


def whole_number(name: str, value: Any) -> int:
    """A size above 0, or 0 for -1, which is all; raises `ValueError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not (value > 0 or value == -1):
        raise ValueError(
            f"{name} of the quantization_config must be a number above 0, or -1 for all, got {value!r:.80}"
        )
    return max(0, value)


def require_tensors(method: str, tensors: Mapping[str, Any], end: str) -> None:
    """Raises `ValueError` where a checkpoint has tensors, and none whose name ends as those of the format do."""
    if tensors and not any(name.endswith(end) for name in tensors):
        raise ValueError(f"the quantization_config says {method}, but no tensor of the checkpoint ends in {end!r}")


def name_list(name: str, value: Any) -> list[str]:
    """A list of names of modules, perhaps absent; raises `ValueError` for anything else."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name} of the quantization_config must be a list of names, got {value!r:.80}")
    return list(value)
