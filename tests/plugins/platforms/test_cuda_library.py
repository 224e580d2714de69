"""Which of two libraries multiplies: by the rows and the weight, and the product is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from frame.plugins.platforms.cuda import library as cuda_library

HIDDEN, INNER, GATED, HEAD = 4096, 14336, 28672, 128256


@pytest.mark.parametrize(
    ("outputs", "inputs", "few", "most"),
    [(HIDDEN, INNER, 32, 127), (HIDDEN, HIDDEN, 32, 127), (GATED, HIDDEN, 49, 64), (HEAD, HIDDEN, 49, 64)],
)
def test_large_weights_of_some_tens_of_rows(outputs: int, inputs: int, few: int, most: int) -> None:
    rows = [rows for rows in range(1, 1000) if cuda_library.prefers_lt(rows, outputs, inputs)]
    assert rows == list(range(few, most + 1))


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (1024, 3072), (6144, 1024), (2048, 4096), (1 << 20, 64)])
def test_smaller_and_wide_ones_stay_with_the_other(outputs: int, inputs: int) -> None:
    assert not any(cuda_library.prefers_lt(rows, outputs, inputs) for rows in range(1, 1000))


@pytest.fixture
def biases(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What torch is asked to add, on a chip and for weights for which cuBLASLt is quicker."""
    asked: list[Tensor | None] = []
    product = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        asked.append(bias)
        return product(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(cuda_library, "is_hopper", lambda device: True)
    monkeypatch.setattr(cuda_library, "prefers_lt", lambda rows, outputs, inputs: rows == 64)
    monkeypatch.setattr(cuda_library, "_ZEROS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_added(dtype: torch.dtype, biases: list[Any]) -> None:
    x, weight = torch.randn(64, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    found = cuda_library.linear(x, weight)
    torch.testing.assert_close(found.float(), x.float() @ weight.float().t(), atol=0.1, rtol=0.02)
    assert [bias.shape for bias in biases] == [(8,)]
    assert biases[0].dtype == dtype
    assert not biases[0].any()
    assert not any(zeros.any() for zeros in cuda_library._ZEROS.values()), "nothing was written to them"


def test_what_has_a_bias_or_other_rows_is_multiplied_as_it_is(biases: list[Any]) -> None:
    x, weight, bias = torch.randn(64, 16), torch.randn(8, 16), torch.randn(8)
    cuda_library.linear(x, weight, bias)
    cuda_library.linear(x[:63], weight)
    cuda_library.linear(x[None], weight)
    assert biases[0] is bias
    assert biases[1:] == [None, None]


def test_zeros_are_not_made_while_a_step_is_recorded(biases: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(64, 16), torch.randn(8, 16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda_library.linear(x, weight)
    assert biases == [None]
    assert not cuda_library._ZEROS
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda_library.linear(x, weight)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda_library.linear(x, weight)
    assert biases[1].shape == biases[2].shape == (8,)


def test_other_devices_are_left_alone() -> None:
    assert not cuda_library.is_hopper(torch.device("cpu"))
