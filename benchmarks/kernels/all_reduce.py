"""Sums over the GPUs of this machine: frame's kernels and NCCL, each captured as a CUDA graph, in microseconds.

    python benchmarks/kernels/all_reduce.py [--ranks 2] [--json FILE]

Starts a process for each GPU. Of each size it times a graph of 20 sums of tensors [T, hidden] in bfloat16, and of as
many sums followed by residual and norm: in one kernel of ours, and by NCCL with the norm's kernel behind it ("values
alone": with a flag behind them where the kernel would pack them with numbers; "loads behind the wait": as the kernel
would for more rows than programs). Then
products [T, inner] x [inner, hidden] with the sum and norm that follow: alone, one after the other, and in parts whose
sums begin while the next is computed, by NCCL and by copies between devices. Results are compared with sums in float64
first. At last the best tokens of the ranks' parts of the vocabulary, by one kernel and by NCCL with another one behind
it. The slowest rank counts.
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
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512)
CALLS = 20
#: tokens, inner and hidden size of products
PRODUCTS = ((8192, 4096, 8192), (8192, 14336, 8192), (8192, 2048, 2048), (4096, 2048, 4096), (5000, 7168, 4096))


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
    from frame.plugins.platforms.cuda.ops import CudaOps
    from frame.plugins.platforms.torch_collectives import TorchGroup

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    placement = Placement(rank=rank, local_rank=rank, mesh=Mesh(tensor=size), rendezvous=rendezvous)
    ops = CudaOps(device=device)
    collectives = CudaCollectives(placement, device, ops, copies_sums=True)
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
            if x.nbytes <= group._buffers.packed_bytes:
                works["values alone, with norm"] = lambda x=x, r=residual, n=norm: kernels.all_reduce_normed(
                    x, r, n, group._buffers, packed=False
                )
            else:
                works["loads behind the wait, with norm"] = lambda x=x, r=residual, n=norm: kernels.all_reduce_normed(
                    x, r, n, group._buffers, ahead=False
                )
            times = {name: timed(work, group) for name, work in works.items()}
            slowest = [json.loads(data) for data in group.host.gather(json.dumps(times).encode())]
            rows.append({
                "hidden": hidden, "tokens": tokens, "KiB": x.nbytes >> 10,
                **{name: round(max(one[name] for one in slowest), 2) for name in works},
            })  # fmt: skip
            if rank == 0:
                print(rows[-1], flush=True)
    rows += [products(group, nccl, ops, *sizes) for sizes in PRODUCTS]
    rows += [best_tokens(group, nccl, ops, tokens) for tokens in TOKENS]
    if rank == 0 and path:
        Path(path).write_text(json.dumps(rows, indent=1))
    group.host.barrier()
    collectives.close()
    assert isinstance(group, TorchGroup)


def best_tokens(group: Any, nccl: Any, ops: Any, tokens: int) -> dict[str, Any]:
    """Microseconds until each rank has the best token of all parts, for so many rows."""
    import torch

    torch.manual_seed(group.rank)
    scores, logits = torch.randn(2, tokens, device="cuda").round()
    ids = torch.randint(0, 1 << 17, (tokens,), device="cuda", dtype=torch.int32)

    def gathered() -> Any:
        words = torch.stack([one.view(torch.int32) for one in (scores, ids, logits)])
        return ops.join_parts(nccl.all_gather(words, 0).unflatten(0, (group.size, 3)))

    works = {"nccl + join": gathered, "ours": lambda: group.join_best(scores, ids, logits)}
    for mine, expected in zip(group.join_best(scores, ids, logits), gathered(), strict=True):
        assert torch.equal(mine, expected)
    times = {name: timed(work, group) for name, work in works.items()}
    slowest = [json.loads(data) for data in group.host.gather(json.dumps(times).encode())]
    row = {"best tokens of rows": tokens, **{name: round(max(one[name] for one in slowest), 2) for name in works}}
    if group.rank == 0:
        print(row, flush=True)
    return row


def products(group: Any, nccl: Any, ops: Any, tokens: int, inner: int, hidden: int) -> dict[str, Any]:
    """Microseconds of a product of this rank's columns, the sum over ranks and the norm."""
    import torch

    make = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(tokens, inner, **make), torch.randn(hidden, inner, **make) * inner**-0.5
    residual, gain = torch.randn(tokens, hidden, **make), torch.rand(hidden, **make)

    class Norm:
        given = (gain, 1e-6, 0.0)

        def __call__(self, summed: Any, before: Any) -> Any:
            return ops.add_rms_norm(summed, before, *self.given)

    def in_parts(by: Any) -> Any:
        y = torch.empty(tokens, hidden, **make)
        for part in by.parts_of(tokens, 2 * hidden, inner):
            ops.linear_into(y[part], x[part], weight)
            by.begin_all_reduce(y, part)
        return by.all_reduce_normed(y, residual, Norm())

    def one_after_the_other(by: Any) -> Any:
        return by.all_reduce_normed(ops.linear(x, weight), residual, Norm())

    works: dict[str, Callable[[], Any]] = {
        "product": lambda: ops.linear(x, weight),
        "product + norm": lambda: ops.add_rms_norm(ops.linear(x, weight), residual, *Norm.given),
        "nccl": lambda: one_after_the_other(nccl),
        "nccl in parts": lambda: in_parts(nccl),
        "copies": lambda: one_after_the_other(group),
        "copies in parts": lambda: in_parts(group),
    }
    expected = works["nccl"]()
    for name in ("copies", "copies in parts"):
        for found, wanted in zip(works[name](), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.02)
    times = {name: timed(work, group) for name, work in works.items()}
    slowest = [json.loads(data) for data in group.host.gather(json.dumps(times).encode())]
    found = {name: round(max(one[name] for one in slowest), 1) for name in works}
    row = {"tokens": tokens, "inner": inner, "hidden": hidden, **found}
    if group.rank == 0:
        print(row, flush=True)
    return row


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
