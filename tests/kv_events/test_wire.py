"""Bytes of KV events against literals of vLLM's form, both ways."""

from array import array
from typing import Any

import msgspec
import pytest

from frame.interfaces import ChunkedKV, FullKV, KVGroup, KVLayout, LatentKV, SlidingKV, StateKV
from frame.kv_events.events import Cleared, Event, Removed, Stored
from frame.kv_events.wire import BatchEncoder, decode_batch

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
ONE, TWO, THREE = (bytes(24) + number.to_bytes(8, "big") for number in (1, 2**64 - 1, 3))


def layout(*specs: Any) -> KVLayout:
    groups = tuple(KVGroup(specs=(spec,), layers=(str(place),), block_size=2) for place, spec in enumerate(specs))
    return KVLayout(groups=groups, pools=(9,), block_size=2, grain=2)


def stored(**fields: Any) -> Stored:
    plain = {"group": 0, "parent": None, "adapter": None, "hashes": [ONE, TWO], "tokens": array("i", [1, 2, 3, 300])}
    return Stored(**{**plain, "extra": [None, None], **fields})


def encoded(*events: Event, spec: Any = FullKV(**HEADS), rank: int = 0, **form: Any) -> bytes:  # noqa: B008
    return BatchEncoder(layout(spec), rank, **form).encode(1.5, events)


def test_arrays_are_vllms_byte_for_byte() -> None:
    got = encoded(stored(), Removed(0, [TWO]), Cleared(), rank=3)
    assert got == (
        b"\x93" + b"\xcb\x3f\xf8" + bytes(6)  # [1.5,
        + b"\x93"  # [
        + b"\x9b" + b"\xabBlockStored"
        + b"\x92\x01\xcf" + b"\xff" * 8  # hashes
        + b"\xc0"  # no parent
        + b"\x94\x01\x02\x03\xcd\x01\x2c"  # tokens
        + b"\x02"  # block size
        + b"\xc0" + b"\xa3GPU" + b"\xc0" + b"\xc0"  # lora_id, medium, lora_name, extra_keys
        + b"\x00" + b"\xaefull_attention"  # group_idx, kv_cache_spec_kind
        + b"\x94" + b"\xacBlockRemoved" + b"\x91\xcf" + b"\xff" * 8 + b"\xa3GPU" + b"\x00"
        + b"\x91" + b"\xb0AllBlocksCleared"
        + b"\x03"  # the data rank
    )  # fmt: skip


@pytest.mark.parametrize("form", ["array", "map"])
def test_typed_readers_take_it(form: str) -> None:
    """As subscribers of vLLM declare it: fields by place or by name, those at the end may be missing."""
    arrays = form == "array"

    class BlockStored(msgspec.Struct, array_like=arrays, tag=True):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[str, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None
        kv_cache_spec_sliding_window: int | None = None
        locality: str | None = None

    class BlockRemoved(msgspec.Struct, array_like=arrays, tag=True):
        block_hashes: list[int]
        medium: str | None

    class AllBlocksCleared(msgspec.Struct, array_like=arrays, tag=True):
        pass

    class Batch(msgspec.Struct, array_like=True):
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]
        data_parallel_rank: int | None = None

    payload = encoded(stored(parent=THREE, extra=[("s",), None]), Removed(0, [ONE]), Cleared(), rank=1, form=form)
    batch = msgspec.msgpack.decode(payload, type=Batch)
    first, removed, cleared = batch.events
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.parent_block_hash, first.medium) == ([1, 2**64 - 1], 3, "GPU")
    assert (first.extra_keys, first.group_idx, first.kv_cache_spec_kind) == ([("s",), None], 0, "full_attention")
    assert isinstance(removed, BlockRemoved)
    assert isinstance(cleared, AllBlocksCleared)
    assert batch.data_parallel_rank == 1


def test_maps_have_the_same_names() -> None:
    got = msgspec.msgpack.decode(
        encoded(stored(parent=THREE, adapter="tall"), Removed(0, [ONE]), Cleared(), form="map")
    )
    assert got == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [1, 2**64 - 1],
                "parent_block_hash": 3,
                "token_ids": [1, 2, 3, 300],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": "tall",
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


@pytest.mark.parametrize("form", ["array", "map"])
def test_hashes_may_be_whole(form: str) -> None:
    _, (event, removed), _ = decode_batch(encoded(stored(parent=THREE), Removed(0, [ONE]), form=form, hashes="bytes"))
    assert (event["block_hashes"], event["parent_block_hash"]) == ([ONE, TWO], THREE)
    assert removed["block_hashes"] == [ONE]


@pytest.mark.parametrize(
    ("spec", "kind", "window"),
    [
        (FullKV(**HEADS), "full_attention", None),
        (SlidingKV(**HEADS, window=6), "sliding_window", 6),
        (ChunkedKV(**HEADS, chunk=4), "chunked_local_attention", None),
        (StateKV(state_bytes=8), "mamba", None),
        (LatentKV(dim=12, dtype="float32"), "mla_attention", None),
    ],
    ids=["full", "sliding", "chunked", "states", "latent"],
)
@pytest.mark.parametrize("form", ["array", "map"])
def test_groups_say_what_they_keep(spec: Any, kind: str, window: int | None, form: str) -> None:
    _, (event,), _ = decode_batch(encoded(stored(), spec=spec, form=form))
    assert (event["kv_cache_spec_kind"], event["kv_cache_spec_sliding_window"]) == (kind, window)


@pytest.mark.parametrize("form", ["array", "map"])
def test_extra_keys_and_tokens_without_ids(form: str) -> None:
    given = stored(extra=[("m", "s"), None], tokens=array("i", [-1, 5, -1, 6]))
    _, (event,), _ = decode_batch(encoded(given, form=form))
    assert event["extra_keys"] == [["m", "s"], None]
    assert event["token_ids"] == [0, 5, 0, 6]


def test_a_reader_takes_other_versions() -> None:
    """Fewer fields and more of them, other names, no rank."""
    events = [
        ["BlockStored", [1], None, [1, 2], 2],
        {"type": "BlockStored", "block_hashes": [1], "locality": "LOCAL"},
        ["BlockRemoved", [1], "CPU", 0, "LOCAL"],
        ["BlockMoved", 7],
    ]
    seconds, got, rank = decode_batch(msgspec.msgpack.encode([2, events]))
    assert (seconds, rank) == (2.0, None)
    assert [event["type"] for event in got] == ["BlockStored", "BlockStored", "BlockRemoved", "BlockMoved"]
    assert (got[0]["block_size"], got[0]["medium"]) == (2, None)
    assert (got[1]["locality"], got[1]["group_idx"]) == ("LOCAL", None)
    assert (got[2]["medium"], got[2]["group_idx"]) == ("CPU", 0)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"\x01", msgspec.msgpack.encode([]), msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["now", []]), msgspec.msgpack.encode([1.0, 7]), msgspec.msgpack.encode([1.0, [7]]),
        msgspec.msgpack.encode([1.0, [[7]]]), msgspec.msgpack.encode([1.0, [{"name": "x"}]]),
        msgspec.msgpack.encode([1.0, [], "rank"]), msgspec.msgpack.encode([1.0, [[]]]),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="no batch of KV events"):
        decode_batch(payload)
