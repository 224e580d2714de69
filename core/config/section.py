"""What every group of settings is made of: its class, and how a setting is declared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A group of settings: frozen, and closed to unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    def contradictions(self) -> Iterable[str]:
        """Returns a sentence for each setting that is wrong beside the others; the first one is the user's error."""
        return ()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for sentence in self.contradictions():
            raise ValueError(sentence)
        return self


def setting(default: Any, help: str, **bounds: Any) -> Any:
    """Declares a setting: its default, its text in `--help` and the docs, and its bounds as pydantic names them."""
    return Field(default, description=help, **bounds)
