"""Expert exchanges over NCCL: two ranks as threads, each with a GPU of its own; four where there are four.

The exchange over peer memory has processes for ranks, two of them on one GPU where there is no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.interfaces import Groups, Mesh, Placement
from frame.plugins.platforms.torch_collectives import TorchCollectives, nccl_group
from frame.testing import ExpertExchangeSuite, run_mesh

pytestmark = pytest.mark.gpu
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


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


@two_devices
class TestGather(OverNccl):
    plugin = "frame-llm:gather"


@two_devices
class TestAllToAll(OverNccl):
    plugin = "frame-llm:all-to-all"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 4])
def test_peer_memory_in_processes(size: int, tmp_path: Path) -> None:
    """tests/gpu/exchange_ranks.py; ranks that wait for one that has failed are ended."""
    if not torch.cuda.device_count() or size > max(2, torch.cuda.device_count()):
        pytest.skip(f"needs {1 if size == 2 else size} CUDA devices")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", "-o", "timeout=150"]
    command += ["-o", "filterwarnings=", str(Path(__file__).with_name("exchange_ranks.py"))]
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(size)]
    ranks = []
    for rank, path in enumerate(logs):
        given = {"EXCHANGE_RANK": str(rank), "EXCHANGE_SIZE": str(size), "EXCHANGE_FOLDER": str(tmp_path)}
        with path.open("w") as log:
            ranks.append(subprocess.Popen(command, env={**os.environ, **given}, stdout=log, stderr=subprocess.STDOUT))
    until = time.monotonic() + 240
    while any(one.poll() is None for one in ranks) and time.monotonic() < until:
        time.sleep(0.2)
        if any(one.poll() for one in ranks):
            until = min(until, time.monotonic() + 10)
    for one in ranks:
        one.kill()
    ended = [one.wait() for one in ranks]
    said = "\n".join(path.read_text(errors="replace")[-4000:] for path in logs)
    assert ended == [0] * size, said
    assert " passed" in said
