"""Tile sizes of the experts' products: the rule, and the table that replaces it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from frame.kernels import expert_launch
from frame.kernels.expert_launch import (
    Chip,
    Launch,
    Shape,
    Tile,
    entry_of,
    launch_for,
    launch_from,
    many_rows,
    read_table,
    rule,
)

SHAPE = Shape(128, 8, 2048, 768, torch.bfloat16)
TINY = Shape(4, 2, 24, 10, torch.float16)
ODD = Launch(48, Tile(7, 9, 3), Tile(5, 11, 1, 2, True))


def test_the_rule_multiplies_pairs_one_by_one_until_experts_are_shared() -> None:
    assert [rule(SHAPE, tokens).block_m for tokens in (1, 4, 5, 64, 256, 512, 4096)] == [0, 0, 16, 16, 32, 64, 128]
    assert rule(Shape(4, 8, 64, 64, torch.bfloat16), 1).block_m == 0


def test_a_rank_with_some_experts_launches_what_one_with_all_does() -> None:
    kernels = pytest.importorskip("frame.kernels.experts")
    some, every = torch.empty(64, 2048, 768, dtype=torch.bfloat16), torch.empty(128, 2048, 768)
    assert kernels.shape_of(some, 8, of_all=128) == SHAPE == kernels.shape_of(every.to(torch.bfloat16), 8)
    assert kernels.shape_of(some, 8).num_experts == 64


@pytest.mark.parametrize("shape", [SHAPE, TINY, replace(SHAPE, dtype=torch.float32)], ids=lambda shape: shape.name)
@pytest.mark.parametrize("tokens", [9, 100, 5000])
def test_tiles_of_matrix_products_are_powers_of_two_that_the_matrices_fill(shape: Shape, tokens: int) -> None:
    launch = rule(shape, tokens)
    for tile, size, depth in (
        (launch.gate_up, shape.intermediate_size, shape.hidden_size),
        (launch.down, shape.hidden_size, shape.intermediate_size),
    ):
        for block, whole in ((tile.block_n, size), (tile.block_k, depth)):
            assert block >= 16
            assert block & (block - 1) == 0
            assert block < 2 * max(whole, 16)


@pytest.mark.parametrize("tokens", [9, 200, 400, 5000])
def test_tiles_fit_a_small_shared_memory(tokens: int) -> None:
    small = rule(SHAPE, tokens, Chip("", 99 << 10))
    for tile, matrices in ((small.gate_up, 2), (small.down, 1)):
        assert tile.num_stages >= 2
        assert tile.num_stages * (small.block_m + matrices * tile.block_n) * tile.block_k * 2 <= 98 << 10


def test_many_rows_are_as_many_as_the_power_of_two_below_gives_each_expert() -> None:
    assert [many_rows(SHAPE, tokens) for tokens in (1, 2047, 2048, 8192)] == [False, False, True, True]
    odd = replace(SHAPE, num_experts=60, top_k=4)  # 128 rows each with 1,920 tokens
    assert [many_rows(odd, tokens) for tokens in (1024, 1920, 2000, 2048, 3000)] == [False, False, False, True, True]
    for other in (replace(SHAPE, dtype=torch.float32), replace(SHAPE, intermediate_size=72), TINY):
        assert not many_rows(other, 8192)


def test_only_rows_of_sixteen_bytes_go_through_the_copy_engine() -> None:
    assert rule(SHAPE, 4096).gate_up.copier
    assert not rule(TINY, 4096).down.copier
    assert not rule(SHAPE, 4096, Chip(copies=False)).gate_up.copier


def test_an_entry_is_read_as_it_was_written() -> None:
    assert launch_from(entry_of(ODD)) == ODD
    with pytest.raises(TypeError):
        launch_from({**entry_of(ODD), "warps": 4})


def test_the_nearest_measured_count_of_the_chip_and_shape_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = entry_of(ODD), entry_of(replace(ODD, block_m=96))
    monkeypatch.setattr(expert_launch, "read_table", lambda: {"chip": {SHAPE.name: {"4": near, "256": far}}})
    launch_for.cache_clear()
    try:
        assert [launch_for(SHAPE, tokens, Chip("chip")).block_m for tokens in (1, 31, 33, 9999)] == [48, 48, 96, 96]
        assert launch_for(SHAPE, 64, Chip("other chip")) == rule(SHAPE, 64)
        assert launch_for(TINY, 64, Chip("chip")) == rule(TINY, 64)
    finally:
        launch_for.cache_clear()


def test_every_entry_of_the_table_is_a_launch() -> None:
    for shapes in read_table().values():
        for counts in shapes.values():
            for tokens, entry in counts.items():
                assert int(tokens) > 0
                assert entry_of(launch_from(entry)) == entry
