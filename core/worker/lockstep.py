"""Data ranks that share experts step together: they agree on a shape before each step, whoever has requests.

Every worker of a data rank asks the same workers of the others, on the host. `Alone` is the null object. Knows no
experts and no scheduler.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..interfaces.collectives import ProcessGroup
from ..interfaces.platform_steps import NO_ROWS, Shapes, StepShape

_FIELDS = struct.Struct("<5q3?")


class Agreed(NamedTuple):
    """The shape at which this rank runs a step, and whether any rank has rows in it: without them nothing is run.

    A rank without rows computes padding of the shape, or only the experts of others' tokens where that has no rows.
    """

    shape: StepShape
    busy: bool


class Alone:
    """No other data rank waits for this one."""

    #: whether steps may be captured between others, when this rank likes
    captures = True

    def agree(self, shape: StepShape) -> Agreed:
        """`shape` is that of this rank's rows, `NO_ROWS` without any. Every rank must call it for every step."""
        return Agreed(shape, False)


class Lockstep(Alone):
    """One exchange of some bytes a step over the host side of `data`, the group of data ranks."""

    captures = False

    def __init__(self, data: ProcessGroup, shapes: Shapes, count: Callable[[str], None]) -> None:
        self._host, self._rank, self._shapes, self._count = data.host, data.rank, shapes, count

    def agree(self, shape: StepShape) -> Agreed:
        """Raises `TimeoutError` when other ranks do not step."""
        self._count("data")
        given = [StepShape(*_FIELDS.unpack(one)) for one in self._host.gather(_packed(shape))]
        busy = [one for one in given if one.padded_rows]
        if not busy:
            return Agreed(NO_ROWS, False)
        # a rank computes experts for the requests of all
        deterministic = any(one.deterministic for one in busy)
        busy = [replace(one, deterministic=deterministic) for one in busy]
        common = self._shapes.join(busy)
        if common is not None:
            return Agreed(common, True)
        tokens = tuple(one.padded_tokens for one in given)
        return Agreed(replace(given[self._rank], deterministic=deterministic, tokens_per_rank=tokens), True)


def lockstep_of(data: ProcessGroup, shapes: Shapes, count: Callable[[str], None]) -> Alone:
    """The lockstep of a worker. Workers have a data group where ranks share experts; one without peers is alone.

    `count` is called with "data" before each exchange, as `Collectives.count`.
    """
    return Alone() if data.size == 1 or data.is_silent else Lockstep(data, shapes, count)


def _packed(shape: StepShape) -> bytes:
    return _FIELDS.pack(
        shape.padded_tokens,
        shape.padded_rows,
        shape.padded_samples,
        shape.max_query_len,
        shape.max_seq_len,
        shape.deterministic,
        shape.shared,
        shape.adapted,
    )
