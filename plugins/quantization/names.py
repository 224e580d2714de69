"""Which layers a list in a quantization_config means. One matcher for the spellings of all formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


class Names:
    """Names of modules, as lists of files give them: whole, by their end or a part of them, as glob or as "re:…".

    A name stands for a layer, and for all layers in it. `renames` are the model's, so that names of files and of layers
    both count. A name is a run of whole words of a layer's, with `parts` (as AWQ takes them) of any characters.
    """

    def __init__(self, names: Iterable[str], renames: Sequence[tuple[str, str]] = (), *, parts: bool = False) -> None:
        self._parts = parts
        given = [str(name) for name in names]
        self._patterns = [re.compile(name[3:]) for name in given if name.startswith("re:")]
        plain = [name for name in given if not name.startswith("re:")]
        renamed = [_renamed(name, renames) for name in plain]
        self._names = tuple(dict.fromkeys(name.removesuffix(".weight") for name in (*plain, *renamed)))

    def __contains__(self, layer: str) -> bool:
        """Whether the layer `layer` is meant."""
        if any(pattern.match(layer) for pattern in self._patterns):
            return True
        return any(self._means(name, layer) for name in self._names)

    def _means(self, name: str, layer: str) -> bool:
        if any(sign in name for sign in "*?["):
            return fnmatchcase(layer, name)
        if self._parts:
            return name in layer
        return f".{name}." in f".{layer}."


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name
