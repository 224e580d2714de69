"""`EngineArgs`: the settings of an engine as one flat data class, under vLLM's names.

Its fields come from the tree (all but the HTTP server's) and from vLLM's arguments that are understood here.
`LLM(**asdict(EngineArgs(...)))` and `LLM(**vars(parser.parse_args()))` both work.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from frame.vllm_names.arguments import TRANSLATIONS
from frame.vllm_names.unused import UNUSED

from .flags import add_foreign_flags, add_setting_flags
from .flat import from_flat
from .leaves import leaves
from .tree import FrameConfig

P = TypeVar("P", bound=argparse.ArgumentParser)


class _Arguments:
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Adds a flag for every field; parsed arguments hold every field, the default where none was typed."""
        engine = [own for own in leaves().values() if own.section != "server"]
        add_setting_flags(parser.add_argument_group("engine"), engine, defaults=True)
        add_foreign_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From parsed arguments; whatever else they hold is left alone."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def create_engine_config(self) -> FrameConfig:
        """The configuration tree; raises `ConfigError` for a value that cannot be."""
        return from_flat({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


if TYPE_CHECKING:

    @dataclasses.dataclass(init=False)
    class EngineArgs(_Arguments):
        """The settings of an engine; None means the default."""

        model: str = ""

        def __init__(self, model: str = "", **settings: Any) -> None: ...

    class AsyncEngineArgs(EngineArgs):
        """The same, for `AsyncLLM`."""

else:

    def _field(name: str, default: Any) -> tuple[str, Any, Any]:
        return name, Any, dataclasses.field(default_factory=lambda: copy.deepcopy(default))

    EngineArgs = dataclasses.make_dataclass(
        "EngineArgs",
        [
            *(_field(own.name, own.default) for own in leaves().values() if own.section != "server"),
            _field("plugin", {}),
            *(_field(name, None) for name in (*TRANSLATIONS, *UNUSED)),
        ],
        bases=(_Arguments,),
        namespace={"__module__": __name__, "__doc__": "The settings of an engine; None means the default."},
    )

    class AsyncEngineArgs(EngineArgs):
        """The same, for `AsyncLLM`."""
