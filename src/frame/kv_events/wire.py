"""KV events as bytes, in vLLM's form: msgpack of [time, events, data rank].

An event is an array with its name first, as up to vLLM 0.23, or a map with its name as "type". Later versions appended
fields, so a reader takes both, with fields that it does not know, and passes over events of other names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from frame.core.interfaces.kv import ChunkedKV, CrossKV, KVGroup, KVLayout, LatentKV, SlidingKV, StateKV

from .events import Cleared, Event, Removed, Stored

Format = Literal["array", "map"]
Hashes = Literal["int", "bytes"]

#: The fields of each event in their order on the wire, and how many of them are always there.
FIELDS: dict[str, tuple[tuple[str, ...], int]] = {
    "BlockStored": (
        (
            "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
            "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
        ),
        7,
    ),
    "BlockRemoved": (("block_hashes", "medium", "group_idx"), 2),
    "AllBlocksCleared": ((), 0),
}  # fmt: skip
#: Where blocks of an engine's own cache are, on every device.
MEDIUM = "GPU"
_KINDS = (
    (StateKV, "mamba"),
    (SlidingKV, "sliding_window"),
    (ChunkedKV, "chunked_local_attention"),
    (CrossKV, "cross_attention"),
    (LatentKV, "mla_attention"),
)


class BatchEncoder:
    """Encodes the batches of one engine. `hashes`: the last 8 bytes of each as a number, or all of them."""

    def __init__(self, layout: KVLayout, rank: int, *, form: Format = "array", hashes: Hashes = "int") -> None:
        self._groups = [(group.block_size, *_kind(group)) for group in layout.groups]
        self._rank = rank
        self._event = _array if form == "array" else _map
        self._name: Callable[[bytes], int | bytes] = _number if hashes == "int" else bytes
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, seconds: float, events: Iterable[Event]) -> bytes:
        """The payload of a batch of changes made at a time, in seconds since the epoch."""
        return self._encode([seconds, [self._plain(event) for event in events], self._rank])

    def _plain(self, event: Event) -> list[Any] | dict[str, Any]:
        name = self._name
        if isinstance(event, Cleared):
            return self._event("AllBlocksCleared", [])
        hashes = [name(one) for one in event.hashes]
        if isinstance(event, Removed):
            return self._event("BlockRemoved", [hashes, MEDIUM, event.group])
        return self._stored(event, hashes)

    def _stored(self, event: Stored, hashes: list[int | bytes]) -> list[Any] | dict[str, Any]:
        parent = None if event.parent is None else self._name(event.parent)
        tokens = event.tokens.tolist()
        if min(tokens) < 0:  # readers take ids without a sign
            tokens = [max(0, token) for token in tokens]
        extra = event.extra if any(event.extra) else None
        size, kind, window = self._groups[event.group]
        values = [hashes, parent, tokens, size, None, MEDIUM, event.adapter, extra, event.group, kind, window]
        return self._event("BlockStored", values)


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def _kind(group: KVGroup) -> tuple[str, int | None]:
    """vLLM's name for how long a group keeps tokens, and the window where it has one."""
    spec = group.specs[0]
    kind = next((name for found, name in _KINDS if isinstance(spec, found)), "full_attention")
    return kind, spec.window if isinstance(spec, SlidingKV) else None


def _array(name: str, values: list[Any]) -> list[Any]:
    """Without what is nil at the end."""
    least = FIELDS[name][1]
    while len(values) > least and values[-1] is None:
        values.pop()
    return [name, *values]


def _map(name: str, values: list[Any]) -> dict[str, Any]:
    fields, least = FIELDS[name]
    pairs = zip(fields, values, strict=True)
    return {"type": name} | {field: one for place, (field, one) in enumerate(pairs) if place < least or one is not None}


def decode_batch(payload: bytes) -> tuple[float, list[dict[str, Any]], int | None]:
    """The time, the events as maps with "type", and the data rank of a batch in either form.

    Fields that were left out are None, fields and names that are unknown here stay in maps and are dropped from arrays.
    Raises `ValueError` for what is no batch.
    """
    try:
        seconds, events, *rest = msgspec.msgpack.decode(payload, type=list)
        rank = rest[0] if rest else None
        plain = [_as_map(event) for event in events]
        if not isinstance(seconds, int | float) or not isinstance(rank, int | None):
            raise TypeError("the time and the rank must be numbers")
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ValueError(f"these bytes are no batch of KV events: {error}") from None
    return float(seconds), plain, rank


def _as_map(event: Any) -> dict[str, Any]:
    if isinstance(event, list) and event and isinstance(event[0], str):
        fields = FIELDS.get(event[0], ((), 0))[0]
        event = {"type": event[0]} | dict(zip(fields, event[1:], strict=False))
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise TypeError("an event must be an array with its name first, or a map with its name as type")
    return dict.fromkeys(FIELDS.get(event["type"], ((), 0))[0]) | event
