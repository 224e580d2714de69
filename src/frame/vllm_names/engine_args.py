"""`EngineArgs`: the settings of an engine as one flat data class, under vLLM's names.

Its fields are the settings of the configuration tree (all but the HTTP server's) and vLLM's arguments that frame
understands. `LLM(**asdict(EngineArgs(...)))` and `LLM(**vars(parser.parse_args()))` both work.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from frame.core.config.flags import add_setting_flags
from frame.core.config.flat import from_flat
from frame.core.config.leaves import leaves
from frame.core.config.tree import FrameConfig

from .arguments import TRANSLATIONS
from .flags import add_foreign_flags
from .unused import UNUSED

P = TypeVar("P", bound=argparse.ArgumentParser)


class _Arguments:
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Adds a flag for every field; parsed arguments hold every field, with its default where no flag was typed."""
        engine = [own for own in leaves().values() if own.section != "server"]
        add_setting_flags(parser.add_argument_group("engine"), engine, defaults=True)
        add_foreign_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Takes the fields from parsed arguments, and ignores what else they hold."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def create_engine_config(self) -> FrameConfig:
        """Returns the configuration tree; raises `ConfigError` for an unknown name or a value out of range."""
        return from_flat({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


if TYPE_CHECKING:

    @dataclasses.dataclass(init=False)
    class EngineArgs(_Arguments):
        """The settings of an engine; None means the default."""

        model: str = ""

        def __init__(self, model: str = "", **settings: Any) -> None: ...

    class AsyncEngineArgs(EngineArgs):
        """The settings of an engine for `AsyncLLM`; equal to `EngineArgs`."""

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
        """The settings of an engine for `AsyncLLM`; equal to `EngineArgs`."""
