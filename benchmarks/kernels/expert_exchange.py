"""Tokens to their experts and back on the GPUs of this machine: frame's kernels beside NCCL, in microseconds.

    python benchmarks/kernels/expert_exchange.py [--ranks 2] [--json FILE]

Starts a process for each GPU. Tokens [T, 2048] in bfloat16 choose 8 of 128 experts at random, T / ranks on each rank.
An exchange is what a layer does without its experts: what is sent comes back as it came. Timed in a replayed CUDA graph
of 20 exchanges: the kernels over peer memory, the exchange `gather` (NCCL's all-gather and reduce-scatter), and NCCL's
all-to-all of the rows alone, there and back, of sizes that are known before. The exchange `all-to-all` reads sizes on
the host and is timed as it is launched. What comes back is compared first. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TOKENS = (16, 32, 64, 128, 256, 512)
HIDDEN, EXPERTS, TOP_K = 2048, 128, 8
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

    from frame.core.parallel.groups import make_groups
    from frame.interfaces import ExchangeSpec, Mesh, Placement
    from frame.plugins.exchanges.all_to_all import AllToAllExchange
    from frame.plugins.exchanges.gather import GatherExchange
    from frame.plugins.exchanges.peer_memory import PeerMemoryExchange
    from frame.plugins.platforms.torch_collectives import TorchCollectives, nccl_group
    from frame.testing import make_setup

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = Mesh(data=size, expert_parallel=True)
    placement = Placement(rank=rank, local_rank=rank, mesh=mesh, rendezvous=rendezvous)
    collectives = TorchCollectives(placement, partial(nccl_group, device))
    groups = make_groups(placement, collectives)
    spec = ExchangeSpec(HIDDEN, TOP_K, EXPERTS // size, size, 1, max(TOKENS), torch.bfloat16, "cuda")
    setup = make_setup("exchange", spec=spec, groups=groups)
    kinds = {"ours": PeerMemoryExchange, "gather": GatherExchange, "all-to-all, launched": AllToAllExchange}
    exchanges = {name: kind(setup) for name, kind in kinds.items()}
    if exchanges["ours"]._buffers is None:
        raise SystemExit("the devices do not reach each other's memory")
    rows: list[dict[str, Any]] = []
    for tokens in TOKENS:
        x, routing = choose(tokens // size)
        wanted = {name: expected(x, routing, size) for name in exchanges} | {"gather": size * x}
        for name, one in exchanges.items():
            found = exchanged(one, x, routing)
            torch.testing.assert_close(found, wanted[name], atol=0.02, rtol=0.02, msg=f"{name}, {tokens} tokens")
        works = {name: partial(exchanged, one, x, routing) for name, one in exchanges.items()}
        works["all-to-all of the rows"] = rows_alone(groups.expert, x, routing, spec.slots_per_rank)
        times = {
            name: timed(work, groups.expert, captured=name != "all-to-all, launched") for name, work in works.items()
        }
        slowest = [json.loads(data) for data in groups.expert.host.gather(json.dumps(times).encode())]
        rows.append({
            "tokens": tokens, "KiB of a rank": x.nbytes >> 10,
            **{name: round(max(one[name] for one in slowest), 2) for name in works},
        })  # fmt: skip
        if rank == 0:
            print(rows[-1], flush=True)
    if rank == 0 and path:
        Path(path).write_text(json.dumps(rows, indent=1))
    for one in exchanges.values():
        one.close()
    groups.expert.host.barrier()
    collectives.close()


def choose(count: int) -> tuple[Any, Any]:
    """Tokens of a rank and their experts."""
    import torch

    from frame.interfaces import Routing

    x = torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(count, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].to(torch.int32).contiguous()
    return x, Routing(torch.rand(count, TOP_K, device="cuda"), ids)


def exchanged(exchange: Any, x: Any, routing: Any) -> Any:
    """What comes back of x, as often as ranks hold experts of a token; `gather` counts all ranks."""
    from frame.interfaces import Activations

    sent = exchange.dispatch(Activations(x), routing, None)
    return exchange.combine(sent.values, sent)


def expected(x: Any, routing: Any, num_ranks: int) -> Any:
    """x times the number of ranks that hold experts of each token."""
    import torch

    ranks = torch.arange(num_ranks, device="cuda")
    holders = routing.ids.div(EXPERTS // num_ranks, rounding_mode="floor")[..., None] == ranks
    return x * holders.any(1).sum(1, keepdim=True)


def rows_alone(group: Any, x: Any, routing: Any, slots: int) -> Callable[[], Any]:
    """NCCL's all-to-all of the rows that ranks need, and back: no experts, no weights, and no sums."""
    import torch

    goes = (routing.ids.div(slots, rounding_mode="floor")[..., None] == torch.arange(group.size, device="cuda")).any(1)
    ones = [1] * group.size
    sends = goes.sum(0).tolist()
    receives = group.all_to_all(goes.sum(0), ones, ones).tolist()
    rows = x[goes.t().nonzero()[:, 1]]

    def there_and_back() -> Any:
        return group.all_to_all(group.all_to_all(rows, sends, receives), receives, sends)

    return there_and_back


def timed(work: Callable[[], Any], group: Any, *, captured: bool) -> float:
    """Microseconds of one call of many, in a replayed graph or as they are launched: the median of 20 runs."""
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    group.host.barrier()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def calls() -> None:
        for _ in range(CALLS):
            work()

    with torch.cuda.stream(stream):
        if captured:
            graph.capture_begin(capture_error_mode="thread_local")
            calls()
            graph.capture_end()
        times = []
        for _ in range(20):
            group.host.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            (graph.replay if captured else calls)()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / CALLS)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
