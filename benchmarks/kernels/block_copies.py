"""Rates of copies of KV blocks by one launch, beside those of copy engines, and what products lose by them.

    python benchmarks/kernels/block_copies.py [--mib 2048] [--piece 65536] [--json FILE]

`host` is pinned memory; `peer` is the memory of a second GPU, where there is one. Blocks lie in random order on both
sides. `products` are of a decode step, 64 rows by 8192 x 4096: their time alone, and while copies go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from frame.kernels.block_copies import copy_pieces
from frame.kernels.peer_memory import enable_access

PROGRAMS = {"from host": (2, 4, 8, 16, 32), "to host": (2, 4, 8, 16, 32), "from peer": (16, 32, 48, 64, 96, 132)}


def rate(run: Callable[[], None], num_bytes: int, repeats: int = 5) -> float:
    """Bytes a second of the median of several runs."""
    run()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return num_bytes / statistics.median(seconds)


def pieces(source: Tensor, target: Tensor) -> Tensor:
    """Each row of one to a random row of the other."""
    count, size = source.shape
    rows = torch.stack([torch.randperm(count) * size + one.data_ptr() for one in (source, target)], 1)
    return torch.cat([rows, torch.tensor([[size, 0]]).expand(count, 2)], 1).cuda()


class Products:
    """A decode step's products again and again, on a stream of their own."""

    def __init__(self) -> None:
        self._x = torch.randn(64, 4096, dtype=torch.bfloat16, device="cuda")
        self._weights = [torch.randn(8192, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(16)]

    def seconds(self, beside: Callable[[], None] | None = None) -> float:
        """Of one product, the median, while `beside` runs on another stream."""
        stream, other = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        if beside is not None:
            with torch.cuda.stream(other):
                beside()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(101)]
        with torch.cuda.stream(stream):
            for number, event in enumerate(events):
                event.record()
                torch.mm(self._x, self._weights[number % 16].T)
        torch.cuda.synchronize()
        spans = [first.elapsed_time(second) for first, second in pairwise(events[20:])]
        return statistics.median(spans) / 1e3


def main() -> None:
    """Measures each way."""
    parser = argparse.ArgumentParser(description="Copies of KV blocks by one launch.")
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--piece", type=int, default=64 << 10, help="Bytes of a block of one layer.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count = (options.mib << 20) // options.piece
    here = torch.zeros(count, options.piece, dtype=torch.uint8, device="cuda:0")
    host = torch.zeros(count, options.piece, dtype=torch.uint8, pin_memory=True)
    ways = {"from host": (host, here), "to host": (here, host)}
    if torch.cuda.device_count() > 1:
        peer = torch.zeros(count, options.piece, dtype=torch.uint8, device="cuda:1")
        enable_access(0, 1)
        ways["from peer"] = (peer, here)
    products, found = Products(), []
    alone = products.seconds()
    for name, (source, target) in ways.items():
        engine = rate(lambda s=source, t=target: t.copy_(s, non_blocking=True), here.nbytes)  # type: ignore[misc]
        table = pieces(source, target)
        for programs in PROGRAMS[name]:

            def copy(table: Tensor = table, programs: int = programs) -> None:
                copy_pieces(table, options.piece, 16, programs=programs)

            speed = rate(copy, here.nbytes)
            slow = products.seconds(lambda: [copy() for _ in range(4)] and None) / alone
            found.append({"way": name, "programs": programs, "rate": speed, "engine": engine, "products": slow})
            print(
                f"{name}, {programs:3d} programs: {speed / 1e9:6.1f} GB/s, copy engine {engine / 1e9:6.1f} GB/s, "
                f"products {slow:.2f} times as long",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rates": found}, indent=1))


if __name__ == "__main__":
    main()
