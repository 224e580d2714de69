"""The contract of a platform's ops: each gives what its reference gives, and row by row the same bits if asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from frame.core.interfaces.experts import RouterSpec
from frame.core.interfaces.platform import Platform, PlatformSpec
from frame.core.ops import Ops
from frame.core.ops.adapters import AdapterWeights, ExpertAdapters, SlotGroups
from frame.core.ops.layers import RowParts
from frame.core.ops.quantized import CodedWeights
from frame.core.ops.states import ScanWeights, StateRows
from frame.core.ops.step import StepBuffers

from .op_cases import CASES, Draw
from .platform_checks import PlatformChecks

OPS = sorted(name for name in vars(Ops) if not name.startswith("_") and name not in ("packs", "packed"))
#: Sizes of a weight that is large enough for a platform to pack it.
LARGE = (1100, 520)


class OpChecks(PlatformChecks):
    """Every op equals its reference in `frame.ops`."""

    def test_every_op_is_there(self, platform: Platform) -> None:
        ops = platform.ops()
        assert isinstance(ops, Ops), f"ops() must give frame.ops.Ops or a subclass, gave {type(ops).__name__}"
        assert platform.ops() is ops, "ops() must give the same object each time: the runner sets its `invariant`"
        for name in OPS:
            assert callable(getattr(ops, name)), f"op {name} cannot be called"

    @pytest.mark.parametrize("name", OPS)
    def test_ops_equal_their_references(self, platform: Platform, name: str) -> None:
        assert name in CASES, f"op {name} has no case in frame.testing.op_cases"
        for dtype in self.dtypes(platform):
            for case in CASES[name]:
                positional, named = case(Draw(dtype))
                there = [_to(value, platform.device) for value in positional]
                want = getattr(Ops(), name)(*positional, **named)
                got = getattr(platform.ops(), name)(*there, **{k: _to(v, platform.device) for k, v in named.items()})
                self.check_op(name, got, want, dtype)
                self.check_op(f"{name} (arguments afterwards)", there, positional, dtype)

    def test_packed_weights_are_the_same_weights(self, platform: Platform) -> None:
        ops = platform.ops()
        for dtype in self.dtypes(platform):
            draw = Draw(dtype)
            weight, x, bias = draw.floats(*LARGE), draw.floats(5, LARGE[1]), draw.floats(LARGE[0])
            there = [_to(value, platform.device) for value in (x, weight, bias)]
            packed = ops.packed(there[1])
            assert ops.packs(there[1]) == (packed is not None), "packs must say whether packed gives a tensor"
            if packed is None:
                continue
            assert (packed.shape, packed.dtype) == (weight.shape, dtype), "packed changes neither shape nor type"
            assert torch.equal(packed.to_dense().cpu(), weight), "to_dense must give the packed weight's own bits"
            self.check_op(
                "linear of a packed weight", ops.linear(there[0], packed, there[2]), Ops.linear(x, weight, bias), dtype
            )

    def test_parts_of_experts_results_are_told_in_order(self, platform: Platform) -> None:
        """Each once, when its rows have their values: they may begin to travel then."""
        for dtype in self.dtypes(platform):
            for case in CASES["fused_experts"]:
                positional, named = case(Draw(dtype))
                there = [_to(value, platform.device) for value in positional]
                told: list[tuple[slice, Tensor]] = []

                def done(out: Tensor, rows: slice, told: list[tuple[slice, Tensor]] = told) -> None:
                    told.append((rows, out[rows].clone()))

                parts = RowParts([slice(0, 1), slice(1, 4), slice(4, 6)], done)
                whole = platform.ops().fused_experts(*there, **named, parts=parts)
                assert [rows for rows, _ in told] == parts.rows, "fused_experts must tell every part once, in order"
                assert torch.equal(torch.cat([values for _, values in told]), whole), "a part was told too early"

    def check_op(self, name: str, got: Any, want: Any, dtype: torch.dtype) -> None:
        """`got` equals `want` up to rounding, in shape and dtype exactly."""
        if isinstance(want, (StepBuffers, StateRows, CodedWeights)):
            for part in fields(want):
                self.check_op(f"{name}: {part.name}", getattr(got, part.name), getattr(want, part.name), dtype)
        elif isinstance(want, (tuple, list)):
            assert len(got) == len(want), f"{name} gave {len(got)} values, expected {len(want)}"
            for one, other in zip(got, want, strict=True):
                self.check_op(name, one, other, dtype)
        elif isinstance(want, Tensor):
            assert got.dtype == want.dtype, f"{name} gave {got.dtype}, expected {want.dtype}"
            assert got.shape == want.shape, f"{name} gave {list(got.shape)}, expected {list(want.shape)}"
            bound = self.tolerance(dtype)
            message = f"{name} in {dtype} differs from its reference"
            torch.testing.assert_close(
                got.cpu(), want, atol=bound, rtol=bound, equal_nan=True, msg=lambda text: f"{message}: {text}"
            )

    def test_deterministic_rows_do_not_depend_on_the_batch(self, platform: Platform) -> None:
        """While `ops().invariant` is set, each row of an op's result has the bits that it has when computed alone."""
        for dtype in self.dtypes(platform):
            if platform.supports(PlatformSpec(dtype, deterministic=True)) is not None:
                continue
            ops = platform.ops()
            assert platform.ops() is ops, "ops() must give one object, which the runner sets `invariant` of"
            ops.invariant = True
            try:
                for name, op in _row_ops(ops, Draw(dtype), platform.device).items():
                    whole = op(slice(0, 70))
                    for rows in (slice(0, 1), slice(5, 7), slice(33, 34), slice(17, 50), slice(1, 70)):
                        assert torch.equal(op(rows), whole[rows]), f"{name} in {dtype} depends on the batch"
            finally:
                ops.invariant = False


