from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from frame.core.interfaces.attention import AttentionBackend, stride_view
from frame.core.ops import Ops
from frame.interfaces import BackendSetup
from frame.plugins.attention import triton
from frame.plugins.attention.torch import TorchAttention
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.attention.triton_options import TritonOptions
from tests.plugins.attention.batches import SPEC

BACKENDS = [TorchAttention, TritonAttention]
ON_GPU = replace(SPEC, device_type="cuda", dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_dim=128, block_size=16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_common_layer_is_supported_on_a_gpu(backend: type[AttentionBackend]) -> None:
    for changes in (
        {},
        {"window": 8, "soft_cap": 5.0, "sinks": True, "alibi": True},
        {"block_size": 1},
        {"head_dim": 80},
    ):
        assert backend.supports(replace(ON_GPU, **changes)) is None


def test_three_faults_give_three_reasons_in_order() -> None:
    spec = replace(ON_GPU, head_dim=512, kv_dtype=torch.int8, mla=True)
    reason = TritonAttention.supports(spec)
    assert reason is not None
    assert reason.split("; ") == [
        "head size 512 not supported (at most 256)",
        "KV-cache dtype int8 not supported (there are: bfloat16, float16, float32, float8_e4m3fn, float8_e5m2)",
        "MLA not supported",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 0}, "head size 0"),
        ({"num_heads": 6, "num_kv_heads": 4}, "6 heads do not divide over 4 KV heads"),
        ({"dtype": torch.int8}, "dtype int8 not supported"),
        ({"kv_dtype": torch.float8_e8m0fnu}, "KV-cache dtype float8_e8m0fnu not supported"),
        ({"block_size": 0}, "block size 0 not supported"),
        ({"kind": "cross"}, "attention kind 'cross' not supported (there are: 'decoder'"),
        ({"mla": True}, "MLA not supported"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_fault_names_itself(backend: type[AttentionBackend], changes: dict, reason: str) -> None:
    assert reason in str(backend.supports(replace(ON_GPU, **changes)))


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert TritonAttention.supports(SPEC) == "device 'cpu' not supported (there are: cuda)"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonAttention.supports(SPEC) is None
    assert "dtype bfloat16 not supported" in str(
        TritonAttention.supports(replace(SPEC, dtype=torch.bfloat16, kv_dtype=torch.bfloat16))
    )


def test_triton_is_preferred_on_a_gpu_only() -> None:
    assert TritonAttention.preference(ON_GPU) is None
    assert TritonAttention.preference(SPEC) == -1
    assert TorchAttention.preference(SPEC) is None


def test_triton_splits_rows_where_they_do_not_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_num_multiprocessors", lambda _: 132)
    options = TritonOptions(hopper_prefill=False)
    backend = TritonAttention(BackendSetup(replace(ON_GPU, num_heads=16, num_kv_heads=8), Ops()), options)
    rows = (1, 2, 4, 5, 12, 13, 33, 34, 53, 54, 66, 67, 123, 124, 512)
    launches = [backend.decode_launch(count, 16384) for count in rows]
    assert [launch.splits for launch in launches] == [32, 16, 8, 8, 8, 4, 4, 4, 4, 1, 1, 2, 2, 1, 1]
    assert [launch.min_span for launch in launches] == [0] * 7 + [512] * 2 + [0] * 2 + [512] * 2 + [0] * 2
    assert [backend.decode_launch(1, length).splits for length in (100, 255, 256, 1000)] == [1, 1, 2, 4]
    assert [backend.decode_launch(80, length).splits for length in (600, 1023, 1024)] == [1, 1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_come_first_in_memory(backend: type[AttentionBackend]) -> None:
    shape, order = backend.kv_shape(7, SPEC), backend.kv_stride_order()
    assert shape == (2, 7, 4, 2, 16)
    view = stride_view(torch.empty(2 * 7 * 4 * 2 * 16), shape, order)
    assert view.stride(1) == 2 * 4 * 2 * 16


def test_stride_order_golden_examples() -> None:
    """Entry i of the order is the logical axis that lies at memory position i."""
    view = stride_view(torch.empty(2 * 7 * 16 * 4 * 8), (2, 7, 16, 4, 8), (1, 3, 0, 2, 4))
    assert view.shape == (2, 7, 16, 4, 8)
    assert view.stride() == (128, 1024, 8, 256, 1)
    layers = stride_view(torch.empty(3 * 2 * 7 * 16 * 4 * 8), (3, 2, 7, 16, 4, 8), (2, 4, 0, 1, 3, 5))
    assert layers.stride() == (256, 128, 3072, 8, 768, 1)


def test_a_stride_order_that_is_no_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match="not a permutation of the 3 axes"):
        stride_view(torch.empty(24), (2, 3, 4), (0, 1, 1))
