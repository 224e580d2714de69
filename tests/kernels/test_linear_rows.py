"""Which products of a few rows ordinary steps leave to the library, on chips that are not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.ahead import A100, B200, DEVICE, H200, Chip, launched
from tests.kernels.launches import compiler

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
OURS, LIBRARY, GATE = {"linear_rows._some_rows"}, set[str](), {"activation._gated"}
WIDE = "eight rows, a wider weight"
#: rows, outputs of the weight, inputs, type
CASES = {
    "two rows": (2, 4096, 1024, torch.bfloat16),
    "eight rows of float16, the widest weight": (8, 32768, 2048, torch.float16),
    WIDE: (8, 32784, 2048, torch.bfloat16),
    "nine rows": (9, 4096, 1024, torch.bfloat16),
    "seventeen rows": (17, 4096, 1024, torch.bfloat16),
    "inputs that are no multiple of 64": (8, 4096, 1056, torch.bfloat16),
    "float32": (8, 4096, 1024, torch.float32),
}
SERVED = {"two rows", "eight rows of float16, the widest weight", WIDE}


def kernels(chip: Chip, hopper_products: str, gated: bool) -> dict[str, set[str]]:
    """Which kernels of ours the product of each case launches, where nothing was measured."""
    from frame.plugins.platforms.cuda.ops import CudaOps

    ops = CudaOps(hopper_products)  # type: ignore[arg-type]
    product = ops.linear_silu_mul if gated else ops.linear

    def launch(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        x, weight = (torch.empty(count, inputs, dtype=dtype, device=DEVICE) for count in (rows, outputs))
        product(x, weight)

    for case in CASES.values():
        launched(chip, partial(launch, *case))  # a weight that is met first is multiplied by every candidate
    return {name: launched(chip, partial(launch, *case)) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """Where a device is pretended."""
    with compiler() as pool:
        yield pool


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_some_rows_are_multiplied_by_our_kernel_on_hopper(apart: ProcessPoolExecutor, gated: bool) -> None:
    others = GATE if gated else LIBRARY
    for choice in ("measured", "all"):
        found = apart.submit(kernels, H200, choice, gated).result()
        assert found == {name: OURS if name in SERVED else others for name in CASES}
    for chip, choice in ((H200, "deterministic"), (A100, "measured"), (B200, "measured")):
        assert apart.submit(kernels, chip, choice, gated).result() == dict.fromkeys(CASES, others)
