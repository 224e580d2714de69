"""Which kernel multiplies: by measured times, else the without_times one; what is met is measured once and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from frame.plugins.platforms.cuda.products import candidates, library, times
from frame.plugins.platforms.cuda.products.candidates import CUBLAS, CUBLASLT, Shape, names, without_times
from frame.plugins.platforms.cuda.products.choice import Products
from frame.plugins.platforms.cuda.products.times import Table, best_of, points_of

BF16 = torch.bfloat16
CPU = torch.device("cpu")
PLAIN, GATED = Shape(4096, 4096, False, BF16), Shape(28672, 4096, True, BF16)


def test_the_library_is_always_a_candidate_and_ours_where_they_can_serve() -> None:
    for shape in (PLAIN, GATED):
        for rows in (1, 2, 8, 16, 17, 64, 65, 8192):
            assert names(rows, shape, hopper=True)[:2] == [CUBLAS, CUBLASLT]
            assert names(rows, shape, hopper=False)[2:] == ([] if rows > 1 else names(1, shape, hopper=True)[2:])
    assert "rows-8x4" in names(8, PLAIN, hopper=True)
    assert "rows-8x4" not in names(9, PLAIN, hopper=True)
    assert names(17, PLAIN, hopper=True)[2:] == names(64, PLAIN, hopper=True)[2:] == []
    assert names(65, PLAIN, hopper=True)[2:] == ["tiles-256", "tiles-128"]
    assert names(8, Shape(4096, 4000, False, BF16), hopper=True)[2:] == [], "64 inputs at a time"
    assert names(128, Shape(4100, 4096, False, BF16), hopper=True)[2:] == [], "results at multiples of 16 bytes"
    assert names(128, Shape(4096, 4100, False, BF16), hopper=True)[2:] == [], "rows at multiples of 16 bytes"
    assert names(128, Shape(4096, 4096, False, torch.float32), hopper=True)[2:] == []


def test_without_times_a_few_rows_are_ours_and_more_the_library_s() -> None:
    assert without_times(1, names(1, GATED, hopper=True)) == "one-2x1024x2"
    assert without_times(8, names(8, PLAIN, hopper=True)) == "rows-4x6"
    assert without_times(8, names(8, GATED, hopper=True)) == "rows-4x4"
    assert without_times(8, names(8, PLAIN, hopper=False)) == CUBLAS
    assert (
        without_times(9, names(9, PLAIN, hopper=True)) == without_times(4096, names(4096, GATED, hopper=True)) == CUBLAS
    )


def test_the_best_of_the_measured_numbers_of_rows_on_both_sides() -> None:
    points = {
        8: {CUBLAS: 10.0, CUBLASLT: 11.0, "rows-4x4": 8.0},
        16: {CUBLAS: 10.0, CUBLASLT: 9.0},
        64: {CUBLAS: 12.0, CUBLASLT: 11.0},
        128: {CUBLAS: 15.0, CUBLASLT: 20.0, "tiles-128": 14.0},
        256: {CUBLAS: 20.0, CUBLASLT: 24.0, "tiles-128": 30.0},
    }
    every = (CUBLAS, CUBLASLT, "rows-4x4", "tiles-128")
    assert best_of(points, 3, every) == "rows-4x4"
    assert best_of(points, 8, every) == "rows-4x4"
    assert best_of(points, 12, every) == CUBLASLT
    assert best_of(points, 64, every) == CUBLASLT
    assert best_of(points, 100, every) == CUBLAS, "27 at the points around it, the other 31"
    assert best_of(points, 128, every) == "tiles-128"
    assert best_of(points, 200, every) == CUBLAS, "35 at the points around it, tiles 44"
    assert best_of(points, 5000, every) == CUBLAS
    assert best_of({128: {CUBLAS: 10.0, "tiles-128": 9.9}}, 128, every) == CUBLAS, "a hundredth is chance"
    assert best_of({128: {CUBLAS: 10.0, "tiles-128": 5.0}}, 128, (CUBLAS,)) == CUBLAS
    assert best_of({}, 128, every) == CUBLAS


def test_few_rows_of_heads_and_no_endless_products_are_measured() -> None:
    assert points_of(PLAIN, 512)[-1] == 512
    assert points_of(Shape(151936, 1024, False, BF16), 8192)[-1] == 512
    assert 2 * 57344 * 8192 * points_of(Shape(57344, 8192, True, BF16), 8192)[-1] <= times.MOST_OPERATIONS
    assert points_of(PLAIN, 1) == [1]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The products that are asked for, by candidate and rows; all of them are torch's."""
    asked: list[tuple[str, int]] = []

    def product(name: str, device: torch.device, gated: bool) -> candidates.Product | None:
        def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            asked.append((name, len(x)))
            out = torch.nn.functional.linear(x, weight, bias)
            return torch.nn.functional.silu(out.chunk(2, 1)[0]) * out.chunk(2, 1)[1] if gated else out

        return None if name == "rows-8x4" else call

    from frame.plugins.platforms.cuda.products import choice

    monkeypatch.setattr(candidates, "product", product)
    monkeypatch.setattr(choice, "product", product)
    monkeypatch.setattr(candidates, "is_hopper", lambda device: True)
    return asked


