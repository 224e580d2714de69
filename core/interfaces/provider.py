"""What a plugin offers: light descriptions, loaded before anything heavy is imported.

Knows nothing of loading or choosing; `frame.core.plugin_host.registry` does both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Version of the plugin contract (interfaces + layers + ops and their data classes). A minor adds, a major removes.
API_VERSION = "0.2.dev3"


@dataclass(frozen=True)
class Provider:
    """One thing that a plugin offers under a name of a kind.

    `target` is `"package.module:Class"`, imported only when this provider is chosen. `api` is the range of contract
    versions the plugin was written for, as a version specifier (`">=0.2,<0.3"`). `options` names a pydantic model
    (`"package.module:Class"` or the class) that `--plugin.NAME.FIELD` and the YAML key `plugin.NAME` fill.
    `preference` decides "auto": the highest that supports the case wins, a tie is an error. `aliases` are further
    names under which the same thing is found.
    """

    name: str
    target: str
    api: str
    summary: str = ""
    preference: int = 0
    options: str | type[Any] | None = None
    aliases: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
