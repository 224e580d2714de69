"""Finds out whether plugins can be used on this machine by importing their classes, in a process of its own.

Run as `python -m frame.plugins.commands.plugin_trial KEYS`, JSON of [kind, "package:name"]; prints an object of
"kind package:name" → "" or why not, on its last line.
"""

from __future__ import annotations

import json
import logging
import sys

from frame.settings import PluginError, Registry


def reason_against(registry: Registry, kind: str, name: str) -> str:
    """Why a plugin cannot be used here; "" when it can."""
    try:
        found = registry.resolve(registry.choose(kind, name))
        ask = {"platform": "probe", "grammar": "supports"}.get(kind)
        return (getattr(found, ask)() or "") if ask is not None else ""
    except (Exception, SystemExit) as error:  # a foreign class may raise anything
        cause = " ".join(str(error).split())
        return cause if isinstance(error, PluginError) else f"{type(error).__name__}: {cause}"


def main(keys: list[list[str]]) -> None:
    """Prints the answers."""
    logging.disable(logging.CRITICAL)
    registry = Registry.load()
    print(json.dumps({f"{kind} {name}": reason_against(registry, kind, name) for kind, name in keys}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
