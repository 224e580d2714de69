"""Decode steps that the Triton backend gives to the kernel for few rows: on a GPU, and interpreted."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from frame.interfaces import BackendSetup
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.attention.triton_options import TritonOptions
from tests.plugins.attention.batches import check, make_case, run, spec_of

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
CLOSE = 1e-2 if INTERPRETED else 3e-2
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "sinks": {"sinks": True},
    "head of 64, window, sinks": {"head_dim": 64, "num_heads": 16, "window": 128, "sinks": True, "block_size": 16},
    "head of 128": {"head_dim": 128, "block_size": 16},
    "head of 80, 7 heads a KV head": {"head_dim": 80, "num_heads": 14, "block_size": 3},
}
ROWS = {1: [(299, 1)], 2: [(0, 1), (130, 1)], 8: [(length, 1) for length in (0, 1, 63, 64, 127, 200, 258, 300)]}


class FewAttention(TritonAttention):
    """Asks for the kernel, on a chip of as many multiprocessors as that which it was measured on."""

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        super().__init__(setup, TritonOptions(few_decodes=True))
        self._multiprocessors = 132

    def plan(self, batch: Any) -> Any:
        found = super().plan(batch)
        assert found.few is not None
        return found


def layer_spec(**changes: Any) -> Any:
    return spec_of(device_type=DEVICE, dtype=DTYPE, **changes)


@pytest.mark.parametrize("rows", ROWS.values(), ids=[f"{count} rows" for count in ROWS])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_layers_equal_the_reference(layer: dict[str, Any], rows: list[tuple[int, int]]) -> None:
    check(FewAttention, make_case(FewAttention, layer_spec(**layer), rows), CLOSE, CLOSE)


@pytest.mark.parametrize("layer", ["plain", "head of 64, window, sinks"])
def test_any_length_planned_for_the_longest(layer: str) -> None:
    """As in a captured step: the host's lengths are those of the longest rows that there can be."""
    for longest in (1000, 4096, 131072):
        case = make_case(FewAttention, layer_spec(**LAYERS[layer]), ROWS[8][:4])
        case.batch.host_seq_lens[:] = longest
        check(FewAttention, case, CLOSE, CLOSE)


@pytest.mark.parametrize("layer", ["plain", "sinks", "head of 64, window, sinks"])
def test_rows_of_padding_are_zeros(layer: str) -> None:
    case = make_case(FewAttention, layer_spec(**LAYERS[layer]), ROWS[2], padding_tokens=2, padding_rows=2)
    case.batch.host_query_lens[-2:] = 1
    out, cache = run(FewAttention, case)
    others, others_cache = run(TritonAttention, case)
    assert torch.isfinite(out).all()
    assert not out[-2:].any()
    assert not others[-2:].any()
    assert torch.equal(cache.nan_to_num(9), others_cache.nan_to_num(9))


def test_blocks_may_lie_apart_and_queries_be_views() -> None:
    case = make_case(FewAttention, layer_spec(head_dim=64), ROWS[2], page_slack=24)
    joined = torch.cat((case.query, case.key, case.value), dim=1)
    case.query, case.key, case.value = joined.split([4, 2, 2], dim=1)
    check(FewAttention, case, CLOSE, CLOSE)


def test_counters_are_shared_with_the_usual_kernel() -> None:
    """A step of few long rows, one with a prompt and the first again use one tensor, which each leaves zeros."""
    spec = layer_spec(head_dim=64)
    backend = FewAttention(BackendSetup(spec, None))  # type: ignore[arg-type]
    few, mixed = make_case(FewAttention, spec, [(300, 1)] * 2), make_case(FewAttention, spec, [(300, 1), (0, 5)])
    outs = []
    for case, plan in ((few, backend.plan), (mixed, super(FewAttention, backend).plan), (few, backend.plan)):
        given = case.query, case.key, case.value, case.cache
        outs.append(backend.forward(case.layer, *given, plan(case.batch)))
        assert len(backend._arrivals) == 1
        assert not backend._arrivals[0].any()
    torch.testing.assert_close(outs[0], outs[2], rtol=0, atol=0)
