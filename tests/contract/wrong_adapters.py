"""Adapters and resolvers that are wrong in one way each, for the tests of their suites."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from frame.interfaces import AdapterResolver, LinearMethod, LinearSpec, ReadAdapter
from frame.plugins.adapters.lora import AdaptedLinear, LoraAdapters


class _Always(AdaptedLinear):
    def apply(self, layer, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(layer, x, bias) + 1


class Always(LoraAdapters):
    """Adds something to every token."""

    def linear(self, prefix: str, spec: LinearSpec, inner: LinearMethod) -> LinearMethod:
        return _Always(self, spec, inner, self._setup)


class Blind(LoraAdapters):
    """Reads anything."""

    def read(self, folder: Path) -> ReadAdapter:
        return ReadAdapter("", {})


class Raising(AdapterResolver):
    """Raises for names that no file can have."""

    def resolve(self, name: str) -> Path | None:
        return Path("/absent", name) if Path("/absent", name).is_file() else None


class Anything(AdapterResolver):
    """Knows every name."""

    def resolve(self, name: str) -> Path | None:
        return Path("/tmp")


class Certain(AdapterResolver):
    """Raises for a name that it does not know."""

    def resolve(self, name: str) -> Path | None:
        return {"an-adapter": self.options.root}[name] if name.isprintable() and "-" in name else None


class Anywhere(AdapterResolver):
    """Gives whatever lies below its root under the name."""

    def resolve(self, name: str) -> Path | None:
        known = {path.name: path for path in self.options.root.iterdir()}
        return known.get(name)


class Textual(AdapterResolver):
    """Gives the name of a folder for a folder."""

    def resolve(self, name: str) -> Path | None:
        return str(self.options.root / name) if name == "an-adapter" else None  # type: ignore[return-value]
