"""The Triton backend against the reference: on a GPU, and under the interpreter through tests/kernels."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from frame.core.ops import Ops
from frame.interfaces import BackendSetup, ContextShare
from frame.kernels import decode
from frame.kernels.decode import DecodeLaunch
from frame.kernels.row_order import longest_first
from frame.plugins.attention import triton
from frame.plugins.attention.triton import TritonAttention
from frame.testing import attention_case
from tests.plugins.attention.batches import check, make_case, run, spec_of, split_prompts, split_rows

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MIXED = [(0, 1), (5, 1), (0, 7), (70, 5), (3, 1), (30, 2), (0, 33)]
DECODES = [(0, 1), (90, 1), (3, 1), (31, 1)]
FEATURES = {
    "plain": {},
    "window": {"window": 6},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "all": {"window": 40, "soft_cap": 3.0, "sinks": True, "alibi": True},
}
# float32 on a GPU sums in another order than the reference; half precision rounds probabilities before the product.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
CLOSE = {torch.float32: 1e-5 if INTERPRETED else 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@pytest.fixture(autouse=True)
def _without_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few decodes of 16 bits have a kernel of their own on some chips, and `test_attention_few`."""
    monkeypatch.setattr(triton, "serves_few", lambda *_: False)


def layer_spec(**changes):
    return spec_of(device_type=DEVICE, **changes)


@pytest.mark.parametrize(
    "features",
    # without and with every feature for every run of the tests, one alone for the slow ones
    [
        pytest.param(given, id=name, marks=[] if name in ("plain", "all") else pytest.mark.slow)
        for name, given in FEATURES.items()
    ],
)
@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
def test_features_equal_the_reference(features: dict, rows: list) -> None:
    check(TritonAttention, make_case(TritonAttention, layer_spec(**features), rows), CLOSE[torch.float32], 1e-4)


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, rows: list) -> None:
    if TritonAttention.supports(layer_spec(dtype=dtype)):
        pytest.skip("the interpreter cannot multiply bfloat16")
    check(TritonAttention, make_case(TritonAttention, layer_spec(dtype=dtype), rows), CLOSE[dtype], CLOSE[dtype])


