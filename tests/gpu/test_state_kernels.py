"""Convolutions and recurrences with states against their references: on a GPU, and interpreted in tests/kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from frame.core.ops import Ops
from frame.kernels import convolution, delta, scans
from frame.ops import ScanWeights, StateRows
from frame.testing.op_cases import DECODE_ROWS, STATE_ROWS, Draw, _conv, _delta, _selective, _ssd

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
#: Of 16-bit inputs, a GPU's sums take tf32, which keeps as many bits as float16 and is not interpreted.
CLOSE = {
    torch.float32: (2e-5, 1e-4),
    torch.float16: (4e-3 if INTERPRETED else 2e-2, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "conv": (convolution.causal_conv, Ops.causal_conv, _conv),
    "ssd": (scans.ssd_scan, Ops.ssd_scan, _ssd),
    "selective": (scans.selective_scan, Ops.selective_scan, _selective),
    "delta": (delta.gated_delta, Ops.gated_delta, _delta),
    "delta by features": (delta.gated_delta, Ops.gated_delta, lambda draw, rows: _delta(draw, rows, 16)),
}


def there(value: Any) -> Any:
    """A copy on the device."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(DEVICE)
    if isinstance(value, ScanWeights):
        return ScanWeights(*(there(one) for one in value))
    if isinstance(value, StateRows):
        moved = (there(one) for one in (value.query_start, value.blocks, value.begins))
        return StateRows(*moved, value.max_query_len)
    return value


def compare(name: str, arguments: Any, dtype: torch.dtype, absolute: float = 0.0) -> None:
    """The kernel's result and state are those of the reference; block 0 stays as it is."""
    kernel, reference, _ = OPS[name]
    mine, theirs = [there(one) for one in arguments], [there(one) for one in arguments]
    found, expected = kernel(*mine), reference(*theirs)
    absolute, relative = max(absolute, CLOSE[dtype][0]), CLOSE[dtype][1]
    torch.testing.assert_close(found, expected, atol=absolute, rtol=relative)
    torch.testing.assert_close(mine[-2], theirs[-2], atol=absolute, rtol=relative)
    assert not mine[-2][0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [STATE_ROWS, DECODE_ROWS], ids=["rows", "single tokens"])
@pytest.mark.parametrize("name", OPS)
def test_rows_of_any_length(name: str, given: Any, dtype: torch.dtype) -> None:
    arguments, _ = OPS[name][2](Draw(dtype), given)
    compare(name, arguments, dtype)


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [STATE_ROWS, DECODE_ROWS], ids=["rows", "single tokens"])
@pytest.mark.parametrize("name", [name for name in OPS if name != "conv"])
def test_states_of_16_bits_are_rounded_once_a_step(name: str, given: Any, kept: torch.dtype) -> None:
    arguments, _ = OPS[name][2](Draw(torch.float32), given)
    compare(name, [*arguments[:-2], arguments[-2].to(kept), arguments[-1]], kept)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("given", [STATE_ROWS, DECODE_ROWS], ids=["rows", "single tokens"])
def test_padding_tokens_get_finite_numbers(name: str, given: Any) -> None:
    """More tokens than the rows have, and states that another request left as they are."""
    arguments, _ = OPS[name][2](Draw(torch.float32), given)
    state, rows = arguments[-2], arguments[-1]
    num_tokens = int(rows.query_start[-1])
    padded = [
        torch.cat((one, torch.randn(3, *one.shape[1:], dtype=one.dtype)))
        if isinstance(one, torch.Tensor) and one.shape[0] == num_tokens and one is not state
        else one
        for one in arguments
    ]
    for row in torch.where(rows.begins)[0].tolist():
        if rows.blocks[row]:
            state[int(rows.blocks[row])] = float("nan")
    kernel, reference, _ = OPS[name]
    mine, theirs = [there(one) for one in padded], [there(one) for one in padded]
    found, expected = kernel(*mine), reference(*theirs)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:num_tokens], expected[:num_tokens], atol=2e-5, rtol=1e-4)


