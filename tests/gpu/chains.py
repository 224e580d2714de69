"""Products that follow one another, each of the one before, while their kernels overlap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def check_chain(x: Tensor, product: Callable[[Tensor], Tensor]) -> None:
    """Twelve products give the same bits one by one, one after the other without waiting, and in a CUDA graph."""

    def chain(wait: bool) -> Tensor:
        found = x
        for _ in range(12):
            found = product(found)
            if wait:
                torch.cuda.synchronize()
        return found

    expected = chain(True)
    for _ in range(20):
        assert torch.equal(chain(False), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(found, expected)
