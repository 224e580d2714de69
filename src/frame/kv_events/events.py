"""Which blocks the prefix cache gained and lost, in order. Knows no wire and no socket.

Blocks are named by group and hash: groups share one chain of hashes, and each has blocks of its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from frame.core.engine.request import Request
    from frame.core.interfaces.kv import KVLayout

T = TypeVar("T", "Stored", "Removed")


@dataclass(slots=True)
class Stored:
    """Blocks of `group` that can be found from now on, each behind the one before it, the first behind `parent`.

    `tokens` are the ids in all of them, a negative one where a token has none. `extra` names, for each block, what
    decides its content besides the tokens up to it.
    """

    group: int
    parent: bytes | None
    adapter: str | None
    hashes: list[bytes] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("i"))
    extra: list[tuple[str, ...] | None] = field(default_factory=list)


@dataclass(slots=True)
class Removed:
    """Blocks of `group` that can no longer be found."""

    group: int
    hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Cleared:
    """No block can be found any more, in no group."""


Event: TypeAlias = Stored | Removed | Cleared


class CacheEvents:
    """Is told of each change of the prefix cache by the engine's thread; here, the null object, nobody listens."""

    def stored(self, request: Request, group: int, block_hash: bytes, num_tokens: int) -> None:
        """A block of `request` can be found, the last that its first `num_tokens` tokens have in `group`."""

    def removed(self, group: int, block_hash: bytes) -> None:
        """The block of that hash can no longer be found in `group`."""

    def cleared(self) -> None:
        """No block can be found any more."""

    def flush(self) -> None:
        """Called behind every step, and behind every call that may change the cache: the changes so far go out."""

    def counts(self) -> tuple[int, int]:
        """The events that were accepted for listeners, and those that were dropped."""
        return 0, 0

    def close(self) -> None:
        """What was flushed goes out, and nothing else after it. May be called twice."""


NO_EVENTS = CacheEvents()


class RecordedEvents(CacheEvents):
    """Gathers changes; `flush` gives those since the last time, if there are any, to `publish` as one batch.

    `deterministic` says that all requests are, so that it tells no blocks apart.
    """

    def __init__(self, layout: KVLayout, publish: Callable[[list[Event]], None], *, deterministic: bool) -> None:
        self._publish = publish
        self._deterministic = deterministic
        self._unit = layout.block_size
        self._sizes = [group.block_size for group in layout.groups]
        self._pending: list[Event] = []
        # by group: the event of this run of equal kind that the next change may join, since their order is no matter
        self._open: dict[int, Event] = {}
        self._kind: type[Event] = Cleared

    def stored(self, request: Request, group: int, block_hash: bytes, num_tokens: int) -> None:
        start, source = num_tokens - self._sizes[group], request.source
        parent = request.cache.hashes[start // self._unit - 1] if start else None
        event = self._joined(Stored, group)
        if event is None or parent is None or event.hashes[-1] != parent:
            adapter = None if request.adapter is None else request.adapter.source.name
            event = self._add(Stored(group, parent, adapter))
        event.hashes.append(block_hash)
        event.tokens += request.token_ids[start:num_tokens]
        plain = request.adapter is None and source.embeds is None and start > 0
        event.extra.append(None if plain else self._extra(request, start, num_tokens))

    def removed(self, group: int, block_hash: bytes) -> None:
        event = self._joined(Removed, group) or self._add(Removed(group))
        event.hashes.append(block_hash)

    def cleared(self) -> None:
        self._open.clear()
        self._kind = Cleared
        self._pending.append(Cleared())

    def flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            self._open.clear()
            self._publish(pending)

    def _joined(self, kind: type[T], group: int) -> T | None:
        if self._kind is not kind:
            self._kind = kind
            self._open.clear()
        event = self._open.get(group)
        return event if isinstance(event, kind) else None

    def _add(self, event: T) -> T:
        self._pending.append(event)
        self._open[event.group] = event
        return event

    def _extra(self, request: Request, start: int, end: int) -> tuple[str, ...] | None:
        """What decides a block's content besides the tokens: as vLLM, the adapter, media, the salt, embeddings."""
        source = request.source
        found = [] if request.adapter is None else [request.adapter.source.name]
        if start == 0:
            found += source.media_keys
            if source.salt is not None:
                found.append(source.salt)
            if source.params.deterministic and not self._deterministic:
                found.append("deterministic")
            if source.encoder_ids is not None:
                found.append(hashlib.sha256(source.encoder_ids.astype("<i4").tobytes()).hexdigest())
        if source.embeds is not None and len(rows := source.embeds.between(start, end).rows):
            found.append(hashlib.sha256(rows.astype("<f4").tobytes()).hexdigest())
        return tuple(found) or None
