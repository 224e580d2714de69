"""Runs the GPU tests of the kernels under Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "file",
    [
        "test_attention.py",
        "test_attention_fp8.py",
        "test_step_kernels.py",
        "test_layer_kernels.py",
        "test_linear_invariant.py",
        "test_sampling_kernels.py",
        "test_sampling_filter_kernels.py",
        "test_sampling_logits_kernels.py",
        "test_sampling_sampler_kernels.py",
        "test_expert_kernels.py",
    ],
)
def test_kernels_under_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", f"tests/gpu/{file}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
