"""What every group of settings is made of: its class, and how a setting is declared."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A group of settings: frozen, and closed to unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


def setting(default: Any, help: str, **bounds: Any) -> Any:
    """Declares a setting: its default, its text in `--help` and the docs, and its bounds as pydantic names them."""
    return Field(default, description=help, **bounds)
