"""Which sizes the ops of a platform meet, for platforms that run a fixed set of them. Knows no engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from frame.core.interfaces.platform import Platform
from frame.core.ops import Ops

#: What an op met: its name, and the shapes of its tensors by their places.
Sizes = set[tuple[Any, ...]]
_NAMES = frozenset(name for name in vars(Ops) if not name.startswith("_"))


@contextmanager
def watched_ops(kind: type[Platform], seen: Sizes) -> Iterator[None]:
    """While inside, what ops of platforms of that class are called with is added to `seen`."""
    ops_of, made = kind.ops, dict[int, Ops]()

    def ops(self: Platform) -> Ops:
        given = ops_of(self)
        if id(given) not in made:
            made[id(given)] = _watched(given, seen)
        return made[id(given)]

    kind.ops = ops  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.ops = ops_of  # type: ignore[method-assign]


def sizes_by_argument(seen: Sizes) -> dict[tuple[str, int, int], set[int]]:
    """By op, argument and axis, the lengths of the tensors given; the whole numbers given have axis 0."""
    found: dict[tuple[str, int, int], set[int]] = {}
    for name, *shapes in seen:
        for place, shape in enumerate(shapes):
            for axis, size in enumerate(shape if isinstance(shape, tuple) else (shape,)):
                if isinstance(size, int):
                    found.setdefault((name, place, axis), set()).add(size)
    return found


def _watched(ops: Ops, seen: Sizes) -> Ops:
    inner = type(ops)

    def look_up(self: Ops, name: str) -> Any:
        found = inner.__getattribute__(self, name)
        return _watching(name, found, seen) if name in _NAMES else found

    watched: Ops = copy.copy(ops)
    watched.__class__ = type(inner.__name__, (inner,), {"__getattribute__": look_up})
    return watched


def _watching(name: str, op: Callable[..., Any], seen: Sizes) -> Callable[..., Any]:
    @wraps(op)
    def call(*given: Any, **named: Any) -> Any:
        seen.add((name, *(_shape(value) for value in (*given, *named.values()))))
        return op(*given, **named)

    return call


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(_shape(one) for one in value)
    return value if isinstance(value, (int, str)) else None
