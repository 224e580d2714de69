"""Products that cuBLASLt does for some tens of rows: near float32's, and the same when they are recorded."""

from __future__ import annotations

import pytest
import torch

from frame.plugins.platforms.cuda import library as cuda_library

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(33, 4096, 14336), (64, 28672, 4096), (127, 4096, 4096)])
def test_products_of_some_tens_of_rows(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
    assert cuda_library.prefers_lt(rows, outputs, inputs)
    found = cuda_library.linear(x, weight)
    torch.testing.assert_close(found.float(), x.float() @ weight.float().t(), atol=0.05, rtol=0.02)
    if not cuda_library.is_hopper(x.device):
        pytest.skip("no Hopper: cuBLAS's")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = cuda_library.linear(x, weight)
    recorded.fill_(float("nan"))
    graph.replay()
    assert torch.equal(recorded, found)
