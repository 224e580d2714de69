"""Runs the GPU tests of the kernels under Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


STEPS = ("attention", "step_kernels", "layer_kernels", "linear_invariant", "sampling_sampler_kernels")
FEWER = ("cascade", "expert_kernels")
SAMPLING = ("sampling_kernels", "sampling_filter_kernels", "sampling_logits_kernels")
DEVICES = ("all_reduce_kernels", "peer_copies", "expert_exchange_kernels", "block_copies")
FORMATS = (
    "attention_fp8", "latent", "latent_sparse", "state_kernels", "adapter_kernels", "expert_adapter_kernels",
    "decode_narrow", "decode_few", "attention_few",
)  # fmt: skip
CODES = (
    "codebook_kernels", "quantized_kernels", "coded_experts", "nibble_kernels", "coded_fragments", "coded_ring",
    "rounded_hopper", "nibbles_hopper", "coded_few", "coded_blocks",
)  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("names", "kept"),
    [
        pytest.param(STEPS, "gpu and not slow", id="steps"),
        pytest.param(FEWER, "gpu and not slow", id="some steps", marks=pytest.mark.matrix),
        pytest.param(SAMPLING, "gpu and not slow", id="sampling", marks=pytest.mark.matrix),
        pytest.param(DEVICES, "gpu and not slow", id="devices", marks=pytest.mark.matrix),
        pytest.param(FORMATS, "gpu and not slow", id="formats", marks=pytest.mark.matrix),
        pytest.param(CODES, "gpu and not slow", id="codes", marks=pytest.mark.matrix),
        pytest.param(
            (*STEPS, *FEWER, *SAMPLING, *DEVICES, *FORMATS, *CODES),
            "gpu and slow",
            id="slow cases",
            marks=pytest.mark.slow,
        ),
        pytest.param(["cascade_engine", "few_engine"], "gpu", id="an engine", marks=pytest.mark.slow),
    ],
)
def test_kernels_under_the_interpreter(names: Sequence[str], kept: str) -> None:
    files = [f"tests/gpu/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", kept, "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
