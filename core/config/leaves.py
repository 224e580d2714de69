"""The settings of the tree by name, each as a `Leaf`, from which flags, keyword arguments and docs are made."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from .section import Section
from .tree import FrameConfig

LeafKind = Literal["bool", "int", "float", "text", "choice", "list", "mapping"]
_KINDS: dict[Any, LeafKind] = {
    bool: "bool", int: "int", float: "float", str: "text", Literal: "choice", list: "list", Mapping: "mapping",
}  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """One setting. `choices` are the values of kind "choice"."""

    section: str
    name: str
    kind: LeafKind
    help: str
    default: Any
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")


@cache
def leaves() -> Mapping[str, Leaf]:
    """Returns every setting by its name, in the order of the tree. No two sections have a setting of one name."""
    table: dict[str, Leaf] = {}
    for section, group in _groups().items():
        for name, field in group.model_fields.items():
            annotation: Any = field.annotation
            if get_origin(annotation) in (typing.Union, types.UnionType):  # X | None
                annotation = get_args(annotation)[0]
            kind = _KINDS[get_origin(annotation) or annotation]
            default = field.get_default(call_default_factory=True, validated_data={})
            choices = get_args(annotation) if kind == "choice" else ()
            table[name] = Leaf(section, name, kind, field.description or "", default, choices)
    return table


@cache
def sections() -> Mapping[str, str]:
    """Section name → what it is about."""
    return {name: (group.__doc__ or "").strip() for name, group in _groups().items()}


def _groups() -> dict[str, type[Section]]:
    """The sections of the tree by name; its other field, `plugin`, holds no setting of frame's."""
    fields = {name: field.annotation for name, field in FrameConfig.model_fields.items()}
    return {name: kind for name, kind in fields.items() if isinstance(kind, type) and issubclass(kind, Section)}
