"""How quickly safetensors in the page cache become weights on the device, by the platform's own way of copying.

    python benchmarks/load_speed.py [--gigabytes 8] [--platform cuda] [--folder DIR] [--json FILE]

Writes a checkpoint of bf16 matrices in the shapes of Llama 8B, reads it once so that it is cached, then copies it into
tensors of the same shapes as loading does: median of three, beside one copy after the other. The goal is 5 GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.mesh import Placement
from frame.core.interfaces.setup import LoaderSetup
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.open_device import choose_platform
from frame.plugins.loaders.safetensors import SafetensorsLoader

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
FILE_BYTES = 4 << 30


def write(folder: Path, total: int) -> int:
    """Files of at most 4 GiB each, `total` bytes or a little more; returns how many."""
    written = files = 0
    while written < total:
        tensors: dict[str, Tensor] = {}
        size = 0
        while size < min(FILE_BYTES, total - written):
            rows, columns = SHAPES[len(tensors) % len(SHAPES)]
            rows = max(1, min(rows, (total - written - size) // (2 * columns) + 1))
            tensors[f"{files}.{len(tensors)}"] = torch.randint(-999, 999, (rows, columns), dtype=torch.int16).view(
                torch.bfloat16
            )
            size += rows * columns * 2
        save_file(tensors, folder / f"model-{files:05}.safetensors")
        written += size
        files += 1
    return written


def read(folder: Path) -> None:
    """Brings every file into the page cache."""
    buffer = bytearray(64 << 20)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure(fill: Callable[[Any], None], pieces: Any, finish: Callable[[], None]) -> float:
    """Seconds, median of three."""
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        fill(pieces)
        finish()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def one_by_one(pieces: Any) -> None:
    """What a platform does that says nothing."""
    for target, source in pieces:
        target.copy_(source())


def main() -> None:
    """Prints two rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--folder", type=Path, help="Where the files go for a while; its disk must hold them.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = FrameConfig.model_validate({"executor": {"platform": options.platform}})
    streams = (platform := choose_platform(config, Registry.load(), 4096, Placement())).streams()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size = write(Path(folder), int(options.gigabytes * 1e9))
        read(Path(folder))
        tensors = list(SafetensorsLoader(LoaderSetup(Path(folder))).tensors())
        pieces = [
            (torch.empty(tensor.shape, dtype=tensor.dtype, device=platform.device), partial(tensor.read))
            for tensor in tensors
        ]
        plain = size / measure(one_by_one, pieces, streams.synchronize) / 1e9
        own = size / measure(streams.fill, pieces, streams.synchronize) / 1e9
        for target, source in pieces[:: max(1, len(pieces) // 8)]:
            if not torch.equal(target.cpu().view(torch.int16), source().view(torch.int16)):
                raise RuntimeError("a weight did not arrive as it was read")
    load = os.getloadavg()[0]
    print(f"{size / 1e9:.1f} GB to {platform.device}: {own:.2f} GB/s; one by one {plain:.2f} GB/s; load {load:.1f}")
    if options.json:
        options.json.write_text(json.dumps({"bytes": size, "GB/s": own, "one by one GB/s": plain, "load": load}))


if __name__ == "__main__":
    main()
