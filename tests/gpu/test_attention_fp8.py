"""The Triton kernels over a cache of 8-bit floats: on a GPU, and under the interpreter through tests/kernels."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch

from frame.core.ops import Ops, attention as reference
from frame.interfaces import BackendSetup
from frame.plugins.attention import triton as triton_attention, triton_narrow, triton_wide
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.attention.triton_narrow import NarrowRule
from tests.plugins.attention.batches import check, make_case, spec_of, split_rows

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MIXED = [(0, 1), (5, 1), (70, 5), (0, 9)]
DECODES = [(0, 1), (90, 1), (31, 1)]
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
CLOSE = 1e-5 if INTERPRETED else 3e-2
CASES = [
    (torch.float8_e4m3fn, {}),
    (torch.float8_e5m2, {"window": 40, "soft_cap": 3.0, "sinks": True, "alibi": True}),
]


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize(("kv_dtype", "features"), CASES)
def test_keys_and_values_are_the_references_own(kv_dtype: torch.dtype, features: dict, rows: list) -> None:
    spec = spec_of(device_type=DEVICE, dtype=DTYPE, kv_dtype=kv_dtype, **features)
    case = make_case(TritonAttention, spec, rows, scales=(0.02, 3e-5))
    case.value[0, 0, 0] = 1e9  # beyond the type's range: its largest number is kept
    check(TritonAttention, case, CLOSE, CLOSE)


HEAD_SCALES = (torch.tensor([0.02, 0.5]), torch.tensor([3e-5, 1.75]))


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize(("kv_dtype", "features"), CASES)
def test_each_kv_head_may_have_scales_of_its_own(kv_dtype: torch.dtype, features: dict, rows: list) -> None:
    spec = spec_of(device_type=DEVICE, dtype=DTYPE, kv_dtype=kv_dtype, **features)
    case = make_case(TritonAttention, spec, rows, scales=tuple(scale.to(DEVICE) for scale in HEAD_SCALES))
    check(TritonAttention, case, CLOSE, CLOSE)


@pytest.mark.parametrize(("kv_dtype", "features"), [CASES[0], (torch.float8_e5m2, {"window": 40, "soft_cap": 3.0})])
@pytest.mark.parametrize("scales", [(0.02, 3e-5), HEAD_SCALES], ids=["numbers", "heads"])
def test_prompts_are_read_from_wide_pages(kv_dtype, features, scales, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Hopper kernel on such a GPU, elsewhere by one that stands for it; decodes read the cache itself."""
    given = tuple(scale.to(DEVICE) if isinstance(scale, torch.Tensor) else scale for scale in scales)
    spec = spec_of(device_type=DEVICE, dtype=DTYPE, kv_dtype=kv_dtype, head_dim=128, block_size=16, **features)
    seen = []
    if INTERPRETED:

        def stand_in(query, cache, query_start, seq_lens, table, *, out, **how):
            seen.append(cache.shape[1])
            found = reference.paged_attention(query, cache, query_start, seq_lens, table, **how)
            for start, end in pairwise(query_start.tolist()):
                out[start:end] = found[start:end]

        monkeypatch.setattr(triton_attention, "_hopper_kernel", lambda *_: stand_in)
        monkeypatch.setattr(triton_attention, "MIN_HOPPER_QUERIES", 8)
    else:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs Hopper")
        made = triton_wide.widen
        monkeypatch.setattr(triton_wide, "widen", lambda *a, **k: seen.append(k["num_pages"]) or made(*a, **k))
    lengths = (70, 9, 17, 33) if INTERPRETED else (700, 65, 129, 300)
    rows = [(0, 1), (21, 1), (5, lengths[0]), (0, lengths[1]), (40, lengths[2]), (0, lengths[3])]
    case = make_case(TritonAttention, spec, rows, scales=given, padding_tokens=3)
    check(TritonAttention, case, CLOSE, CLOSE)
    assert seen == [sum(-(-(before + new) // 16) for before, new in rows[2:])]
    monkeypatch.setattr(triton_wide, "MOST_BYTES", 1000)
    check(TritonAttention, case, CLOSE, CLOSE)
    assert len(seen) == 1


def test_several_splits_and_heads_of_128(monkeypatch: pytest.MonkeyPatch) -> None:
    split_rows(monkeypatch, 4, 0)
    spec = spec_of(device_type=DEVICE, dtype=DTYPE, kv_dtype=torch.float8_e4m3fn, head_dim=128, block_size=16)
    check(TritonAttention, make_case(TritonAttention, spec, [(300, 1), (0, 1)], scales=(0.5, 2.0)), CLOSE, CLOSE)


@pytest.mark.parametrize("splits", [1, 4])
def test_decodes_by_a_kernel_of_their_own_where_rules_say_so(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    monkeypatch.setattr(triton_narrow, "NARROW_RULES", (NarrowRule(1e9, splits),))
    monkeypatch.setattr(triton_narrow, "MIN_NARROW_SPLIT", 32)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    given = {"device_type": DEVICE, "dtype": dtype, "kv_dtype": torch.float8_e4m3fn, "head_dim": 128, "block_size": 16}
    for rows in ([(150, 1), (0, 1), (31, 1)], [(90, 1), (0, 5)]):
        case = make_case(TritonAttention, spec_of(**given), rows, scales=(0.5, 2.0))
        plan = TritonAttention(BackendSetup(spec_of(**given), Ops())).plan(case.batch)
        assert plan.narrow is not None
        check(TritonAttention, case, 1e-2, 3e-2)
    for other in ({"window": 40}, {"sinks": True}, {"dtype": torch.float32}, {"deterministic": True}):
        backend = TritonAttention(BackendSetup(spec_of(**{**given, **other}), Ops()))
        assert backend.plan(case.batch).narrow is None


def test_a_deterministic_row_has_the_same_bits_in_other_batches() -> None:
    if INTERPRETED:
        pytest.skip("the interpreter's products come from a library that promises no fixed order")
    spec = spec_of(device_type=DEVICE, dtype=DTYPE, kv_dtype=torch.float8_e4m3fn, deterministic=True)
    case = make_case(TritonAttention, spec, MIXED)
    backend = TritonAttention(BackendSetup(spec, Ops()))
    outs = []
    for _ in range(2):
        plan = backend.plan(case.batch)
        outs.append(backend.forward(case.layer, case.query, case.key, case.value, case.cache.clone(), plan))
    assert torch.equal(*outs)
