"""Weights are put into large pages, where there are some, and stay what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from frame.plugins.platforms import cpu_pages
from frame.plugins.platforms.cpu import HostMemory
from frame.plugins.platforms.cpu_linear import packs
from frame.plugins.platforms.cpu_ops import CpuOps


def large_bytes(address: int) -> int:
    """How much of the mapping that holds an address lies in large pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1]) << 10
    return 0


def gives_any() -> bool:
    tensor = torch.ones(3 * cpu_pages.PAGE)
    return cpu_pages.use_large_pages(cpu_pages._memory(tensor)) and large_bytes(tensor.data_ptr() + cpu_pages.PAGE) > 0


def are_large(tensor: Tensor) -> bool:
    cpu_pages._later.wait()
    return large_bytes(cpu_pages._memory(tensor)[0] + cpu_pages.PAGE) > 0


def test_claimed_weights_are_put_into_large_pages():
    if not gives_any():
        pytest.skip("this system gives no large pages")
    weight, cache = torch.arange(16 << 20, dtype=torch.int32), torch.ones(16 << 20)
    memory = HostMemory()
    memory.claim("kv_cache", [cache])
    memory.claim("weights", [weight, torch.ones(3)])
    assert are_large(weight)
    assert torch.equal(weight, torch.arange(16 << 20, dtype=torch.int32))


def test_packed_weights_are_put_into_large_pages():
    if not gives_any() or not packs(torch.float32):
        pytest.skip("no large pages, or no packed weights")
    weight = torch.randn(4096, 4096)
    found = CpuOps().packed(weight)
    assert found is not None
    assert are_large(found)
    assert torch.equal(found.to_dense(), weight)


def test_what_is_small_or_gone_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    assert not cpu_pages.use_large_pages((cpu_pages.PAGE + 1, 2 * cpu_pages.PAGE - 2))
    assert not cpu_pages.use_large_pages((1 << 60, 4 * cpu_pages.PAGE))
    monkeypatch.setattr(cpu_pages._later, "put", lambda memory: pytest.fail("it is small"))
    cpu_pages.large_pages_later(torch.ones(1000))


def test_systems_without_the_call_refuse(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_pages, "_madvise", lambda: None)
    assert not cpu_pages.use_large_pages(cpu_pages._memory(torch.ones(3 * cpu_pages.PAGE)))
