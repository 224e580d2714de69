"""The ops that a platform may override: the names of `frame.core.ops`, found on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core import ops as _home

if TYPE_CHECKING:
    from .core.ops import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_home, name)
    except AttributeError:
        try:
            return import_module(f".core.ops.{name}", __package__)
        except ModuleNotFoundError as error:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error


def __dir__() -> list[str]:
    return dir(_home)
