"""What the plugin contract consists of, as plain data: every public name, its signature, its fields.

Run `python -m tests.snapshots.describe` (or `make snapshots`) to write interfaces.json anew.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import msgspec

SNAPSHOT = Path(__file__).parent / "interfaces.json"
#: What a class inherits from elsewhere is not ours.
_OURS = "frame."


def contract() -> dict[str, Any]:
    """Everything that a plugin may rely on, by area and name."""
    import frame
    from frame import interfaces, layers, ops, settings, testing
    from frame.core.plugin_host.kinds import HOOKS, KINDS

    hooks = {name: str(inspect.signature(hook)) for name, hook in vars(HOOKS).items()}
    return {
        "version": frame.API_VERSION,
        "hooks": hooks,
        "kinds": {name: [kind.hook, kind.interface] for name, kind in KINDS.items()},
        "frame": sorted(frame.__all__),
        "frame.interfaces": _names(interfaces),
        "frame.layers": _names(layers),
        "frame.ops": _names(ops),
        "frame.settings": _names(settings),
        "frame.testing": sorted(testing.__dir__()),
    }


def _names(module: ModuleType) -> dict[str, Any]:
    names = dir(module) if "__dir__" in vars(module) else module.__all__
    found = {name: getattr(module, name) for name in sorted(names) if not name.startswith("_")}
    return {name: _describe(value) for name, value in found.items() if not inspect.ismodule(value)}


def _describe(value: Any) -> Any:
    if inspect.isclass(value):
        return _describe_class(value)
    if inspect.isfunction(inspect.unwrap(value) if callable(value) else value):
        return _signature(value)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _describe_class(kind: type[Any]) -> dict[str, Any]:
    bases = [base.__name__ for base in kind.__bases__ if base.__name__ not in ("object", "Generic", "Protocol")]
    about: dict[str, Any] = {"is": _sort_of(kind), "bases": bases}
    if issubclass(kind, enum.Enum):
        about["members"] = list(kind.__members__)
        return about
    fields = dict(_fields(kind))
    if fields:
        about["fields"] = fields
    members = dict(_members(kind))
    if members:
        about["members"] = members
    return about


def _sort_of(kind: type[Any]) -> str:
    if issubclass(kind, msgspec.Struct):
        return "struct"
    if dataclasses.is_dataclass(kind):
        return "dataclass"
    if getattr(kind, "_is_protocol", False):
        return "protocol"
    if issubclass(kind, enum.Enum):
        return "enum"
    return "abstract class" if inspect.isabstract(kind) else "class"


def _fields(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Annotations as they are written, with defaults; those of bases of ours included."""
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(_OURS):
            for name, annotation in vars(base).get("__annotations__", {}).items():
                if not name.startswith("_"):
                    yield name, f"{annotation}{_default(kind, name)}"


def _default(kind: type[Any], name: str) -> str:
    if issubclass(kind, msgspec.Struct):
        found = {field.name: field for field in msgspec.structs.fields(kind)}.get(name)
        if found is None or found.required:
            return ""
        return " = …" if found.default is msgspec.NODEFAULT else f" = {found.default!r}"
    if dataclasses.is_dataclass(kind):
        field = kind.__dataclass_fields__.get(name)
        if field is None or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING):
            return ""
        return " = …" if field.default is dataclasses.MISSING else f" = {_shown(field.default)}"
    value = getattr(kind, name, None)
    return f" = {value!r}" if isinstance(value, (bool, int, float, str, tuple)) else ""


def _members(kind: type[Any]) -> Iterator[tuple[str, str]]:
    for name in sorted(dir(kind)):
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if owner is None or not owner.__module__.startswith(_OURS):
            continue
        data = dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)  # their fields say it
        if name.startswith("_") and (data or name != "__init__"):
            continue
        described = _member(vars(owner)[name], getattr(owner, "__abstractmethods__", frozenset()), name)
        if described is not None:
            yield name, described


def _member(value: Any, abstract: frozenset[str], name: str) -> str | None:
    mark = "abstract " if name in abstract else ""
    if isinstance(value, property):
        return f"{mark}property -> {inspect.signature(_function(value.fget)).return_annotation}"
    if isinstance(value, (classmethod, staticmethod)):
        return f"{mark}{type(value).__name__} {_signature(value.__func__)}"
    if isinstance(value, FunctionType):
        return f"{mark}{_signature(value)}"
    return None


def _function(value: Callable[..., Any] | None) -> Callable[..., Any]:
    if value is None:
        raise TypeError("a property without a getter")
    return value


def _signature(value: Callable[..., Any]) -> str:
    return str(inspect.signature(value)).replace("'", "")


def differences(old: Any, new: Any, path: str = "") -> list[tuple[str, str]]:
    """("added" | "removed" | "changed", where and what) between two contracts."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            where = f"{path}.{key}" if path else key
            if key not in old:
                found.append(("added", where))
            elif key not in new:
                found.append(("removed", where))
            else:
                found += differences(old[key], new[key], where)
        return found
    if isinstance(old, list) and isinstance(new, list):
        gone, come = [x for x in old if x not in new], [x for x in new if x not in old]
        return [("removed", f"{path}: {x}") for x in gone] + [("added", f"{path}: {x}") for x in come]
    return [] if old == new else [("changed", f"{path}:\n      was {old}\n      is  {new}")]


def read() -> dict[str, Any]:
    """The contract as it was written last."""
    held: dict[str, Any] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return held


def write() -> None:
    """Takes today's contract as the one to hold."""
    found = differences(read(), contract()) if SNAPSHOT.exists() else []
    SNAPSHOT.write_text(json.dumps(contract(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for sort, where in found:
        print(f"{sort:<8}{where}")
    print(f"{SNAPSHOT.name}: {len(found)} differences written")


def _shown(value: Any) -> str:
    """A default as it is written, the same in every process."""
    return value.__name__ if inspect.isfunction(value) else repr(value)


if __name__ == "__main__":
    write()