def test_what_is_met_is_launched_measured_and_chosen(served: list[tuple[str, int]]) -> None:
    measured: list[tuple[list[Shape], int]] = []

    def measure(met: Mapping[Shape, Tensor], device: torch.device, max_rows: int) -> Table:
        measured.append((list(met), max_rows))
        return {shape: {8: {CUBLAS: 2.0, "rows-4x6": 3.0, "rows-4x4": 1.0}, 16: {CUBLAS: 1.0}} for shape in met}

    products = Products(CPU, measure=measure)
    x, weight = torch.randn(5, 64, dtype=BF16), torch.randn(32, 64, dtype=BF16)
    for gated in (False, True):
        wanted = torch.nn.functional.linear(x, weight)
        found = products.multiply(x, weight, gated=gated)
        assert found.shape == (5, 16 if gated else 32)
        assert gated or torch.equal(found, wanted)
    met = {name for name, _ in served}
    assert {CUBLAS, CUBLASLT, "one-2x2048x2", "one-2x1024x2", "rows-4x4", "rows-4x6", "tiles-256", "tiles-128"} <= met
    assert "rows-8x4" not in met, "this device cannot run it"
    products.settle(512)
    assert measured == [([Shape(32, 64, False, BF16), Shape(32, 64, True, BF16)], 512)]
    served.clear()
    products.multiply(x, weight)
    products.multiply(torch.randn(9, 64, dtype=BF16), weight)
    products.multiply(torch.randn(6, 64, dtype=BF16), torch.randn(40, 64, dtype=BF16))
    products.multiply(torch.randn(64, 6, dtype=BF16).t(), weight.t().contiguous().t())
    assert served == [("rows-4x4", 5), (CUBLAS, 9), ("rows-4x6", 6), (CUBLAS, 6)]
    assert len(measured) == 1, "what is met later keeps the without_times kernel"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, list[int]]]]:
    """A CUDA device whose candidates take made-up times; what is measured on it."""
    seen: list[tuple[str, list[int]]] = []

    def time_candidates(shape: Shape, weight: Tensor, wanted: list[int]) -> dict[int, dict[str, float]]:
        seen.append((str(shape), wanted))
        return {rows: dict.fromkeys(names(rows, shape, hopper=False), 5.0) for rows in wanted}

    monkeypatch.setattr(times, "time_candidates", time_candidates)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with (
        patch("torch.cuda.get_device_name", lambda device: "a GPU"),
        patch("torch.cuda.get_device_capability", lambda *_: (8, 0)),
    ):
        yield seen


def test_times_are_kept_for_the_next_start(device: list[tuple[str, list[int]]], tmp_path: Path) -> None:
    met, cuda = {PLAIN: torch.empty(0)}, torch.device("cuda", 0)
    first = times.measured(met, cuda, 64)
    assert [shape for shape, _ in device] == ["4096x4096-bfloat16"]
    assert list(first[PLAIN]) == device[0][1] == points_of(PLAIN, 64)
    assert times.measured(met, cuda, 64) == first
    assert times.measured(met, cuda, 16)[PLAIN].keys() == set(points_of(PLAIN, 16))
    assert len(device) == 1, "the file has them"
    times.measured({**met, GATED: torch.empty(0)}, cuda, 64)
    assert [shape for shape, _ in device] == ["4096x4096-bfloat16", "28672x4096-gated-bfloat16"]
    times.measured(met, cuda, 128)
    assert len(device) == 3, "for more rows"
    (file,) = tmp_path.iterdir()
    assert set(json.loads(file.read_text())) == {"4096x4096-bfloat16", "28672x4096-gated-bfloat16"}
    with patch("torch.cuda.get_device_name", lambda device: "another"):
        times.measured(met, cuda, 64)
    assert len(device) == 4
    assert times.measured(met, CPU, 64) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"4096x4096-bfloat16": 3}', '{"a": {"1": {"cublas": "x"}}}'])
def test_a_broken_file_is_written_anew(text: str, device: list[tuple[str, list[int]]], tmp_path: Path) -> None:
    cuda = torch.device("cuda", 0)
    times._file(cuda).write_text(text)
    assert times.measured({PLAIN: torch.empty(0)}, cuda, 16)[PLAIN]
    assert times.measured({PLAIN: torch.empty(0)}, cuda, 16)[PLAIN]
    assert len(device) == 1


def test_a_cache_that_cannot_be_written_is_told(
    device: list[tuple[str, list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert times.measured({PLAIN: torch.empty(0)}, torch.device("cuda", 0), 16)[PLAIN]
    assert "cannot be written" in caplog.text


@pytest.fixture
def biases(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What torch is asked to add."""
    asked: list[Tensor | None] = []
    product = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        asked.append(bias)
        return product(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(library, "_ZEROS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_cublaslt_is_asked_by_adding_zeros(dtype: torch.dtype, biases: list[Tensor]) -> None:
    x, weight, bias = (torch.randn(*size, dtype=dtype) for size in ((64, 16), (8, 16), (8,)))
    found = library.linear_lt(x, weight)
    torch.testing.assert_close(found.float(), x.float() @ weight.float().t(), atol=0.1, rtol=0.02)
    library.linear_lt(x, weight, bias)
    library.linear(x, weight)
    assert biases[0].shape == (8,)
    assert biases[0].dtype == dtype
    assert not biases[0].any()
    assert biases[1] is bias
    assert biases[2] is None
    assert not any(zeros.any() for zeros in library._ZEROS.values()), "nothing was written to them"


def test_zeros_are_not_made_while_a_step_is_captured(biases: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(64, 16), torch.randn(8, 16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    library.linear_lt(x, weight)
    assert biases == [None]
    assert not library._ZEROS
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    library.linear_lt(x, weight)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    library.linear_lt(x, weight)
    assert biases[1].shape == biases[2].shape == (8,)
