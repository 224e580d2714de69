"""Sums over the GPUs of this machine: frame's kernels and NCCL, each captured as a CUDA graph, in microseconds.

    python benchmarks/kernels/all_reduce.py [--ranks 2] [--json FILE]

Starts a process for each GPU. Of each size it times a graph of 20 sums of tensors [T, hidden] in bfloat16, and of as
many sums followed by residual and norm: in one kernel of ours, and by NCCL with the norm's kernel behind it. Results
are compared with sums in float64 first. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HIDDEN = (2048, 8192)
TOKENS = (1, 4, 16, 64, 256, 512)
CALLS = 20


def main() -> None:
    """Starts the ranks and prints what the first of them found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank >= 0:
        run_rank(given.rank, given.ranks, given.rendezvous, given.json)
        return
    from frame.core.parallel.rendezvous import Rendezvous

    rendezvous = Rendezvous()
    command = [sys.executable, __file__, "--ranks", str(given.ranks), "--rendezvous", rendezvous.address]
    command += ["--json", given.json] if given.json else []
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(given.ranks)]
    sys.exit(max(rank.wait() for rank in ranks))


def run_rank(rank: int, size: int, rendezvous: str, path: str | None) -> None:
    """Checks and times one rank's part; the first prints."""
    import torch

    from frame.interfaces import Mesh, Placement
    from frame.kernels import all_reduce as kernels
    from frame.plugins.platforms.cuda.collectives import CudaCollectives, PeerGroup
    from frame.plugins.platforms.cuda.platform import CudaOps
    from frame.plugins.platforms.torch_collectives import TorchGroup

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    placement = Placement(rank=rank, local_rank=rank, mesh=Mesh(tensor=size), rendezvous=rendezvous)
    ops = CudaOps(device=device)
    collectives = CudaCollectives(placement, device, ops)
    group = collectives.group("tensor", range(size))
    if not isinstance(group, PeerGroup):
        raise SystemExit("the devices do not reach each other's memory")
    nccl = super(PeerGroup, group)
    rows: list[dict[str, Any]] = []
    for hidden in HIDDEN:
        weight = torch.rand(hidden, device=device, dtype=torch.bfloat16)
        for tokens in TOKENS:
            x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
            residual = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
            norm = (weight, 1e-6, 0.0)
            whole = nccl.all_gather(x[None], 0).double().sum(0)
            found = group.all_reduce(x)
            torch.testing.assert_close(found.double(), whole, atol=0.05, rtol=0.01)
            ours, total = kernels.all_reduce_normed(x, residual, norm, group._buffers)
            theirs, expected = ops.add_rms_norm(nccl.all_reduce(x), residual, *norm)
            torch.testing.assert_close(total, expected, atol=0.05, rtol=0.01)
            torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.02)
            works: dict[str, Callable[[], Any]] = {
                "nccl": lambda x=x: nccl.all_reduce(x),
                "ours": lambda x=x: kernels.all_reduce(x, group._buffers),
                "nccl + norm": lambda x=x, r=residual, n=norm: ops.add_rms_norm(nccl.all_reduce(x), r, *n),
                "ours with norm": lambda x=x, r=residual, n=norm: kernels.all_reduce_normed(x, r, n, group._buffers),
            }
            times = {name: timed(work, group) for name, work in works.items()}
            slowest = [json.loads(data) for data in group.host.gather(json.dumps(times).encode())]
            rows.append({
                "hidden": hidden, "tokens": tokens, "KiB": x.nbytes >> 10,
                **{name: round(max(one[name] for one in slowest), 2) for name in works},
            })  # fmt: skip
            if rank == 0:
                print(rows[-1], flush=True)
    if rank == 0 and path:
        Path(path).write_text(json.dumps(rows, indent=1))
    group.host.barrier()
    collectives.close()
    assert isinstance(group, TorchGroup)


def timed(work: Callable[[], Any], group: Any) -> float:
    """Microseconds of one call in a replayed graph of many: the median of 20 replays."""
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    group.host.barrier()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(CALLS):
            work()
        graph.capture_end()
        times = []
        for _ in range(20):
            group.host.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / CALLS)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
