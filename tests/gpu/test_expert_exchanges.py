"""Expert exchanges over NCCL: two ranks as threads, each with a GPU of its own; four where there are four."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from frame.interfaces import Groups, Mesh, Placement
from frame.plugins.platforms.torch_collectives import TorchCollectives, nccl_group
from frame.testing import ExpertExchangeSuite, run_mesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def over_nccl(placement: Placement) -> TorchCollectives:
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)  # of this thread
    return TorchCollectives(placement, partial(nccl_group, device))


class OverNccl(ExpertExchangeSuite):
    device = "cuda"

    def run(self, mesh: Mesh, work: Callable[[Groups], Any]) -> list[Any]:
        if mesh.size > torch.cuda.device_count():
            pytest.skip(f"needs {mesh.size} CUDA devices")
        return run_mesh(mesh, work, collectives=over_nccl)


class TestGather(OverNccl):
    plugin = "frame-llm:gather"


class TestAllToAll(OverNccl):
    plugin = "frame-llm:all-to-all"
