from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from frame.core.ops import Ops
from frame.interfaces import BackendSetup
from frame.plugins.attention import paging
from frame.plugins.attention.torch import TorchAttention
from frame.testing import attention_case
from tests.plugins.attention.batches import SPEC, check, make_case, run, spec_of

pytestmark = pytest.mark.product

MIXED = [(0, 1), (5, 1), (16, 1), (0, 7), (9, 5), (3, 1), (30, 2), (0, 33)]
FEATURES = {
    "plain": {},
    "window": {"window": 6},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "all": {"window": 6, "soft_cap": 3.0, "sinks": True, "alibi": True},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_mixed_batch_equals_the_reference(features: dict, heads: tuple[int, int], deterministic: bool) -> None:
    spec = spec_of(num_heads=heads[0], num_kv_heads=heads[1], deterministic=deterministic, **features)
    check(TorchAttention, make_case(TorchAttention, spec, MIXED))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("rows", [[(0, 1)], [(37, 1)], [(40, 1), (3, 1), (8, 1)], [(0, 300)], [(290, 20)], [(5, 700)]])
def test_batches_of_one_kind_equal_the_reference(features: dict, rows: list) -> None:
    check(TorchAttention, make_case(TorchAttention, spec_of(**features), rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_half_precision_is_as_close_as_its_rounding(dtype: torch.dtype, features: dict) -> None:
    check(TorchAttention, make_case(TorchAttention, spec_of(dtype=dtype, **features), MIXED), atol=2e-2, rtol=2e-2)


def test_a_cache_of_another_dtype_is_read_back_in_the_layers_dtype() -> None:
    spec = spec_of(dtype=torch.float32, kv_dtype=torch.bfloat16)
    check(TorchAttention, make_case(TorchAttention, spec, MIXED))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_a_cache_of_8_bit_floats(kv_dtype: torch.dtype, deterministic: bool, features: dict) -> None:
    """The kept bytes are the reference's own; values beyond the type's range become its largest number."""
    spec = spec_of(kv_dtype=kv_dtype, deterministic=deterministic, **features)
    case = make_case(TorchAttention, spec, MIXED, page_slack=16 if deterministic else 0, scales=(0.02, 3e-5))
    case.value[0, 0, 0] = 1e9
    check(TorchAttention, case)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_padding_rows_and_tokens_are_skipped(features: dict) -> None:
    case = make_case(TorchAttention, spec_of(**features), MIXED, padding_tokens=5, padding_rows=3)
    check(TorchAttention, case)


def test_blocks_may_lie_apart_in_memory() -> None:
    check(TorchAttention, make_case(TorchAttention, spec_of(), MIXED, page_slack=24))


def test_rows_of_very_different_length_fall_into_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "MAX_PADDED_BYTES", 4096)
    case = make_case(TorchAttention, spec_of(), [(90, 1), (0, 1), (88, 1), (3, 1), (40, 1), (41, 1)])
    assert len(TorchAttention(BackendSetup(case.spec, None)).plan(case.batch).decodes) == 3
    check(TorchAttention, case)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=9),
    block_size=st.sampled_from([1, 3, 8, 16]),
    window=st.sampled_from([0, 0, 1, 5, 17]),
    head_dim=st.sampled_from([8, 24]),
    seed=st.integers(0, 1000),
    deterministic=st.booleans(),
)
def test_random_batches_equal_the_reference(
    rows: list, block_size: int, window: int, head_dim: int, seed: int, deterministic: bool
) -> None:
    spec = spec_of(block_size=block_size, window=window, head_dim=head_dim, deterministic=deterministic)
    check(TorchAttention, make_case(TorchAttention, spec, rows, seed=seed))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_bits_depend_on_the_row_alone(features: dict, dtype: torch.dtype) -> None:
    """One prompt of 53 tokens: at once, in chunks with other rows beside it, and token by token."""
    spec = spec_of(dtype=dtype, deterministic=True, **features)
    whole = make_case(TorchAttention, spec, [(0, 53)])
    want, cache = run(TorchAttention, whole)
    for cuts in ([0, 20, 21, 39, 53], list(range(54)), [0, 16, 53]):
        for first, last in itertools.pairwise(cuts):
            beside = make_case(TorchAttention, spec, [(7, 1), (2, 9)], seed=3)
            joined = _join(whole, cache, first, last, beside)
            got, _ = run(TorchAttention, joined)
            assert torch.equal(got[: last - first], want[first:last]), (first, last)


def _join(whole, cache, first, last, beside):
    """The batch of tokens [first, last) of `whole`, whose earlier ones are cached, in front of the rows of `beside`."""
    shift = cache.shape[1]
    own = whole.batch.block_table[:, : -(-last // SPEC.block_size)]
    width = max(own.shape[1], beside.batch.block_table.shape[1])
    table = torch.zeros(3, width, dtype=torch.int32)
    table[0, : own.shape[1]] = own
    table[1:, : beside.batch.block_table.shape[1]] = beside.batch.block_table + shift
    count = last - first
    batch = replace(
        beside.batch,
        num_tokens=beside.batch.num_tokens + count,
        query_start=torch.cat((torch.zeros(1, dtype=torch.int32), beside.batch.query_start + count)),
        seq_lens=torch.cat((torch.tensor([last], dtype=torch.int32), beside.batch.seq_lens)),
        block_table=table,
        slot_mapping=torch.cat(
            (whole.batch.slot_mapping[first:last], beside.batch.slot_mapping + shift * SPEC.block_size)
        ),
        host_query_lens=torch.tensor([count, *beside.batch.host_query_lens.tolist()]).numpy(),
        host_seq_lens=torch.tensor([last, *beside.batch.host_seq_lens.tolist()]).numpy(),
    )
    both = torch.cat((cache, beside.cache), dim=1).permute(1, 2, 0, 3, 4).contiguous().permute(2, 0, 1, 3, 4)
    layer = whole.layer
    parts = [torch.cat((getattr(whole, name)[first:last], getattr(beside, name))) for name in ("query", "key", "value")]
    return replace(beside, layer=layer, batch=batch, query=parts[0], key=parts[1], value=parts[2], cache=both)


@pytest.mark.parametrize("features", [{}, {"window": 6}, FEATURES["all"]])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_of_padding_stores_nothing(features: dict, rows: int) -> None:
    """Though the host believes that each row has a token: a platform may run steps with prompts so."""
    case = attention_case.make_case(spec_of(**features), [(90, 0)] * rows)
    backend = TorchAttention(BackendSetup(case.spec, Ops()))
    attention_case.check_padding(attention_case.CaseRun(backend, case, stale=float("nan")))
