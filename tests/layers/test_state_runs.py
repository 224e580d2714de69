"""What layers say of which rows of a state are a rank's: all ranks together have each row, in equal runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from frame.interfaces import BlockFormat, CacheView, StateRun
from frame.layers import StateLayer
from frame.plugins.connectors.nixl.shapes import divided


def layer(runs: dict[str, list[tuple[int, int, int]]] | None) -> StateLayer:
    parts = {"conv": ((6, 3), torch.bfloat16), "scan": ((2, 4, 5), torch.float32)}
    return StateLayer(SimpleNamespace(add_cache=lambda layer: None), "a", parts, runs)


def test_runs_are_of_the_tensors_in_the_order_of_a_block() -> None:
    made = layer({"conv": [(2, 4, 8), (8, 2, 16)], "scan": [(2, 2, 4)]})
    assert made.cache_runs == (
        StateRun(torch.float32, 80, 2, 4, 4),
        StateRun(torch.bfloat16, 6, 2, 6, 8),
        StateRun(torch.bfloat16, 6, 8, 10, 16),
    )
    assert sum(run.row_bytes * (run.last - run.first) for run in made.cache_runs) == made.kv_spec().state_bytes
    assert layer(None).cache_runs == ()


def test_runs_that_are_not_all_of_a_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^a: the runs of 'conv' are not all of its 6 rows"):
        layer({"conv": [(2, 4, 8)], "scan": [(2, 2, 4)]})


def test_a_state_is_what_its_ranks_divide() -> None:
    made = layer({"conv": [(2, 4, 8), (8, 2, 16)], "scan": [(2, 2, 4)]})
    memory = torch.arange(3 * 200).remainder(251).to(torch.uint8).view(3, 200)[:, :196]
    view = CacheView(memory, BlockFormat((196,), (0,), torch.uint8), 1, None, 1, made.cache_parts, made.cache_runs)
    found = dict(divided("a", view, memory))
    assert list(found) == ["a#0", "a#1", "a#2"]
    assert [one.heads for one in found.values()] == [(2, 4), (2, 6), (8, 10)]
    assert torch.equal(torch.cat([one.bytes for one in found.values()], 1), memory)
    assert all(one.bytes.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr() for one in found.values())
    plain = CacheView(memory, view.format, 1, None, 1, made.cache_parts)
    assert [name for name, _ in divided("a", plain, memory)] == ["a"]
