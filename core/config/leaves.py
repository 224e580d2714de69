"""The settings of the tree by name, each as a `Leaf`, from which flags, keyword arguments and docs are made."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from .errors import ConfigError
from .section import Section
from .tree import FrameConfig

LeafKind = Literal["bool", "int", "float", "text", "choice", "list", "mapping"]


@dataclass(frozen=True)
class Leaf:
    """One setting. `choices` are the values of kind "choice"; `optional`: None is a value."""

    section: str
    name: str
    kind: LeafKind
    help: str
    default: Any
    choices: tuple[str, ...] = ()
    optional: bool = False

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")


@cache
def leaves() -> Mapping[str, Leaf]:
    """Returns every setting by its name, in the order of the tree. No two sections have a setting of one name."""
    table: dict[str, Leaf] = {}
    for section, section_field in FrameConfig.model_fields.items():
        kind = section_field.annotation
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            continue
        for name, field in kind.model_fields.items():
            if name in table:
                raise ConfigError(f"setting {name!r} is in two sections: {table[name].section} and {section}")
            shape, choices, optional = _shape(field.annotation)
            default = field.get_default(call_default_factory=True, validated_data={})
            table[name] = Leaf(section, name, shape, field.description or "", default, choices, optional)
    return types.MappingProxyType(table)


def sections() -> Mapping[str, str]:
    """Section name → what it is about."""
    kinds = {name: field.annotation for name, field in FrameConfig.model_fields.items()}
    return {
        name: (kind.__doc__ or "").strip()
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def _shape(annotation: Any) -> tuple[LeafKind, tuple[str, ...], bool]:
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in get_args(annotation) if argument is not type(None)]
        kind, choices, _ = _shape(inner[0])
        return kind, choices, True
    if origin is Literal:
        return "choice", tuple(str(choice) for choice in get_args(annotation)), False
    if origin is list:
        return "list", (), False
    if origin is Mapping:
        return "mapping", (), False
    kinds: dict[Any, LeafKind] = {bool: "bool", int: "int", float: "float", str: "text"}
    if annotation not in kinds:
        raise ConfigError(f"settings of type {annotation!r} have no flag")
    return kinds[annotation], (), False
