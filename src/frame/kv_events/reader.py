"""Reads what servers publish, frame's and others', as changes that listeners understand. Trusts nothing that it reads.

Sizes are checked before anything of that size is made. Events are arrays or maps, of which unknown ones and unknown
fields are passed over, since later versions may add them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from .changes import KVChange, KVCleared, KVRemoved, KVStored

#: Most bytes of a batch, events of a batch, blocks of an event, tokens of an event.
MOST_BYTES = 8 << 20
_MOST_EVENTS, _MOST_BLOCKS, _MOST_TOKENS = 1 << 16, 1 << 16, 1 << 20
#: Most bytes of all that decides the blocks of an event besides tokens, and groups of layers that are told apart.
_MOST_EXTRA_BYTES, _MOST_GROUPS = 1 << 18, 64
#: Kinds of layers that attend to all tokens; the first is what vLLM means where it names none.
_FULL = (None, "full_attention", "mla_attention")

_Number = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Text = Annotated[str, Meta(max_length=512)]
_Name = int | Annotated[bytes, Meta(min_length=1, max_length=64)]
_Names = Annotated[list[_Name], Meta(max_length=_MOST_BLOCKS)]
_Tokens = Annotated[list[_Number], Meta(max_length=_MOST_TOKENS)]
_NIL = Raw(b"\xc0")


class _Stored(Struct, tag="BlockStored"):
    block_hashes: _Names
    parent_block_hash: _Name | None
    token_ids: _Tokens
    block_size: _Number
    lora_id: int | None = None
    medium: _Text | None = None
    lora_name: _Text | None = None
    extra_keys: Raw = _NIL
    group_idx: _Number | None = None
    kv_cache_spec_kind: _Text | None = None


class _Removed(Struct, tag="BlockRemoved"):
    block_hashes: _Names
    medium: _Text | None = None
    group_idx: _Number | None = None


class _Cleared(Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(Struct, array_like=True):
    seconds: float
    events: Annotated[list[Raw], Meta(max_length=_MOST_EVENTS)]
    rank: int | None = None


class _Tag(Struct):
    type: _Text


_BATCHES = msgspec.msgpack.Decoder(_Batch)
_MAPS = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_ARRAYS = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_TAGS = msgspec.msgpack.Decoder(_Tag)
_FIRST = msgspec.msgpack.Decoder(Annotated[list[Raw], Meta(max_length=64, min_length=1)])
_EXTRAS = msgspec.msgpack.Decoder(Annotated[list[list[Any] | None], Meta(max_length=_MOST_BLOCKS)] | None)
_KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class EventReader:
    """Reads the batches of one data rank in their order. Raises `ValueError` for what is no batch of KV events."""

    def __init__(self) -> None:
        #: the group of layers that is told, and those that are not
        self._group: int | None = None
        self._others: set[int] = set()

    def read(self, payload: bytes) -> list[KVChange]:
        """The changes of a batch."""
        if len(payload) > MOST_BYTES:
            raise ValueError(f"a batch of KV events has more than {MOST_BYTES} bytes")
        try:
            batch = _BATCHES.decode(payload)
            return [change for event in batch.events for change in self._changes(bytes(event))]
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"these bytes are no batch of KV events: {str(error)[:200]}") from None

    def _changes(self, event: bytes) -> Iterator[KVChange]:
        is_map = event[0] & 0xF0 == 0x80 or event[0] in (0xDE, 0xDF)
        name = _TAGS.decode(event).type if is_map else _name(event)
        if name not in _KNOWN:
            return
        found = (_MAPS if is_map else _ARRAYS).decode(event)
        if isinstance(found, _Stored):
            if self._tells(found):
                yield _stored(found)
        elif isinstance(found, _Removed):
            if found.group_idx is None or found.group_idx not in self._others:
                yield KVRemoved(found.block_hashes, found.medium or "")
        else:
            yield KVCleared()

    def _tells(self, event: _Stored) -> bool:
        """Whether blocks are those of the first group of layers that attend to all tokens."""
        group = event.group_idx or 0
        if event.kv_cache_spec_kind in _FULL and self._group in (None, group):
            self._group = group
            # an adapter without a name cannot be told from others
            return event.lora_id is None or event.lora_name is not None
        if len(self._others) < _MOST_GROUPS:
            self._others.add(group)
        return False


def _name(event: bytes) -> str:
    return msgspec.msgpack.decode(bytes(_FIRST.decode(event)[0]), type=_Text)


def _stored(event: _Stored) -> KVStored:
    names, tokens, size = event.block_hashes, event.token_ids, event.block_size
    if len(tokens) != len(names) * size:
        if tokens:
            raise ValueError(f"{len(names)} blocks of {size} tokens are said to have {len(tokens)} tokens")
        size = 0
    return KVStored(
        names, event.parent_block_hash, array("I", tokens), size, event.lora_name, _extra(event), event.medium or ""
    )


def _extra(event: _Stored) -> tuple[tuple[str, ...], ...]:
    """What decides each block besides tokens and the adapter, as texts; empty where nothing does."""
    raw = bytes(event.extra_keys)
    if len(raw) > _MOST_EXTRA_BYTES:
        raise ValueError(f"what decides blocks besides their tokens has more than {_MOST_EXTRA_BYTES} bytes")
    given = _EXTRAS.decode(raw)
    if not given or not any(given):
        return ()
    if len(given) != len(event.block_hashes):
        raise ValueError(f"{len(event.block_hashes)} blocks have {len(given)} lists of what decides them")
    return tuple(
        tuple(one if isinstance(one, str) else repr(one) for one in each or () if one != event.lora_name)
        for each in given
    )
