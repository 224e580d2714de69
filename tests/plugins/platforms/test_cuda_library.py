"""Which of two libraries multiplies: by the rows, and with the process's preference back afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frame.plugins.platforms import cuda_library


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was preferred, one after the other, in a process that prefers cuBLAS."""
    calls: list[Any] = []

    def prefer(library: Any = None) -> str:
        if library is not None:
            calls.append(library)
        return "cublas"

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(cuda_library, "is_hopper", lambda x: True)
    return calls


@pytest.mark.parametrize("rows", [1, 31, 32, 64, 96, 97, 4096])
def test_some_tens_of_rows_are_multiplied_by_the_other(rows: int, asked: list[Any]) -> None:
    x, weight = torch.randn(rows, 16), torch.randn(8, 16)
    assert torch.equal(cuda_library.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert asked == (["cublaslt", "cublas"] if 32 <= rows <= 96 else [])


def test_with_a_bias_torch_asks_it_anyway(asked: list[Any]) -> None:
    x, weight, bias = torch.randn(64, 16), torch.randn(8, 16), torch.randn(8)
    assert torch.equal(cuda_library.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    assert asked == []


def test_the_preference_is_back_after_an_error(asked: list[Any]) -> None:
    with pytest.raises(RuntimeError):
        cuda_library.linear(torch.randn(64, 16), torch.randn(8, 17))
    assert asked == ["cublaslt", "cublas"]


def test_other_devices_are_left_alone() -> None:
    before = torch.backends.cuda.preferred_blas_library()
    assert not cuda_library.is_hopper(torch.randn(64, 16))
    cuda_library.linear(torch.randn(64, 16), torch.randn(8, 16))
    assert torch.backends.cuda.preferred_blas_library() == before
