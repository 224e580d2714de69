import pytest
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec, BlockFormat
from frame.core.interfaces.kv import FullKV, SlidingKV, StateKV
from frame.core.interfaces.kv_layout import (
    full_bytes,
    plan_layout,
    pool_bytes,
    slot_bytes,
    with_blocks,
    with_checkpoints,
)
from frame.core.worker.start.kv_memory import KVMemory

FULL = FullKV(num_kv_heads=2, head_dim=8, dtype="float32")
SLIDING = SlidingKV(num_kv_heads=2, head_dim=8, dtype="float32", window=32)


def spec(dtype: torch.dtype = torch.float32) -> AttentionSpec:
    return AttentionSpec(4, 2, 8, 1.0, dtype, dtype, 16, "cpu")


class Plain(AttentionBackend):
    @classmethod
    def supports(cls, spec):
        return None

    def plan(self, batch):
        return batch

    def forward(self, layer, query, key, value, kv_cache, plan):
        return query


def view_of(memory, layer, backend, spec):
    cache, block = memory.layer_block(layer, backend, spec)
    return block.view(cache)


def groups_of(specs, **asked):
    return plan_layout(specs, **asked).groups


def full(heads=2, dtype="float32"):
    return FullKV(num_kv_heads=heads, head_dim=8, dtype=dtype)


def test_equal_layers_form_one_group():
    groups = groups_of({f"l{i}": FULL for i in range(5)})
    assert [len(group.layers) for group in groups] == [5]


def test_layers_that_keep_tokens_equally_long_form_one_group_whatever_they_keep():
    (group,) = groups_of({"draft": full(1), "a": full(), "b": full(dtype="float16"), "c": full()})
    assert group.layers == ("a", "c", "draft", "b"), "the widest layers come first"
    assert [spec.num_kv_heads for spec in group.specs] == [2, 2, 1, 2]


def test_five_sliding_to_one_full_share_the_pool_evenly():
    specs = {f"l{i}": FULL if i % 6 == 5 else SLIDING for i in range(12)}
    groups = groups_of(specs)
    assert sorted(len(group.layers) for group in groups) == [2] * 6
    assert sorted(layer for group in groups for layer in group.layers) == sorted(specs)


def test_nearly_equal_kinds_stay_whole():
    specs = {f"l{i}": FULL if i % 2 else SLIDING for i in range(5)}
    assert sorted(len(group.layers) for group in groups_of(specs)) == [2, 3]


@pytest.mark.parametrize(("heads", "size"), [(1, 32), (2, 16), (4, 16)])
def test_groups_of_smaller_tokens_have_longer_blocks(heads, size):
    layout = plan_layout({"a": full(heads), "b": SLIDING})
    sizes = {group.layers[0]: group.block_size for group in layout.groups}
    assert sizes["a"] == size
    assert layout.block_size == min(sizes.values())
    assert layout.grain == max(sizes.values())
    bytes_of = [spec.block_bytes(group.block_size) for group in layout.groups for spec in group.specs]
    assert 2 * min(bytes_of) > max(bytes_of)


def test_a_backend_decides_the_block_size_where_the_user_does_not():
    assert plan_layout({"a": FULL}).block_size == 16
    for asked, multiple, size in ((0, 256, 256), (0, 24, 48), (32, 1, 32), (32, 16, 32)):
        layout = plan_layout({"a": FULL}, asked, {"a": multiple})
        assert (layout.groups[0].block_size, layout.block_size, layout.grain) == (size, size, size)
    both = plan_layout({"a": FULL, "b": SLIDING}, 0, {"a": 256})
    assert [group.block_size for group in both.groups] == [256, 256], "blocks of one pool are equally large"


def test_layout_fills_the_bytes_it_is_given():
    layout = plan_layout({"a": FULL, "b": FULL})
    each = 2 * 2 * 16 * 2 * 8 * 4
    assert pool_bytes(layout) == (each,)
    assert with_blocks(layout, 10 * each + 1).pools == (10,)
    assert with_blocks(layout, 1, 7).pools == (7,)
    assert full_bytes(layout, 3, 33) == (1 + 3 * 3) * each


def test_a_slot_is_as_wide_as_its_widest_layer():
    layout = plan_layout({"a": FULL, "small": full(1), "b": SLIDING, "c": SLIDING, "d": full(1)})
    assert [group.layers for group in layout.groups] == [("a", "small", "d"), ("b", "c")]
    assert slot_bytes(layout, 0) == [2048, 2048, 1024]
    memory = KVMemory(with_blocks(layout, 0, 4), torch.device("cpu"))
    assert {name: tuple(cache.shape) for name, cache in memory.layer_bytes().items()} == {
        "a": (4, 2048), "small": (4, 1024), "d": (4, 1024), "b": (4, 2048), "c": (4, 2048),
    }  # fmt: skip


def test_states_have_a_pool_of_their_own_with_a_block_for_each_request():
    layout = plan_layout({"a": FULL, "s": StateKV(state_bytes=1000), "t": StateKV(state_bytes=40)})
    assert [(group.layers, group.pool, group.block_size) for group in layout.groups] == [
        (("a",), 0, 16), (("s", "t"), 1, 0),
    ]  # fmt: skip
    assert pool_bytes(layout) == (2048, 1024 + 64)
    assert with_blocks(layout, 9 * 1088 + 5 * 2048, num_states=8).pools == (5, 9)
    assert full_bytes(layout, 3, 33) == (1 + 3 * 3) * 2048 + 4 * 1088
    memory = KVMemory(with_blocks(layout, 0, 2, num_states=8), torch.device("cpu"))
    assert {name: tuple(cache.shape) for name, cache in memory.layer_bytes().items()} == {
        "a": (2, 2048), "s": (9, 1000), "t": (9, 40),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"and the states of 8 requests, takes 13888: .* smaller max_num_seqs"):
        with_blocks(layout, 9000, num_states=8)