#: For every run of the tests: each size of heads, of groups and of pages; the other mixes of them are slow.
MIXES = {((4, 4), 64, 16), ((4, 4), 24, 3), ((7, 1), 80, 1), ((7, 1), 256, 16), ((6, 2), 80, 1), ((6, 2), 64, 16)}


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [
        pytest.param(heads, *sizes, marks=[] if (heads, *sizes) in MIXES else pytest.mark.slow)
        for heads in ((4, 4), (7, 1), (6, 2))
        for sizes in ((64, 16), (80, 1), (24, 3), (256, 16))
    ],
)
def test_head_sizes_groups_and_pages(heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    spec = layer_spec(num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size, scale=0.1)
    check(TritonAttention, make_case(TritonAttention, spec, [(0, 1), (20, 3), (0, 18)]), CLOSE[torch.float32], 1e-4)
    check(TritonAttention, make_case(TritonAttention, spec, DECODES[:3]), CLOSE[torch.float32], 1e-4)


@pytest.mark.parametrize("splits", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 8])
@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["all"]], ids=["plain", "all"])
def test_any_number_of_splits_gives_the_same_result(
    splits: int, features: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_rows(monkeypatch, splits, 0)
    case = make_case(TritonAttention, layer_spec(**features), [(90, 1), (0, 1), (200, 1)])
    check(TritonAttention, case, CLOSE[torch.float32], 1e-4)


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("head_dim", [64, 24])
def test_keys_of_few_new_tokens_are_split(
    splits: int, features: dict, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows differ in length, so that parts of some are empty; decodes stand before them, and padding behind."""
    split_prompts(monkeypatch, splits)
    rows = [(5, 1), (200, 5), (0, 7), (131, 2), (0, 33), (300, 40)]
    spec = layer_spec(head_dim=head_dim, scale=0.1, **features)
    case = make_case(TritonAttention, spec, rows, padding_tokens=5, padding_rows=3)
    check(TritonAttention, case, CLOSE[torch.float32], 1e-4)


def test_few_programs_split_keys() -> None:
    """One row of few new tokens fills the device; many rows, short ones and long prompts are not split."""
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": HALF}
    backend = TritonAttention(BackendSetup(layer_spec(**sizes), SimpleNamespace()))
    backend._multiprocessors = 132

    def splits(*rows: tuple[int, int]) -> int:
        lens = np.array(rows)
        return backend.prompt_launch(lens[:, 1], lens.sum(1)).splits

    assert splits((16384, 16)) == 33
    assert splits((16384, 16), (100, 16)) == 16
    assert splits((1000, 16)) == 3
    assert splits((300, 5)) == splits((400_000, 2000)) == 1
    assert splits(*[(16384, 5)] * 40) == 1
    windowed = TritonAttention(BackendSetup(layer_spec(**sizes, window=512), SimpleNamespace()))
    windowed._multiprocessors = 132
    assert windowed.prompt_launch(np.array([16]), np.array([16384])).splits == 2


@pytest.mark.parametrize(("heads", "head_dim"), [(40, 64), (4, 256), (40, 128)])
def test_splits_of_tiles_that_are_joined_in_smaller_parts(
    heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_rows(monkeypatch, 4, 0)
    spec = layer_spec(num_heads=heads, num_kv_heads=1, head_dim=head_dim, scale=0.1)
    check(TritonAttention, make_case(TritonAttention, spec, [(200, 1), (300, 1)]), CLOSE[torch.float32], 1e-4)


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
def test_padding_is_skipped_and_finite(rows: list) -> None:
    case = make_case(TritonAttention, layer_spec(), rows, padding_tokens=5, padding_rows=3)
    check(TritonAttention, case, CLOSE[torch.float32], 1e-4)


def test_padding_rows_may_own_a_token() -> None:
    case = make_case(TritonAttention, layer_spec(), DECODES, padding_tokens=2, padding_rows=2)
    batch = case.batch
    batch.host_query_lens[-2:] = 1
    batch.query_start[-2:] += torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    out, _ = run(TritonAttention, case)
    assert torch.isfinite(out).all()
    assert (out[-2:] == 0).all()


def test_blocks_may_lie_apart_in_memory() -> None:
    case = make_case(TritonAttention, layer_spec(), MIXED, page_slack=24)
    check(TritonAttention, case, CLOSE[torch.float32], 1e-4)


def test_a_decode_reads_what_a_prompt_of_the_same_step_stores() -> None:
    """Of two equal prompts admitted together, the second has one token left and stands first in the batch."""
    case = make_case(TritonAttention, layer_spec(), [(8, 1), (0, 12)])
    case.batch.block_table[0, :2] = case.batch.block_table[1, :2]
    check(TritonAttention, case, CLOSE[torch.float32], 1e-4)


def test_a_query_that_is_a_view_of_a_projection() -> None:
    case = make_case(TritonAttention, layer_spec(), MIXED)
    joined = torch.cat((case.query, case.key, case.value), dim=1)
    query, key, value = joined.split([4, 2, 2], dim=1)
    check(TritonAttention, replace(case, query=query, key=key, value=value), CLOSE[torch.float32], 1e-4)


def test_write_kv_is_exact_and_skips_negative_slots() -> None:
    from frame.kernels.attention import write_kv

    draw = torch.Generator().manual_seed(5)
    key, value = (torch.randn(20, 3, 24, generator=draw).to(DEVICE) for _ in range(2))
    slots = torch.randperm(6 * 5, generator=draw)[:20]
    slots[::6] = -1
    got, want = (torch.full((2, 6, 5, 3, 24), 7.0, device=DEVICE) for _ in range(2))
    write_kv(key, value, got, slots.to(DEVICE))
    Ops.write_kv(key, value, want, slots.to(DEVICE))
    assert torch.equal(got, want)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_counts_begin_anew_with_every_launch(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_rows(monkeypatch, splits, 0)
    case = make_case(TritonAttention, layer_spec(), [(90, 1), (0, 1), (200, 1)])
    backend = TritonAttention(BackendSetup(case.spec, Ops()))
    first, second = (
        backend.forward(case.layer, case.query, case.key, case.value, case.cache, backend.plan(case.batch))
        for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("splits", [2, 4])
def test_only_long_rows_are_split_where_splits_have_a_least_length(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_rows(monkeypatch, splits, 32)
    case = make_case(TritonAttention, layer_spec(), [(20, 1), (62, 1), (63, 1), (0, 1), (200, 1)])
    check(TritonAttention, case, CLOSE[torch.float32], 1e-4)
    made: list[torch.Tensor] = []

    def poisoned(*sizes: Any, **options: Any) -> torch.Tensor:
        made.append(torch.empty(*sizes, **options).fill_(float("nan")))
        return made[-1]

    backend = TritonAttention(BackendSetup(case.spec, Ops()))
    out = torch.zeros_like(case.query)
    with monkeypatch.context() as patch:
        patch.setattr(decode, "torch", SimpleNamespace(empty=poisoned, float32=torch.float32))
        decode.decode_attention(
            case.query, case.key, case.value, case.cache, case.batch.slot_mapping, case.batch.seq_lens,
            case.batch.block_table, scale=case.spec.scale, out=out, launch=backend.decode_launch(5, 201),
            arrivals=torch.zeros(64, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
    lse = next(tensor for tensor in made if tensor.dim() == 3)
    parts = (~lse.isnan()).sum(-1)
    assert parts.unique(dim=1).flatten().tolist() == [0, 0, 2, 0, splits]


def test_decodes_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "_order", lambda _, batch, n: longest_first(batch.seq_lens[:n]))
    rows = [(3, 1), (90, 1), (0, 1), (31, 1), (90, 1), (7, 1)]
    check(TritonAttention, make_case(TritonAttention, layer_spec(), rows), CLOSE[torch.float32], 1e-4)
    check(TritonAttention, make_case(TritonAttention, layer_spec(), [*rows, (4, 9)]), CLOSE[torch.float32], 1e-4)
    padded = make_case(TritonAttention, layer_spec(), rows, padding_tokens=2, padding_rows=2)
    check(TritonAttention, padded, CLOSE[torch.float32], 1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_many_rows_are_taken_up_in_order(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(
        TritonAttention,
        layer_spec(deterministic=deterministic, dtype=HALF, head_dim=64),
        [(9, 1), (40, 1), (0, 1), (20, 1), (3, 1)],
    )
    backend = TritonAttention(BackendSetup(case.spec, Ops()))
    for multiprocessors, ordered in ((3, False), (2, True)):  # ten programs
        monkeypatch.setattr(backend, "_multiprocessors", multiprocessors)
        plan = backend.plan(case.batch)
        assert plan.decode is not None
        assert (None if plan.order is None else plan.order.tolist()) == ([1, 3, 0, 4, 2] if ordered else None)


def test_few_rows_have_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "_share", lambda *_: 0.25)
    case = make_case(TritonAttention, layer_spec(dtype=HALF, head_dim=64), [(300, 1), (1, 1), (700, 1)])
    backend = TritonAttention(BackendSetup(case.spec, Ops()))
    assert backend.decode_launch(3, 701) == DecodeLaunch(16, 64, 4, 2, 3)
    check(TritonAttention, case, CLOSE[HALF], CLOSE[HALF])


@pytest.mark.parametrize("num_rows", [0, 1, 31, 33, 300])
def test_the_longest_rows_come_first(num_rows: int) -> None:
    lengths = torch.randint(0, 40, (num_rows,), dtype=torch.int32, device=DEVICE)
    order = longest_first(lengths)
    assert order.dtype == torch.int32
    assert order.tolist() == torch.sort(lengths, descending=True, stable=True).indices.tolist()


#: Layers whose rows one warp serves, and some that it does not.
SIZES = {
    "64": {"head_dim": 64}, "80": {"head_dim": 80}, "96": {"head_dim": 96}, "128": {"head_dim": 128},
    "256": {"head_dim": 256}, "7 heads a KV head": {"head_dim": 128, "num_heads": 14, "num_kv_heads": 2},
    "one": {"head_dim": 128, "num_heads": 4, "num_kv_heads": 4},
    "16": {"head_dim": 128, "num_heads": 32, "num_kv_heads": 2},
    "24": {"head_dim": 128, "num_heads": 24, "num_kv_heads": 1},
}  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's products come from a library that promises no fixed order")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 64, **features} for features in FEATURES.values()] + list(SIZES.values()),
    ids=[*FEATURES, *SIZES],
)
def test_deterministic_bits_depend_on_the_row_alone(changes: dict, dtype: torch.dtype) -> None:
    """A prompt of 300 tokens: at once, in chunks, and its last token decoded among others."""
    spec = layer_spec(dtype=dtype, deterministic=True, **changes)
    whole = make_case(TritonAttention, spec, [(0, 300)])
    want, cache = run(TritonAttention, whole)
    for first, last in itertools.pairwise([0, 20, 21, 64, 131, 299, 300]):
        rows = 5 if last - first == 1 else 1
        part = slice(first, last)
        repeat = np.full(rows, last - first, dtype=np.int32)
        batch = replace(
            whole.batch,
            num_tokens=rows * (last - first),
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * (last - first),
            seq_lens=torch.full((rows,), last, dtype=torch.int32, device=DEVICE),
            block_table=whole.batch.block_table.expand(rows, -1).contiguous(),
            slot_mapping=whole.batch.slot_mapping[part].repeat(rows),
            host_query_lens=repeat,
            host_seq_lens=np.full(rows, last, dtype=np.int32),
        )
        pieces = [x[part].repeat(rows, 1, 1) for x in (whole.query, whole.key, whole.value)]
        got, _ = run(
            TritonAttention,
            replace(whole, batch=batch, query=pieces[0], key=pieces[1], value=pieces[2], cache=cache),
        )
        for row in got.split(last - first):
            assert torch.equal(row, want[part]), (first, last)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["all"]], ids=["plain", "all"])
def test_a_step_of_padding_with_more_tokens_than_rows_stores_nothing(features: dict, rows: int) -> None:
    case = attention_case.make_case(layer_spec(**features), [(90, 0)] * rows)
    backend = TritonAttention(BackendSetup(case.spec, Ops()))
    attention_case.check_padding(attention_case.CaseRun(backend, case, stale=float("nan")))


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("share", [ContextShare(), ContextShare(2, 0), ContextShare(2, 1)], ids=["all", "even", "odd"])
@pytest.mark.parametrize("parts", [1, 4])
def test_log_sum_exps_over_a_share_of_the_context(
    monkeypatch: pytest.MonkeyPatch, parts: int, share: ContextShare, rows: list
) -> None:
    """Rows whose keys are read by several programs, and rows without a key in the share, included."""
    split_rows(monkeypatch, parts, 0)
    split_prompts(monkeypatch, parts)
    spec = layer_spec(returns_lse=True, context=share, window=24 if parts == 1 else 0)
    case = attention_case.make_case(spec, rows)
    step = attention_case.CaseRun(TritonAttention(BackendSetup(spec, Ops())), case, stale=float("nan"))
    step.fill_history()
    ((out, lse),) = step.step(padding_rows=1, padding_tokens=1)
    want, want_lse = case.expected_parts()
    close = CLOSE[torch.float32]
    torch.testing.assert_close(out[:-1].cpu(), want.float(), atol=close, rtol=1e-4)
    torch.testing.assert_close(lse[:-1].cpu(), want_lse.float(), atol=close, rtol=1e-4)
