"""What is read of published events: both forms, what is passed over, and what hostile bytes cost."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from typing import Any

import msgspec
import pytest

from frame.kv_events.changes import KVCleared, KVRemoved, KVStored
from frame.kv_events.reader import MOST_BYTES, EventReader

pack = msgspec.msgpack.encode
FULL: dict[str, Any] = {
    "block_hashes": [1, 2**64 - 1], "parent_block_hash": 7, "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None,
    "medium": "GPU", "lora_name": "l", "extra_keys": [["l", "salt"], None], "group_idx": 0,
    "kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": None,
}  # fmt: skip


def stored(**changed: Any) -> dict[str, Any]:
    return {"type": "BlockStored"} | FULL | changed


def as_array(event: dict[str, Any]) -> list[Any]:
    return list(event.values())


def read(*events: Any, reader: EventReader | None = None) -> list[Any]:
    return (reader or EventReader()).read(pack([1.5, list(events), 0]))


@pytest.mark.parametrize("form", [dict, as_array], ids=["maps", "arrays"])
def test_both_forms_say_the_same(form: Any) -> None:
    events = [stored(), {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}, {"type": "AllBlocksCleared"}]
    one, *others = read(*map(form, events))
    assert (one.names, one.parent, list(one.tokens), one.block_size) == ([1, 2**64 - 1], 7, [1, 2, 3, 4], 2)
    assert (one.adapter, one.extra, one.medium) == ("l", (("salt",), ()), "GPU")
    assert others == [KVRemoved([1], "GPU"), KVCleared()]


def test_the_least_that_older_and_other_engines_send() -> None:
    none = array("I")
    assert read(["BlockStored", [5], None, [1, 2], 2, None]) == [KVStored([5], None, array("I", [1, 2]), 2)]
    assert read(["BlockRemoved", [-5]]) == [KVRemoved([-5])]
    # a copy in another medium
    assert read(["BlockStored", [b"x"], None, [], 0, None, "CPU"]) == [KVStored([b"x"], None, none, 0, medium="CPU")]
    assert read(["BlockStored", [b"x"], None, [], 16, None]) == [KVStored([b"x"], None, none, 0)]


@pytest.mark.parametrize("arrays", [True, False], ids=["arrays", "maps"])
def test_what_publishers_of_vllm_encode_is_read(arrays: bool) -> None:
    """As typed messages that leave out what has its default, whose keys besides tokens are of any type."""

    class BlockStored(msgspec.Struct, array_like=arrays, omit_defaults=True, tag=True):
        block_hashes: list[int | bytes]
        parent_block_hash: int | bytes | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None = None
        medium: str | None = None
        lora_name: str | None = None
        extra_keys: list[tuple[Any, ...] | None] | None = None

    class BlockRemoved(msgspec.Struct, array_like=arrays, omit_defaults=True, tag=True):
        block_hashes: list[int | bytes]
        medium: str | None = None

    class AllBlocksCleared(msgspec.Struct, array_like=arrays, omit_defaults=True, tag=True):
        pass

    class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
        ts: float
        events: list[Any]
        data_parallel_rank: int | None = None

    digest = bytes(range(32))
    events = [
        BlockStored([digest], None, [1, 2], 2, medium="GPU", extra_keys=[("salt", ("image", 3), 4)]),
        BlockStored([7, 8], digest, [3, 4, 5, 6], 2, lora_id=1, lora_name="l", extra_keys=[("l",), None]),
        BlockRemoved([digest], "GPU"),
        AllBlocksCleared(),
    ]
    assert EventReader().read(pack(Batch(1.5, events))) == [
        KVStored([digest], None, array("I", [1, 2]), 2, None, (("salt", "['image', 3]", "4"),), "GPU"),
        KVStored([7, 8], digest, array("I", [3, 4, 5, 6]), 2, "l", ((), ())),
        KVRemoved([digest], "GPU"),
        KVCleared(),
    ]


def test_later_versions_are_read_as_far_as_they_are_known() -> None:
    later = [*as_array(stored()), "new", {"more": 1}]
    assert len(read(later, ["BlockMoved", 1], {"type": "BlockMoved", "x": [1]}, {**stored(), "new": [1]})) == 2
    assert EventReader().read(pack([1, [["AllBlocksCleared"]], 0, "new"])) == [KVCleared()]


def test_only_the_first_group_of_full_attention_is_told() -> None:
    reader = EventReader()
    sliding = stored(group_idx=1, kv_cache_spec_kind="sliding_window")
    twin = stored(group_idx=2)
    assert len(read(sliding, stored(), twin, reader=reader)) == 1
    removed = [
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": group} for group in (0, 1, 2)
    ]
    assert len(read(*removed, reader=reader)) == 1


def test_blocks_of_an_adapter_without_a_name_are_not_told() -> None:
    assert read(stored(lora_id=3, lora_name=None)) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        pack([1.5]),
        pack({"a": 1}),
        pack(["x", [], 0]),
        pack([1.5, [["BlockStored", [1], None, [1, 2, 3], 2, None]], 0]),
        pack([1.5, [["BlockStored", "x", None, [1, 2], 2, None]], 0]),
        pack([1.5, [["BlockStored", [1], None, [1, -2], 2, None]], 0]),
        pack([1.5, [["BlockStored", [1], None, [1, 2**32], 2, None]], 0]),
        pack([1.5, [["BlockRemoved", [b"x" * 65]]], 0]),
        pack([1.5, [["BlockRemoved", [1], "x" * 513]], 0]),
        pack([1.5, [[]], 0]),
        pack([1.5, [5], 0]),
        pack([1.5, [["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, [["a"], ["b"]]]], 0]),
        pack([1.5, [["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, [["a" * (1 << 18)]]]], 0]),
    ],
)
def test_what_is_no_batch_is_one_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(these bytes are no batch of KV events|\d+ blocks|what decides blocks)"):
        EventReader().read(payload)


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a length of 4 billion events"),
        pytest.param(b"\xdd\x00\x7f\xff\xf0" + b"\xc0" * 0x7FFFF0, id="8 million events"),
        pytest.param(b"\x91\x92\xacBlockRemoved\xdd\x00\x7f\xff\x00" + b"\x01" * 0x7FFF00, id="8 million hashes"),
        pytest.param(b"\x91\x92\xaaBlockMoved\xdd\x00\x7f\xff\x00" + b"\x90" * 0x7FFF00, id="8 million unknown lists"),
        pytest.param(
            b"\x91\x99\xabBlockStored\x91\x01\xc0\x91\x01\x01\xc0\xc0\xc0\xdd\x00\x7f\xff\x00" + b"\x90" * 0x7FFF00,
            id="8 million lists of what decides a block",
        ),
    ],
)
def test_no_batch_costs_more_than_some_times_its_bytes(hostile: bytes) -> None:
    payload = b"\x92\xcb" + bytes(8) + hostile
    assert len(payload) <= MOST_BYTES
    reader = EventReader()
    tracemalloc.start()
    try:
        reader.read(payload)
    except ValueError:
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 40 << 20


def test_above_the_bound_nothing_is_decoded() -> None:
    with pytest.raises(ValueError, match="more than 8388608 bytes"):
        EventReader().read(bytes(MOST_BYTES + 1))


def test_random_bytes_and_batches_with_a_bit_turned_raise_that_one_error() -> None:
    draw, whole = random.Random(5), bytearray(pack([1.5, [stored(), as_array(stored()), ["AllBlocksCleared"]], 0]))
    for _ in range(3000):
        payload = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            payload[draw.randrange(len(payload))] ^= 1 << draw.randrange(8)
        for given in (bytes(payload), draw.randbytes(draw.randrange(60))):
            try:
                EventReader().read(given)
            except ValueError:
                continue
