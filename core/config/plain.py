"""The configuration as plain values, the form in which it is sent to other processes."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticSerializationError

from .errors import ConfigError
from .tree import FrameConfig


def to_plain(config: FrameConfig) -> dict[str, Any]:
    """The configuration as JSON values; raises `ConfigError` for a value that has none, such as a local class."""
    try:
        return config.model_dump(mode="json")
    except PydanticSerializationError as error:
        reason = str(error).removeprefix("Error serializing to JSON: ").rpartition("ValueError: ")[2]
        raise ConfigError(f"the configuration cannot be given to another process: {reason}") from None
