"""Modules whose names are imported on first use, so that importing one light class does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    module: str, package: str, homes: Mapping[str, Iterable[str]], modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of the module called `module`.

    `homes`: a module below `package`, or one that begins with "frame.", → the names that it defines. `modules` are
    modules below `module` that are attributes without an import of their own.
    """
    home = {}
    for place, names in homes.items():
        for name in names:
            home[name] = place if place.startswith("frame.") else f"{package}.{place}"
    listed = sorted(home)
    submodules = frozenset(modules)

    def find(name: str) -> Any:
        if name in home:
            return getattr(import_module(home[name]), name)
        if name in submodules:
            return import_module(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find, lambda: listed, listed
