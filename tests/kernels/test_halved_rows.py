"""Which rows are halved for products with nibbles, on chips that are not there."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.ahead import A100, B200, DEVICE, H200, Chip, launched
from tests.kernels.launches import compiler

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
OURS = {"halves._split_rows", "nibbles_hopper._nibbled"}
#: Rows, inputs, inputs of a group, type of x, whether steps heed no batch, and outputs.
CASES = {
    "few outputs": (64, 4096, 128, torch.bfloat16, False, 6144),
    "few inputs": (64, 1024, 128, torch.bfloat16, False, 6144),
    "nine rows": (9, 4096, 128, torch.bfloat16, False),
    "64 rows, small groups": (64, 4096, 32, torch.bfloat16, False),
    "64 rows, groups of rows": (64, 4096, 4096, torch.bfloat16, False),
    "eight rows": (8, 4096, 128, torch.bfloat16, False),
    "65 rows": (65, 4096, 128, torch.bfloat16, False),
    "float16": (64, 4096, 128, torch.float16, False),
    "inputs of no whole chunk": (64, 4032, 64, torch.bfloat16, False),
    "deterministic": (64, 4096, 128, torch.bfloat16, True),
}
HALVED = {"few inputs", "nine rows", "64 rows, small groups", "64 rows, groups of rows"}


def kernels(chip: Chip) -> dict[str, set[str]]:
    """Which kernels of ours the product of each case launches."""
    from frame.plugins.platforms.cuda.ops import CudaOps

    ops = CudaOps()

    def launch(rows: int, depth: int, group: int, dtype: torch.dtype, invariant: bool, outputs: int = 28672) -> None:
        ops.invariant = invariant
        packed = torch.empty(outputs, depth // 8, dtype=torch.int32, device=DEVICE)
        scales = torch.empty(outputs, depth // group, dtype=torch.float16, device=DEVICE)
        ops.packed_linear(torch.empty(rows, depth, dtype=dtype, device=DEVICE), packed, scales)

    return {name: launched(chip, partial(launch, *case)) for name, case in CASES.items()}


def test_some_rows_are_halved_on_hopper() -> None:
    with compiler() as apart:
        found = apart.submit(kernels, H200).result()
        assert {name for name, launches in found.items() if launches == OURS} == HALVED
        assert not any(launches & OURS for name, launches in found.items() if name not in HALVED)
        for chip in (A100, B200):
            assert not any(launches & OURS for launches in apart.submit(kernels, chip).result().values())
