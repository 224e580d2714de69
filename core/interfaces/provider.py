"""`Provider`: the description of a plugin, which is read before the plugin's class is imported."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

#: Version of the plugin contract (interfaces + layers + ops and their data classes). A minor adds, a major removes.
API_VERSION = "0.2.dev50"
#: The version that may change anything, before which a plugin's `api` range must end.
NEXT_MINOR = "0.3"


class PluginError(Exception):
    """A plugin that was asked for is missing or fails; the message is one sentence with cause and remedy.

    `reason` is the message without the plugin's name and package, for sentences that have named both already.
    """

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason


class _OneSentence(type):
    """Says in one sentence which fields of a `Provider` are missing or unknown, where Python raises a `TypeError`."""

    def __call__(cls, *values: Any, **named: Any) -> Any:
        known = {each.name: each for each in fields(cls)}  # type: ignore[arg-type]
        given = {*list(known)[: len(values)], *named}
        required = [name for name, each in known.items() if each.default is each.default_factory is MISSING]
        lacking = [name for name in required if name not in given]
        unknown = sorted(given.difference(known))
        if not lacking and not unknown:
            return super().__call__(*values, **named)
        wrong = [f"lacks {', '.join(lacking)}"] * bool(lacking) + [f"has no field {', '.join(unknown)}"] * bool(unknown)
        name = values[0] if values else named.get("name", "")
        raise PluginError(
            f"provider {name!r} {' and '.join(wrong)}; "
            f"write Provider('NAME', 'package.module:Class', api='>={API_VERSION},<{NEXT_MINOR}')"
        )


@dataclass(frozen=True)
class Provider(metaclass=_OneSentence):
    """A plugin that a package offers under a name; the hook that returns it says of which kind it is.

    `target` is `"package.module:Class"`, imported only when this provider is chosen. `api` is the range of contract
    versions for which the plugin was written, as a version specifier (`">=0.2,<0.3"`). `summary` is one line for
    `frame plugins`. `options` is a pydantic model, or `"package.module:Class"` of one, whose fields
    `--plugin.NAME.FIELD` and the YAML key `plugin.NAME` set. With "auto" the provider of the highest `preference` that
    supports the case is chosen; a tie is an error. `aliases` are further names of it; `tags` are explained with the
    hooks that read them. Raises `PluginError` naming missing and unknown fields.
    """

    name: str
    target: str
    api: str
    summary: str = ""
    preference: int = 0
    options: str | type[Any] | None = None
    aliases: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