#: Of every length about the borders of segments of 16 or 64: rows that begin and that go on, and some that lie in one.
FEW_ROWS = ((50, True, 3), (1, False, 1), (13, False, 6), (0, True, 0), (17, True, 2), (33, False, 5))
LONG_ROWS = ((200, True, 3), (1, False, 1), (65, False, 6), (0, True, 0), (63, True, 2), (64, False, 5), (97, False, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "given", "segment"),
    [
        *((name, FEW_ROWS, 16) for name in ("ssd", "delta")),
        *(
            pytest.param(name, LONG_ROWS, 64, marks=pytest.mark.slow, id=f"{name}, long rows")
            for name in ("ssd", "delta", "delta by features")
        ),
    ],
)
def test_rows_in_segments(name: str, given: Any, segment: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scans, delta):
        monkeypatch.setattr(module, "SEGMENT", segment)
    arguments, _ = OPS[name][2](Draw(dtype), given)
    compare(name, arguments, dtype, absolute=1e-4 if dtype == torch.float32 else 0.0)


@pytest.mark.skipif(not INTERPRETED, reason="inputs of 32 bits have no tables on a GPU")
@pytest.mark.parametrize("alike", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tables_of_chunks_are_exact(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all keys are alike, nothing fades and changes are whole: the powers of such a matrix would cancel."""
    monkeypatch.setattr(delta, "SEGMENT", 64)
    monkeypatch.setattr(delta, "MOST_BYTES", 4)
    arguments = list(_delta(Draw(torch.float32), ((140, False, 3), (1, False, 1), (20, True, 6)))[0])
    if alike:
        arguments[:2] = [one[:1].expand(one.shape).contiguous() for one in arguments[:2]]
        arguments[3:5] = [torch.zeros_like(arguments[3]), torch.ones_like(arguments[4])]
    compare("delta", arguments, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ssd", "delta"])
def test_segments_of_states_that_fade_fast_or_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scans, delta):
        monkeypatch.setattr(module, "SEGMENT", 64)
    for factor in (0.0, 100.0):
        arguments = list(OPS[name][2](Draw(torch.float32), LONG_ROWS)[0])
        arguments[1 if name == "ssd" else 3] = arguments[1 if name == "ssd" else 3] * factor
        compare(name, arguments, torch.float32, absolute=3e-4)


@pytest.mark.parametrize("name", ["ssd", "delta", "delta by features"])
def test_states_that_fade_fast(name: str) -> None:
    """Decays of e^-30 a token, whose quotients would overflow."""
    arguments, _ = OPS[name][2](Draw(torch.float32), STATE_ROWS)
    arguments = list(arguments)
    arguments[1 if name == "ssd" else 3] = arguments[1 if name == "ssd" else 3] * 100
    compare(name, arguments, torch.float32, absolute=2e-4)


def test_a_cut_of_a_wider_tensor_and_of_a_block() -> None:
    """Inputs as a model gives them: parts of one product, and states behind one another in blocks."""
    (x, dt, b, c, weights, state, rows), _ = _ssd(Draw(torch.float32), STATE_ROWS)
    joined = torch.cat((dt, x.flatten(1), b.flatten(1), c.flatten(1)), 1)
    dt, x, b, c = joined.split((4, 64, 64, 64), 1)
    wide = torch.zeros(7, state[0].numel() + 12)
    wide[:, : state[0].numel()] = state.flatten(1)
    cut = (x.unflatten(1, (4, 16)), dt, b.unflatten(1, (2, 32)), c.unflatten(1, (2, 32)))
    view = wide[:, : state[0].numel()].unflatten(1, state.shape[1:])
    mine = there(wide)
    moved = [there(joined)[:, part] for part in (slice(4, 68), slice(0, 4), slice(68, 132), slice(132, 196))]
    found = scans.ssd_scan(
        moved[0].unflatten(1, (4, 16)), moved[1], moved[2].unflatten(1, (2, 32)), moved[3].unflatten(1, (2, 32)),
        there(weights), mine[:, : state[0].numel()].unflatten(1, state.shape[1:]), there(rows),
    )  # fmt: skip
    expected = Ops.ssd_scan(*cut, weights, view, replace(rows))
    torch.testing.assert_close(found.cpu(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(mine.cpu(), wide, atol=2e-5, rtol=1e-4)
