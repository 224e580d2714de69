"""The kernels in C give what torch gives, and are done without where there is no compiler."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from frame.kernels.native import library, packed
from frame.kernels.native.nibbles import NibbleWeight
from frame.kernels.native.rows import NativeRows, native_rows
from frame.ops import Ops, StepBuffers, StepSizes
from frame.plugins.platforms import cpu_linear
from frame.plugins.platforms.cpu_ops import CpuOps

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def native() -> NativeRows:
    found = native_rows()
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(request.param)
    yield request.param
    torch.set_num_threads(before)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether they differ by roundings of `dtype`, against the largest number."""
    far = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return bool(far < (3e-6 if dtype == torch.float32 else 1e-2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 7), (3, 64), (5, 100)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(native, dtype, heads, dim, offset):
    x = torch.randn(900, heads + 2, dim).to(dtype)[:, :heads]
    weight = torch.randn(dim).to(dtype)
    found = native.rms_norm(x, weight, 1e-6, offset)
    torch.testing.assert_close(found, Ops.rms_norm(x, weight, 1e-6, offset))
    residual = torch.randn(x.shape).to(dtype)
    for got, want in zip(
        native.add_rms_norm(x, residual, weight, 1e-6, offset),
        Ops.add_rms_norm(x, residual, weight, 1e-6, offset),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    assert native.rms_norm(x, weight.double(), 1e-6, offset) is None
    short = weight[1:].contiguous()  # what lies behind a weight is not read
    assert native.rms_norm(x, short, 1e-6, offset) is None
    assert native.add_rms_norm(x, residual, short, 1e-6, offset) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(native, dtype):
    x = (torch.randn(40, 2 * 1001) * 30).to(dtype)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30])
    x[0, 1001:] = 1
    found = native.silu_mul(x)
    assert found[0, 0].isnan()
    assert found[0, 1].isinf()
    assert found[0, 3] == x[0, 3]
    torch.testing.assert_close(found[1:], Ops.silu_mul(x[1:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
def test_turned_heads(native, dtype, norms):
    joined, table = torch.randn(300, 8, 20).to(dtype), torch.randn(500, 20)
    query, key, positions = joined[:, :5], joined[:, 5:7], torch.randint(0, 500, (300,))
    weights = (torch.randn(20).to(dtype), torch.randn(20).to(dtype))
    if norms:
        found = native.rotary(query, key, positions, table, weights, 1e-6, 0.0)
        short = weights[0], weights[1][1:].contiguous()
        assert native.rotary(query, key, positions, table, short, 1e-6, 0.0) is None
        want = Ops.norm_rotary(query, key, weights, 1e-6, 0.0, positions, table)
    else:
        found, want = native.rotary(query, key, positions, table), Ops.rotary(query, key, positions, table)
    for got, expected in zip(found, want, strict=True):
        assert near(got, expected, dtype)
    assert native.rotary(query, key, positions, table[:, :16].contiguous()) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (8, 2, 64), (6, 2, 128), (16, 1, 256), (5, 1, 48)])
@pytest.mark.parametrize(("block", "window"), [(16, 0), (5, 0), (32, 37)])
def test_attention_of_one_token(native, dtype, heads, kv_heads, dim, block, window):
    """Scores that only grow and scores that only shrink, lengths that no tile divides, and blocks anywhere."""
    assert native.attends(dtype, heads, kv_heads, dim)
    lengths = torch.tensor([1, 15, 16, 17, 100, 0], dtype=torch.int32)
    cache = torch.randn(200, block, 2, kv_heads, dim)
    cache[:, :, 0] *= torch.linspace(-3, 3, 200)[:, None, None, None]
    cache = cache.to(dtype)
    keys, values = cache[:, :, 0], cache[:, :, 1]
    tables = torch.randperm(200)[: 6 * 21].view(6, 21).int()
    query = torch.randn(len(lengths), heads + 1, dim).to(dtype)[:, :heads]
    found = native.attend(query, keys, values, tables, lengths, 0.3, window)
    assert not found[5].any()
    for row, length in enumerate(lengths.tolist()[:5]):
        tokens = torch.arange(max(0, length - window) if window else 0, length)
        chosen = tables[row, tokens // block].long(), tokens % block
        q, k, v = (one.double().transpose(0, 1) for one in (query[row : row + 1], keys[chosen], values[chosen]))
        want = functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True).transpose(0, 1)
        assert near(found[row], want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_put_to_their_slots(native, dtype):
    joined = torch.randn(4, 9, 7).to(dtype)
    key, value, slots = joined[:, 1:4], joined[:, 5:8], torch.tensor([7, -1, 0, 13])
    caches = torch.zeros(2, 3, 5, 2, 3, 7).to(dtype)  # before and after, blocks, tokens, keys and values, heads
    native.store(key, value, slots, caches[1, :, :, 0], caches[1, :, :, 1])
    want = caches[0]
    for token, slot in ((0, 7), (2, 0), (3, 13)):
        want[slot // 5, slot % 5, 0], want[slot // 5, slot % 5, 1] = key[token], value[token]
    assert torch.equal(caches[1], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 50, 1000])
def test_the_best_token(native, dtype, size):
    """Ties, infinities and no numbers, which are the first of a row or not."""
    logits = torch.randn(60, size).round(decimals=1).to(dtype)
    logits[1], logits[2] = -float("inf"), 3.0
    for row in range(3, 30):
        logits[row, torch.randint(size, (3,))] = float("nan") if row % 2 else float("inf")
    logits[30] = float("nan")
    best, values = native.greedy(logits)
    wide = logits.float().numpy()
    assert np.array_equal(best.numpy(), wide.argmax(-1))
    assert best.dtype == torch.int32
    assert np.array_equal(values.numpy(), wide[np.arange(60), wide.argmax(-1)], equal_nan=True)
    assert native.greedy(logits.double()) is None
    assert native.greedy(logits.t()) is None or size == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_looked_up_rows(native, dtype):
    table, ids = torch.randn(40, 13).to(dtype), torch.tensor([3, 39, 0, 3], dtype=torch.int32)
    assert torch.equal(native.lookup(ids, table), Ops.lookup(ids, table))
    assert native.lookup(ids.long(), table) is None
    assert native.lookup(ids[::2], table) is None
    assert native.lookup(ids, table.t()) is None


@pytest.mark.parametrize("computed", [[0], [9, 33, 4, 0]])
@pytest.mark.parametrize("padding", [0, 2])
def test_inputs_of_one_token_each(native, computed, padding):
    """As the reference, but for blocks behind a row's tokens, which nobody reads."""
    count = len(computed) + padding
    rows = torch.zeros(3, count, dtype=torch.int32)
    rows[0, : len(computed)] = torch.randperm(7)[: len(computed)].int()
    rows[1, : len(computed)], rows[2, : len(computed)] = torch.tensor(computed), 1
    token_ids = torch.randint(1, 1000, (7, 50)).int()
    tables = [torch.randint(0, 90, (7, width)).int() for width in (10, 4)]
    sizes = StepSizes(count, (10, 4), (5, 16))
    assert native.one_token_each(rows, count, token_ids, *tables)
    found, want = (StepBuffers.allocate(count, count, sizes.max_blocks, torch.device("cpu")) for _ in range(2))
    CpuOps(compiled=True).build_inputs(found, token_ids, tables, rows, sizes)
    Ops.build_inputs(want, token_ids, tables, rows, sizes)
    for name in ("input_ids", "positions", "query_start", "seq_lens"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name
    for group, size in enumerate(sizes.block_sizes):
        assert torch.equal(found.slot_mapping[group], want.slot_mapping[group])
        for row, before in enumerate(computed):
            used = before // size + 1
            assert torch.equal(found.tables[group][row, :used], want.tables[group][row, :used])
    rows[2, -1] = 2
    assert not native.one_token_each(rows, count, token_ids)
    rows[2] = torch.arange(count)  # padding that does not come last
    assert count == 1 or not native.one_token_each(rows, count, token_ids)
    assert not native.one_token_each(rows, count, token_ids.long())


def test_drawn_tokens_are_appended(native):
    ids, want = torch.zeros(4, 9, dtype=torch.int32), torch.zeros(4, 9, dtype=torch.int32)
    slots, lengths, drawn = (torch.tensor(one).int() for one in ([2, 0, -1, 3, 1], [4, 0, 3, 8, 2], [7, 8, 9, 5, -1]))
    assert native.advance(ids, slots, lengths, drawn)
    Ops.advance(want, slots, lengths, drawn)
    assert torch.equal(ids, want)
    assert not native.advance(ids, slots.long(), lengths, drawn)
    values = torch.randn(5)
    assert torch.equal(native.join_drawn(drawn, values), Ops.join_drawn(drawn, values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_are_made_again(native, dtype):
    """On what lies at the same places then, and of no other thread than the one that wrote them down."""
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(20).to(dtype)
    other = torch.randn(2, 8).to(dtype)
    with native.noted() as calls:
        half = native.silu_mul(x)
        found = native.rms_norm(half, weight, 1e-6, 0.5)
        thread = threading.Thread(target=native.silu_mul, args=(other,))
        thread.start()
        thread.join()
    native.silu_mul(other)
    assert len(calls) == 2
    x.copy_(torch.randn(3, 40))
    calls.run()
    assert torch.equal(half, native.silu_mul(x))
    assert torch.equal(found, native.rms_norm(half, weight, 1e-6, 0.5))


def test_room_of_calls_that_are_written_down_stays_theirs(native):
    codes, scales = torch.randint(-9, 9, (5, 64)).to(torch.int8), torch.rand(5, 1)
    x = torch.randn(1, 64)
    with native.noted() as calls:
        found = native.byte_linear(x, codes, scales)
    if found is None:
        pytest.skip("no products of bytes here")
    want = found.clone()
    native.byte_linear(torch.randn(2, 6400), torch.randint(-9, 9, (5, 6400)).to(torch.int8), scales)
    found.zero_()
    calls.run()
    assert torch.equal(found, want)


def test_heads_that_have_no_room_are_left_to_torch(native):
    assert not native.attends(torch.float16, 4, 4, 64)
    assert not native.attends(torch.float32, 34, 2, 64)
    assert not native.attends(torch.float32, 4, 4, 272)
    assert not native.attends(torch.float32, 4, 4, 72)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize(("outputs", "depth"), [(512, 64), (1100, 520), (2000, 7)])
def test_products_with_packed_weights(native, dtype, rows, outputs, depth):
    if not cpu_linear.packs(dtype):
        pytest.skip("weights of this type are not packed here")
    weight, x, bias = (torch.randn(*shape).to(dtype) for shape in ((outputs, depth), (rows, depth), (outputs,)))
    given = cpu_linear._reordered(weight)
    native.learn(weight, given)
    for added in (None, bias):
        found = native.packed_linear(x, given, added)
        if found is None:
            pytest.skip("oneDNN packs in another order here")
        expected = x.double() @ weight.double().t() + (0 if added is None else added.double())
        assert near(found, expected, dtype)
    assert native.packed_linear(x.repeat(5, 1), given, None) is None


def test_packed_weights_in_another_order_are_left_to_onednn(native, monkeypatch):
    if not cpu_linear.packs(torch.float32):
        pytest.skip("no packed weights here")
    weight = torch.randn(512, 96)
    given = cpu_linear._reordered(weight)
    assert packed.packed_width(weight, given) in (0, 96)
    assert packed.packed_width(weight.roll(1), given) == 0
    monkeypatch.setattr(packed, "BLOCK", 32)
    assert packed.packed_width(weight, given) == 0
    monkeypatch.undo()
    native.learn(weight, given)
    native.learn(weight.roll(1), given)
    assert native.packed_linear(torch.randn(1, 96), given, None) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize(("outputs", "depth"), [(37, 32), (64, 96), (5, 1056), (3, 100)])
@pytest.mark.parametrize("grouped", [False, True])
def test_products_with_bytes(native, dtype, rows, outputs, depth, grouped):
    codes = torch.randint(-128, 128, (outputs, depth)).to(torch.int8)
    scales = torch.rand(outputs, depth // 32).half() if grouped else torch.rand(outputs, 1)
    x = torch.randn(rows, depth)
    x[:, 0] *= 50
    x = x.to(dtype)
    found = native.byte_linear(x, codes, scales)
    if found is None:
        assert not native.multiplies_bytes or rows > 2 or depth % 32
        return
    weight = codes.double() * scales.double().repeat_interleave(depth // scales.shape[1], 1)
    if dtype == torch.float32:  # a digit's rest is as large as the row's largest number makes it
        reach = x.double().abs().amax(1, keepdim=True) * weight.abs().sum(1)
        assert ((found.double() - x.double() @ weight.t()).abs() / reach).max() < 2**-23
    else:
        assert near(found, x.double() @ weight.t(), dtype)
    x[0, 3] = float("nan")
    assert native.byte_linear(x, codes, scales)[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(("depth", "group"), [(32, 32), (288, 96), (544, 32)])
@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zeros", [False, True])
def test_products_with_nibbles(native, dtype, rows, depth, group, scale_type, zeros):
    low = torch.randint(-(2**31), 2**31, (21, depth // 8)).to(torch.int32)
    scales = torch.rand(21, depth // group).to(scale_type)
    taken = torch.randint(0, 16, scales.shape).to(torch.uint8) if zeros else None
    weight, x = NibbleWeight(low, scales, zeros=taken), torch.randn(rows, depth).to(dtype)
    assert weight.fits
    expected = x.double() @ Ops.dequantize_packed(low, scales, taken).double().t()
    assert near(native.nibble_linear(x, weight), expected, dtype)
    assert not replace(weight, scales=torch.rand(21, depth // 16), zeros=None).fits
    assert native.nibble_linear(x.repeat(17, 1), weight) is None


def test_scales_that_are_no_common_floats(native):
    """Subnormal, infinite and no numbers of 16 bits."""
    low = torch.full((4, 4), 0x11111111, dtype=torch.int32)
    scales = torch.tensor([[6e-8], [float("inf")], [float("nan")], [-2.0]]).half()
    found = native.nibble_linear(torch.ones(1, 32), NibbleWeight(low, scales))[0]
    want = Ops.dequantize_packed(low, scales).sum(1)
    torch.testing.assert_close(found, want, equal_nan=True)


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is compiled yet in this process."""
    for one in (library.library, library._begun):
        one.cache_clear()
    yield
    monkeypatch.undo()
    for one in (library.library, library._begun):
        one.cache_clear()


@pytest.mark.parametrize("compiler", [None, "false"])
def test_without_a_compiler_there_are_no_kernels(compiler, fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(library.shutil, "which", lambda _: compiler)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native_rows() is None


@pytest.mark.matrix
def test_what_was_compiled_is_kept(native, fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native_rows() is not None
    (kept,) = (tmp_path / ".cache" / "frame").iterdir()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("it was compiled again"))
    library.library.cache_clear()
    library._begun.cache_clear()
    assert native_rows() is not None
    assert kept.exists()


@pytest.mark.matrix
def test_a_folder_that_others_may_write_to_is_not_used(native, fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path(tmp_path, ".cache", "frame").mkdir(parents=True)
    Path(tmp_path, ".cache", "frame").chmod(0o777)
    assert native_rows() is not None
    assert not list(Path(tmp_path, ".cache", "frame").iterdir())