def test_states_that_stand_for_prefixes_get_a_quarter_of_what_is_left():
    layout = with_checkpoints(plan_layout({"a": FULL, "s": StateKV(state_bytes=1024)}))
    assert [group.block_size for group in layout.groups] == [16, 16]
    assert with_blocks(layout, 9 * 1024 + 80 * 1024, num_states=8).pools == (30, 9 + 20)
    assert with_blocks(layout, 9 * 1024 + 2 * 2048, num_states=8).pools == (2, 9), "the least is as without them"
    assert with_blocks(layout, 0, 100, num_states=8).pools == (100, 9 + 66)
    assert with_blocks(layout, 0, 2, num_states=8).pools == (2, 9 + 8)
    for requests in (1, 3):
        room = with_blocks(layout, full_bytes(layout, requests, 33), num_states=requests)
        assert room.pools[0] >= 1 + requests * 3, "all requests at full length have room beside them"
    alone = with_checkpoints(plan_layout({"s": StateKV(state_bytes=1024)}))
    assert (alone.block_size, alone.grain, alone.groups[0].block_size) == (16, 16, 16)
    assert with_blocks(alone, 20 * 1024, num_states=8).pools == (2, 20)
    assert with_blocks(alone, 1 << 30, num_states=8).pools == (2, 9 + 16 * 8), "more is never needed"


#: Of Qwen3-Next-80B-A3B and Nemotron-H-8B: the layers that keep tokens and states, with the sizes of their heads.
REAL = {
    "qwen3-next": (12, {"num_kv_heads": 2, "head_dim": 256}, 36, 4 * 32 * 128 * 128, 2 * 3 * (2 * 16 + 32) * 128),
    "nemotron-h": (4, {"num_kv_heads": 8, "head_dim": 128}, 24, 4 * 128 * 64 * 128, 2 * 3 * (8192 + 2 * 8 * 128)),
}


@pytest.mark.parametrize("num_states", [32, 256])
@pytest.mark.parametrize("model", REAL)
def test_hardly_a_byte_of_real_hybrids_is_lost(model, num_states):
    """What nothing can be kept in: the null blocks, what is left over, and the rest of each request's last block."""
    num_full, heads, num_states_layers, scan, conv = REAL[model]
    specs = {f"full.{i}": FullKV(**heads, dtype="bfloat16") for i in range(num_full)}
    specs |= {f"state.{i}": StateKV(state_bytes=scan + conv) for i in range(num_states_layers)}
    layout = with_checkpoints(plan_layout(specs))
    assert [group.block_size for group in layout.groups] == [16, 16], "blocks are as short as users choose"
    available = 64 << 30
    blocks, states = with_blocks(layout, available, num_states=num_states).pools
    tokens_bytes, state_bytes = pool_bytes(layout)
    assert blocks * tokens_bytes + states * state_bytes <= available
    num_tokens = 8192 + 1  # the last block of each request holds one token
    requests = min(num_states, (blocks - 1) * 16 // num_tokens)
    wanted = sum(spec.block_bytes(16) for spec in specs.values() if isinstance(spec, FullKV))
    padding = tokens_bytes - wanted + state_bytes - num_states_layers * (scan + conv)
    assert padding == 0, "no tensor is padded to the width of another"
    left = available - blocks * tokens_bytes - states * state_bytes
    lost = tokens_bytes + state_bytes + left + requests * tokens_bytes * 15 // 16
    assert lost <= 0.01 * available
    assert requests >= 32, "and most of it is there for requests"


def test_a_model_of_states_alone_and_one_that_keeps_nothing():
    layout = with_blocks(plan_layout({"s": StateKV(state_bytes=64)}), 1000, num_states=8)
    assert (layout.pools, layout.block_size, layout.grain) == ((2, 9), 1, 1)
    assert with_blocks(plan_layout({}), 0).pools == (2,)


def test_too_little_memory_names_both_sizes():
    layout = plan_layout({"a": FULL})
    with pytest.raises(ValueError, match=r"gets 100 bytes.*takes 4096.*gpu_memory_utilization"):
        with_blocks(layout, 100)


def test_layers_of_two_groups_alias_the_same_pages():
    specs = {"full": FULL, "sliding": SLIDING}
    memory = KVMemory(with_blocks(plan_layout(specs), 0, 4), torch.device("cpu"))
    whole, sliding = (view_of(memory, name, Plain, spec()) for name in specs)
    assert whole.shape == (2, 4, 16, 2, 8)
    whole[1, 3] = 7.0
    assert torch.equal(sliding[1, 3], whole[1, 3])
    assert not sliding[:, 2].any()


def test_a_block_is_contiguous_in_memory():
    memory = KVMemory(with_blocks(plan_layout({"a": FULL}), 0, 4), torch.device("cpu"))
    view_of(memory, "a", Plain, spec())[:, 2] = 1.0
    raw = memory.layer_bytes()["a"].view(torch.float32)
    assert raw[2].eq(1).all()
    assert not raw[[0, 1, 3]].any()


def test_a_format_of_another_size_is_refused():
    class Wide(Plain):
        @classmethod
        def kv_format(cls, spec):
            return BlockFormat((2, spec.block_size, spec.num_kv_heads, spec.head_dim + 1), (0, 1, 2, 3), spec.kv_dtype)

    memory = KVMemory(with_blocks(plan_layout({"a": FULL}), 0, 4), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"Wide\.kv_format gives .* 2304 bytes, .*; a block of layer 'a' has 2048"):
        view_of(memory, "a", Wide, spec())
