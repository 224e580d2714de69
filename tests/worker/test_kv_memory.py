import pytest
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec, BlockFormat
from frame.core.interfaces.kv import FullKV, SlidingKV
from frame.core.interfaces.kv_layout import full_bytes, group_layers, plan_layout, with_blocks
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


def test_equal_layers_form_one_group():
    groups = group_layers({f"l{i}": FULL for i in range(5)}, 16)
    assert [len(group.layers) for group in groups] == [5]


def test_five_sliding_to_one_full_share_the_pool_evenly():
    specs = {f"l{i}": FULL if i % 6 == 5 else SLIDING for i in range(12)}
    groups = group_layers(specs, 16)
    assert sorted(len(group.layers) for group in groups) == [2] * 6
    assert sorted(layer for group in groups for layer in group.layers) == sorted(specs)


def test_nearly_equal_kinds_stay_whole():
    specs = {f"l{i}": FULL if i % 2 else SLIDING for i in range(5)}
    assert sorted(len(group.layers) for group in group_layers(specs, 16)) == [2, 3]


def test_layout_fills_the_bytes_it_is_given():
    layout = plan_layout(group_layers({"a": FULL, "b": FULL}, 16), "n")
    assert layout.page_bytes == 2 * 16 * 2 * 8 * 4
    assert with_blocks(layout, 10 * 2 * layout.page_bytes + 1, None).num_blocks == 10
    assert with_blocks(layout, 1, 7).num_blocks == 7
    assert full_bytes(layout, 3, 33) == (1 + 3 * 3) * 2 * layout.page_bytes


def test_too_little_memory_names_both_sizes():
    layout = plan_layout(group_layers({"a": FULL}, 16), "n")
    with pytest.raises(ValueError, match=r"gets 100 bytes.*takes 4096.*gpu_memory_utilization"):
        with_blocks(layout, 100, None)


def test_layers_of_two_groups_alias_the_same_pages():
    specs = {"full": FULL, "sliding": SLIDING}
    memory = KVMemory(with_blocks(plan_layout(group_layers(specs, 16), "n"), 0, 4), torch.device("cpu"))
    full, sliding = (view_of(memory, name, Plain, spec()) for name in specs)
    assert full.shape == (2, 4, 16, 2, 8)
    full[1, 3] = 7.0
    assert torch.equal(sliding[1, 3], full[1, 3])
    assert not sliding[:, 2].any()


def test_a_block_is_contiguous_in_memory():
    memory = KVMemory(with_blocks(plan_layout(group_layers({"a": FULL}, 16), "n"), 0, 4), torch.device("cpu"))
    view_of(memory, "a", Plain, spec())[:, 2] = 1.0
    raw = memory.layer_bytes()["a"].view(torch.float32)
    assert raw[2].eq(1).all()
    assert not raw[[0, 1, 3]].any()


def test_a_format_of_another_size_is_refused():
    class Wide(Plain):
        @classmethod
        def kv_format(cls, spec):
            return BlockFormat((2, spec.block_size, spec.num_kv_heads, spec.head_dim + 1), (0, 1, 2, 3), spec.kv_dtype)

    memory = KVMemory(with_blocks(plan_layout(group_layers({"a": FULL}, 16), "n"), 0, 4), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"Wide\.kv_format gives .* 2304 bytes, .*; a block of layer 'a' has 2048"):
        view_of(memory, "a", Wide, spec())
