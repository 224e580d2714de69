"""Which decode steps are served by the kernel for few rows, and what it launches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from frame.core.interfaces.attention import AttentionSpec, ContextShare, GroupBatch, SharedPrefix
from frame.core.ops import Ops
from frame.interfaces import BackendSetup
from frame.plugins.attention import triton_few
from frame.plugins.attention.triton_options import TritonOptions

pytest.importorskip("triton")

from frame.kernels.decode_few import FewLaunch
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.attention.triton_few import few_launch, serves_few

BF16 = torch.bfloat16
LLAMA = AttentionSpec(32, 8, 128, 0.1, BF16, BF16, 16, "cpu")
GPT_OSS = AttentionSpec(64, 8, 64, 0.1, BF16, BF16, 16, "cpu", sinks=True)
HALF_70B = replace(LLAMA, num_kv_heads=4)
LONG = 131072
SMALL, USUAL, ANY = FewLaunch(128, 8, 1, 0, lets_in=False), FewLaunch(32, 4, 1, 64), FewLaunch(64, 4, 1, 128)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_few, "is_hopper", lambda device: True)


def batch_of(rows: int, longest: int, **changes: Any) -> GroupBatch:
    lens = np.ones(rows, np.int32)
    nothing = torch.zeros(rows, dtype=torch.int32)
    plain = GroupBatch(
        rows, nothing, nothing, nothing.view(-1, 1), nothing.long(), lens, np.full(rows, longest, np.int32), 1, longest
    )
    return replace(plain, **changes)


def launch(spec: AttentionSpec, rows: int, longest: int, *, always: bool = False) -> FewLaunch | None:
    return few_launch(spec, batch_of(rows, longest), 132, always=always)


@pytest.mark.parametrize(
    ("spec", "rows", "longest", "expected"),
    [
        (LLAMA, 1, 4096, replace(USUAL, splits=32)),
        (LLAMA, 1, 64, replace(USUAL, splits=32)),
        (LLAMA, 2, 4096, replace(USUAL, splits=16)),
        (LLAMA, 4, 1024, replace(USUAL, splits=8)),
        (LLAMA, 3, 1024, replace(USUAL, splits=8)),
        (LLAMA, 8, 1024, replace(USUAL, splits=4)),
        (HALF_70B, 1, 4096, replace(USUAL, splits=32)),
        (HALF_70B, 8, 1024, replace(USUAL, splits=8)),
        (LLAMA, 1, 8192, replace(USUAL, splits=32)),
        (GPT_OSS, 1, 8192, replace(SMALL, splits=16, min_span=256)),
        (GPT_OSS, 4, 4096, replace(SMALL, splits=4, min_span=256)),
        (GPT_OSS, 8, 1024, replace(SMALL, splits=2, min_span=256)),
        (replace(GPT_OSS, window=128), 1, LONG, SMALL),
        (replace(GPT_OSS, window=128), 8, LONG, SMALL),
        (replace(LLAMA, window=1024), 1, LONG, replace(USUAL, splits=16)),
    ],
)  # fmt: skip
def test_steps_take_what_was_measured(spec: AttentionSpec, rows: int, longest: int, expected: FewLaunch) -> None:
    assert launch(spec, rows, longest) == replace(expected, early=False)


@pytest.mark.parametrize(
    ("spec", "rows", "longest"),
    [
        (LLAMA, 1, 8193),
        (LLAMA, 2, 4097),
        (GPT_OSS, 1, 8193),
        (LLAMA, 4, 1025),
        (LLAMA, 8, LONG),
        (LLAMA, 9, 64),
        (replace(LLAMA, num_kv_heads=32), 8, 64),
        (GPT_OSS, 4, 4097),
    ],
)
def test_longer_and_more_rows_do_not(spec: AttentionSpec, rows: int, longest: int) -> None:
    assert launch(spec, rows, longest) is None


def test_a_user_may_ask_for_it_up_to_eight_rows_of_any_length() -> None:
    assert launch(LLAMA, 1, LONG, always=True) == replace(ANY, splits=32, early=False)
    assert launch(LLAMA, 8, LONG, always=True) == replace(ANY, splits=4, early=False)
    assert launch(HALF_70B, 1, LONG, always=True) == replace(ANY, splits=64, early=False)
    assert launch(replace(LLAMA, num_kv_heads=32), 8, LONG, always=True) == replace(ANY, min_span=0, early=False)
    assert launch(LLAMA, 1, 4096, always=True) == launch(LLAMA, 1, 4096)
    assert launch(LLAMA, 9, 64, always=True) is None


def test_what_the_kernel_does_not_know_is_left_to_others() -> None:
    assert serves_few(LLAMA, None)
    assert serves_few(replace(LLAMA, window=64, sinks=True), None)
    others = (
        {"soft_cap": 5.0}, {"alibi": True}, {"returns_lse": True}, {"deterministic": True}, {"head_dim": 256},
        {"context": ContextShare(2, 1)}, {"kind": "cross"}, {"kv_dtype": torch.float8_e4m3fn}, {"num_kv_heads": 1},
        {"dtype": torch.float32, "kv_dtype": torch.float32},
    )  # fmt: skip
    for changes in others:
        assert not serves_few(replace(LLAMA, **changes), True), changes
    prefix = SharedPrefix(*(torch.zeros(1, dtype=torch.int32) for _ in range(3)))
    for changes in ({"deterministic": True}, {"prefix": prefix}, {"max_query_len": 2}):
        assert few_launch(LLAMA, batch_of(1, 64, **changes), 132, always=True) is None, changes


def test_other_chips_take_it_where_a_user_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_few, "is_hopper", lambda device: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not serves_few(LLAMA, None)
    assert serves_few(LLAMA, True)
    assert not serves_few(LLAMA, False)


def plan(batch: GroupBatch, wanted: bool | None = None, spec: AttentionSpec = LLAMA) -> Any:
    backend = TritonAttention(BackendSetup(spec, Ops()), TritonOptions(few_decodes=wanted, hopper_prefill=False))
    backend._multiprocessors = 132
    return backend.plan(batch)


def test_plans_say_what_serves_decodes() -> None:
    assert plan(batch_of(2, 300)).few == replace(USUAL, splits=16, early=False)
    assert plan(batch_of(2, 300), False).few is None
    assert plan(batch_of(2, LONG)).few is None
    assert plan(batch_of(2, LONG), True).few == replace(ANY, splits=16, early=False)


def test_every_row_must_be_a_decode() -> None:
    """A padded row without a token, and a prompt beside decodes."""
    lens = np.array([1, 0], np.int32)
    padded = batch_of(2, 300, host_query_lens=lens)
    assert plan(padded, True).few is not None  # with a token that no row owns: it is padding
    assert plan(replace(padded, num_tokens=1), True).few is None
    assert plan(batch_of(2, 300, host_query_lens=np.array([1, 5], np.int32), num_tokens=6), True).few is None


def test_only_captured_steps_read_early_and_a_launch_of_the_plan_keeps_the_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TritonAttention(BackendSetup(LLAMA, Ops()))
    backend._multiprocessors = 132
    backend._arrivals.append(torch.ones(4096, dtype=torch.int32))
    on_device = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    batch = batch_of(2, 300, seq_lens=on_device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    few = backend.plan(batch).few
    assert few is not None
    assert not few.early
    assert backend._arrivals[-1].all()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    few = backend.plan(batch).few
    assert few is not None
    assert few.early
    assert not backend._arrivals[-1].any()
