"""The kernels in C give what torch gives, and are done without where there is no compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from frame.kernels.native import library, packed
from frame.kernels.native.nibbles import NibbleWeight
from frame.kernels.native.rows import NativeRows, native_rows
from frame.ops import Ops
from frame.plugins.platforms import cpu_linear

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
@pytest.mark.parametrize("listed", [False, True])
def test_attention_of_one_token(native, dtype, heads, kv_heads, dim, listed):
    """Scores that only grow and scores that only shrink, lengths that no tile divides, and keys anywhere."""
    assert native.attends(dtype, heads, kv_heads, dim)
    lengths = torch.tensor([1, 15, 16, 17, 100][: 5 if listed else 1]) + (0 if listed else 76)
    cache = torch.randn(700, 2, kv_heads, dim)
    cache[:, 0] *= torch.linspace(-3, 3, 700)[:, None, None]
    cache = cache.to(dtype)
    keys, values = cache[:, 0], cache[:, 1]
    query = torch.randn(len(lengths), heads + 1, dim).to(dtype)[:, :heads]
    slots = torch.randperm(700)[: len(lengths) * 140].view(len(lengths), 140) if listed else None
    found = native.attend(query, keys, values, slots, lengths, 0.3)
    for row, length in enumerate(lengths.tolist()):
        chosen = torch.arange(length) if slots is None else slots[row, :length]
        q, k, v = (one.double().transpose(0, 1) for one in (query[row : row + 1], keys[chosen], values[chosen]))
        want = functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True).transpose(0, 1)
        assert near(found[row], want, dtype)


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
