"""Products by what was measured, and by cuBLASLt: near float32's, and the same when they are captured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from frame.plugins.platforms.cuda.products import candidates, library
from frame.plugins.platforms.cuda.products.candidates import Shape
from frame.plugins.platforms.cuda.products.choice import Products

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(33, 4096, 14336), (64, 28672, 4096), (127, 4096, 4096)])
def test_products_of_some_tens_of_rows(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
    found = library.linear_lt(x, weight)
    torch.testing.assert_close(found.float(), x.float() @ weight.float().t(), atol=0.05, rtol=0.02)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = library.linear_lt(x, weight)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, found)


@pytest.mark.parametrize("gated", [False, True])
def test_every_candidate_gives_the_product(gated: bool) -> None:
    torch.manual_seed(0)
    shape = Shape(2048, 1024, gated, torch.bfloat16)
    weight = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16) / 32
    for rows in (1, 5, 16, 40, 200):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        wanted = x.float() @ weight.float().t()
        if gated:
            gate, factor = wanted.chunk(2, 1)
            wanted = torch.nn.functional.silu(gate) * factor
        for name, call in candidates.candidates(rows, shape, x.device).items():
            assert (call(x, weight, None).float() - wanted).norm() < 1e-2 * wanted.norm(), (name, rows)


def test_shapes_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next start reads the file; what is chosen is a candidate."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    weight = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16) / 45
    seconds, chosen = [], []
    for _ in range(2):
        products = Products(weight.device)
        products.multiply(weight.new_empty(3, 2048), weight)
        torch.cuda.synchronize()
        start = time.perf_counter()
        products.settle(8192)
        seconds.append(time.perf_counter() - start)
        shape = Shape(4096, 2048, False, torch.bfloat16)
        chosen.append([products.name(rows, shape) for rows in (1, 2, 8, 9, 17, 100, 300, 5000)])
    assert chosen[0] == chosen[1]
    assert seconds[1] < 0.1 * seconds[0]
    assert len(list(tmp_path.glob("frame-products-*.json"))) == 1
