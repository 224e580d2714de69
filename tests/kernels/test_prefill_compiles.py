"""The Hopper kernel for prompts, compiled ahead of time: no variant may keep values in memory for want of registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from frame.kernels import prefill

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head of 64": {"DIM": 64, "HEAD_DIM": 64},
    "head of 256": {"DIM": 256, "HEAD_DIM": 256, "TILE": 64},
    "head of 96": {"HEAD_DIM": 96},
    "window, cap, sinks": {"WINDOW": 1024, "SOFT_CAP": True, "SINKS": True},
    "persistent": {"REPEATED": True},
    "all": {"DIM": 256, "HEAD_DIM": 256, "TILE": 64, "WINDOW": 1024, "SOFT_CAP": True, "SINKS": True, "REPEATED": True},
}
PLAIN = {
    "GROUPS": 4, "BLOCK_SIZE": 16, "PAGE": 16, "TILE": 128, "NUM_STAGES": prefill.STAGES, "DIM": 128, "HEAD_DIM": 128,
    "WINDOW": 0, "SOFT_CAP": False, "SINKS": False, "REPEATED": False,
}  # fmt: skip


def compiled(constants: dict[str, Any]) -> Any:
    """The kernel for compute capability 9.0."""
    kernel = prefill._prefill_attention_kernel
    wide = constants["DIM"] == constants["HEAD_DIM"]
    layout = gl.NVMMASharedLayout(128, 16, 2 if wide else 3)

    def copied(rows: int) -> str:
        return f"tensordesc<bf16[{rows}, {'' if wide else '1, '}64],{layout!r}>"

    types = dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("keys", "values"), copied(constants["PAGE"])) | {"query": copied(prefill.HALF_M)}
    types |= dict.fromkeys(("query_start", "seq_lens", "block_table"), "*i32")
    types |= {"out": "*bf16", "sinks": "*bf16", "scale": "fp32", "squash": "fp32"}
    names = kernel.arg_names
    aligned = [names.index(name) for name in names if types.get(name, "").startswith("*") or "stride" in name]
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_fits_the_registers_and_the_shared_memory(changes: dict[str, Any], tmp_path: Path) -> None:
    kernel = compiled({**PLAIN, **changes})
    assert kernel.metadata.shared <= 227 << 10
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    code = subprocess.run([TOOLS / "cuobjdump", "-sass", file], capture_output=True, text=True, check=True).stdout
    assert "HGMMA" in code, "no warpgroup product"
    assert "UTMALDG" in code, "no bulk copy"
    spills = re.findall(r"\b(?:STL|LDL)\b.*", code)
    assert not spills, f"{len(spills)} accesses to local memory"