def _row_ops(ops: Ops, draw: Draw, device: torch.device) -> dict[str, Callable[[slice], Tensor]]:
    """What layers do with 70 rows, as functions of which rows they get."""
    x, gates, logits = draw.floats(70, 72).to(device), draw.floats(70, 80).to(device), draw.floats(70, 6).to(device)
    weight, bias, scale = draw.floats(88, 72).to(device), draw.floats(88).to(device), draw.floats(72).to(device)
    heads, table = draw.floats(70, 3, 24).to(device), draw.float32(80, 24).to(device)
    gate_up, down = draw.floats(6, 48, 72).to(device), draw.floats(6, 72, 24).to(device)
    positions = torch.arange(70, device=device)
    routed = RouterSpec(6, 2)
    weights, ids = ops.route(logits, routed)
    return {
        "linear": lambda rows: ops.linear(x[rows], weight, bias),
        "linear_silu_mul": lambda rows: ops.linear_silu_mul(x[rows], weight),
        "norm_linear": lambda rows: ops.norm_linear(x[rows], x[rows], (scale, 1e-6, 0.0), weight, bias)[0],
        "norm_linear_silu_mul": lambda rows: ops.norm_linear_silu_mul(x[rows], x[rows], (scale, 1e-6, 0.0), weight)[0],
        "rms_norm": lambda rows: ops.rms_norm(x[rows], scale, 1e-6),
        "add_rms_norm": lambda rows: ops.add_rms_norm(x[rows], x[rows], scale, 1e-6, 1.0)[0],
        "layer_norm": lambda rows: ops.layer_norm(x[rows], scale, None, 1e-6),
        "silu_mul": lambda rows: ops.silu_mul(gates[rows]),
        "gelu_tanh_mul": lambda rows: ops.gelu_tanh_mul(gates[rows]),
        "map_rows": lambda rows: ops.map_rows(torch.tanh, x[rows]),
        "rotary": lambda rows: ops.rotary(heads[rows], heads[rows], positions[rows], table)[0],
        "latent_rotary": lambda rows: ops.latent_rotary(
            heads[rows].clone(), gates[rows], (scale, 1e-6, 0.0), positions[rows], table[:, :8]
        ),
        "route": lambda rows: ops.route(logits[rows], routed)[0],
        "fused_experts": lambda rows: ops.fused_experts(x[rows], gate_up, down, weights[rows], ids[rows]),
    }


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.clone().to(device)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, ScanWeights):
        return ScanWeights(*(_to(one, device) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_to(one, device) for one in value)
    if isinstance(value, (StepBuffers, StateRows, AdapterWeights, ExpertAdapters, SlotGroups, CodedWeights)):
        return type(value)(**{part.name: _to(getattr(value, part.name), device) for part in fields(value)})
    return value
