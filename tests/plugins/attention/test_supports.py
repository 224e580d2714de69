from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from frame.core.interfaces.attention import AttentionBackend, BlockFormat
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
    spec = replace(ON_GPU, head_dim=512, kv_dtype=torch.int8, kind="cross")
    reason = TritonAttention.supports(spec)
    assert reason is not None
    assert reason.split("; ") == [
        "head size 512 not supported (at most 256)",
        "KV-cache dtype int8 not supported (there are: bfloat16, float16, float32, float8_e4m3fn, float8_e5m2)",
        "attention kind 'cross' not supported (there are: 'decoder')",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 0}, "head size 0"),
        ({"num_heads": 6, "num_kv_heads": 4}, "6 heads do not divide over 4 KV heads"),
        ({"dtype": torch.int8}, "dtype int8 not supported"),
        ({"kv_dtype": torch.float8_e8m0fnu}, "KV-cache dtype float8_e8m0fnu not supported"),
        ({"block_size": 0}, "block size 0 not supported"),
        ({"kind": "both"}, "attention kind 'both' not supported (there are: 'decoder'"),
        ({"kind": "cross", "deterministic": True}, "deterministic steps over what an encoder gives not supported"),
        (
            {"distances": 8, "deterministic": True},
            "biases of distances in windows, deterministic steps or with log-sum-exps not supported",
        ),
        (
            {"distances": 8, "window": 4},
            "biases of distances in windows, deterministic steps or with log-sum-exps not supported",
        ),
        ({"kind": "encoder", "alibi": True}, "ALiBi and sinks not supported without a cache"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_fault_names_itself(backend: type[AttentionBackend], changes: dict, reason: str) -> None:
    assert reason in str(backend.supports(replace(ON_GPU, **changes)))


@pytest.mark.parametrize("changes", [{"distances": 8}, {"kind": "encoder", "distances": 8}, {"kind": "cross"}])
def test_what_encoders_with_decoders_need_is_left_to_torch(changes: dict) -> None:
    spec = replace(ON_GPU, **changes)
    assert TorchAttention.supports(spec) is None
    reason = TritonAttention.supports(spec)
    assert reason is not None
    assert ("biases of distances not supported" in reason) == ("distances" in changes)


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
    rows = (1, 2, 4, 5, 12, 33, 36, 53, 54, 70, 71, 115, 116, 141, 142, 173, 174, 512)
    launches = [backend.decode_launch(count, 16384) for count in rows]
    assert [launch.splits for launch in launches] == [32, 16, 8, 16, 8, 4, 4, 4, 2, 2, 2, 2, 1, 1, 2, 2, 1, 1]
    assert [launch.min_span for launch in launches] == [
        0, 0, 0, 128, 128, 256, 256, 512, 256, 256, 2048, 2048, 0, 0, 2048, 2048, 0, 0
    ]  # fmt: skip
    long = [launch.block_n == 64 for launch in launches]
    assert long == [True] * 4 + [False] * 3 + [True] + [False] * 2 + [True] * 4 + [False] * 4
    assert [backend.decode_launch(1, length).splits for length in (100, 255, 256, 1000)] == [1, 1, 2, 4]
    assert [backend.decode_launch(80, length).splits for length in (600, 4095, 4096)] == [1, 1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_come_first_in_memory(backend: type[AttentionBackend]) -> None:
    view = backend.kv_format(SPEC).view(torch.empty(7, 2 * 4 * 2 * 16 * SPEC.kv_dtype.itemsize, dtype=torch.uint8))
    assert view.shape == (2, 7, 4, 2, 16)
    assert view.stride(1) == 2 * 4 * 2 * 16


def test_a_block_lies_in_memory_as_its_format_says() -> None:
    """Entry i of the order is the axis of a block that lies at memory position i."""
    block = BlockFormat((2, 16, 4, 8), (2, 0, 1, 3), torch.float32, 1)
    view = block.view(torch.empty(7, block.num_bytes, dtype=torch.uint8))
    assert view.shape == (2, 7, 16, 4, 8)
    assert view.stride() == (128, 1024, 8, 256, 1)
    assert BlockFormat((2, 3), (0, 1), torch.float16).view(torch.empty(5, 64, dtype=torch.uint8)).shape == (5, 2, 3)


def test_a_format_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="not a permutation of the 3 axes"):
        BlockFormat((2, 3, 4), (0, 1, 1), torch.float32)
    with pytest.raises(ValueError, match=r"block_axis must be in \[0, 2\], got 3"):
        BlockFormat((2, 3), (0, 1), torch.float32, 3)
