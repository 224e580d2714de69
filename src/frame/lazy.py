"""Modules whose names are imported on first use, so that importing one light class does not import torch.

Such a module lists its names once, as imports under `if TYPE_CHECKING:`, for type checkers and for `lazy_names`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import resolve_name
from typing import Any


def lazy_names(
    module: str, modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of the module called `module`, from the imports in its source.

    `modules` are modules below it that are attributes without an import of their own.
    """
    homes = _imports(module)
    listed = sorted(homes)
    submodules = frozenset(modules)

    def find(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        if name in submodules:
            return import_module(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find, lambda: listed, listed


def _imports(module: str) -> dict[str, str]:
    """Name → the module that it is imported from under `if TYPE_CHECKING:`."""
    loader: Any = sys.modules[module].__loader__
    blocks = [node for node in ast.parse(loader.get_source(module)).body if isinstance(node, ast.If)]
    found: dict[str, str] = {}
    for node in (node for block in blocks for node in block.body):
        if isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), module)
            found.update((alias.name, home) for alias in node.names)
    return found
