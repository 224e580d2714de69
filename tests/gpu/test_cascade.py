"""Decodes that share a prefix against the reference: on a GPU, and under the interpreter through tests/kernels."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from frame.core.interfaces.attention import SharedPrefix
from frame.core.interfaces.setup import BackendSetup
from frame.core.ops import Ops
from frame.plugins.attention import triton
from frame.plugins.attention.triton import TritonAttention
from tests.plugins.attention.batches import Case, check, make_case, spec_of, split_rows

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
CLOSE = 1e-5 if INTERPRETED else 3e-2
FEATURES = {"plain": {}, "all": {"soft_cap": 3.0, "sinks": True, "alibi": True}}


def shared_case(
    rows: list[tuple[int, int]],
    groups: list[tuple[list[int], int]],
    tiles: int = 4,
    *,
    seed: int = 0,
    scales: tuple[Any, Any] = (0.05, 0.25),
    **changes: object,
) -> Case:
    """Rows of which those of each group begin with the same blocks, for the tokens given."""
    spec = spec_of(device_type=DEVICE, **{"dtype": DTYPE, "block_size": 16, **changes})
    scales = scales if spec.kv_dtype.itemsize == 1 else (1.0, 1.0)
    case = make_case(TritonAttention, spec, rows, scales=scales, seed=seed)
    table = case.batch.block_table
    tile_rows = np.full((tiles, TritonAttention.prefix_tile_rows), -1, np.int32)
    tile_lens, row_lens = np.zeros(tiles, np.int32), np.zeros(len(rows), np.int32)
    tile = 0
    for members, tokens in groups:
        for row in members:
            table[row, : tokens // 16] = table[members[0], : tokens // 16]
        for first in range(0, len(members), TritonAttention.prefix_tile_rows):
            some = members[first : first + TritonAttention.prefix_tile_rows]
            tile_rows[tile, : len(some)], tile_lens[tile] = some, tokens
            tile += 1
        row_lens[members] = tokens
    arrays = (torch.from_numpy(x).to(DEVICE) for x in (tile_rows, tile_lens, row_lens))
    return replace(case, batch=replace(case.batch, prefix=SharedPrefix(*arrays)))


@pytest.mark.parametrize(("own", "shared", "features"), [(1, 1, FEATURES["plain"]), (4, 2, FEATURES["all"])])
def test_groups_and_rows_alone_equal_the_reference(
    features: dict, own: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_rows(monkeypatch, own, 0)
    monkeypatch.setattr(triton, "MAX_PREFIX_SPLITS", shared)
    rows = [(400, 1), (50, 1), (336, 1), (352, 1), (200, 1), (0, 1), (193, 1), (700, 1)]
    check(TritonAttention, shared_case(rows, [([0, 2, 3, 7], 336), ([4, 6], 192)], **features), CLOSE, CLOSE)


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_few_tiles_are_attended_in_more_parts(programs: int) -> None:
    """Two of four tiles are used, one in up to three parts: how many there are is known on the device only."""
    rows = [(800 + row, 1) for row in range(18)] + [(0, 1)]
    case = shared_case(rows, [(list(range(18)), 768)])
    backend = TritonAttention(BackendSetup(case.spec, Ops()))
    plan = backend.plan(case.batch)
    assert plan.prefix is not None
    found = [
        backend.forward(case.layer, case.query, case.key, case.value, case.cache.clone(), replace(plan, prefix=chosen))
        for chosen in (replace(plan.prefix, programs=programs), None)
    ]
    assert torch.allclose(*found, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize(("heads", "head_dim"), [((2, 2), 32), ((6, 2), 80), ((8, 1), 16)])
def test_heads_in_mixed_batches_and_several_tiles(heads: tuple[int, int], head_dim: int) -> None:
    rows = [(128 + i, 1) for i in range(18)] + [(70, 5), (0, 9)]
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "scale": 0.1}
    check(TritonAttention, shared_case(rows, [(list(range(18)), 128)], **sizes), CLOSE, CLOSE)


@pytest.mark.parametrize("tokens", [0, 48])
def test_a_prefix_of_no_whole_tile_changes_nothing(tokens: int) -> None:
    rows = [(100, 1), (90, 1)]
    case = shared_case(rows, [([0, 1], tokens)])
    check(TritonAttention, case, CLOSE, CLOSE)


@pytest.mark.parametrize("scales", [(0.05, 0.25), ([0.05, 0.5], [0.25, 0.03])], ids=["of the layer", "of heads"])
def test_a_cache_of_8_bit_floats(scales: tuple[Any, Any]) -> None:
    rows = [(300, 1), (260, 1), (20, 1)]
    given = [torch.tensor(one, device=DEVICE) if isinstance(one, list) else one for one in scales]
    case = shared_case(rows, [([0, 1], 256)], kv_dtype=torch.float8_e4m3fn, scales=(given[0], given[1]))
    check(TritonAttention, case, CLOSE, CLOSE)


def test_layers_with_a_window_and_deterministic_steps_leave_it() -> None:
    rows = [(200, 1), (180, 1)]
    windowed = shared_case(rows, [([0, 1], 128)], window=40)
    check(TritonAttention, windowed, CLOSE, CLOSE)
    check(TritonAttention, shared_case(rows, [([0, 1], 176)], deterministic=True), CLOSE, CLOSE)
