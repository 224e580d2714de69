"""Weights that outlive their engine on a GPU: found after kill -9, counted once, and given back with the server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from frame.testing.checkpoints import make_checkpoint
from tests.kept_weights.engines import FOUND, LOADED, damage
from tests.kept_weights.test_restart import arguments, kill, tokens
from tests.server.running import REAL, server, until

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
#: 0.5 GB in float32, so that a second copy would be seen.
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "vocab_size": 8192}
_PARTS = (1000, 300 << 20, 7)

_WRITER = f"""
import socket, sys, time, torch
from frame.plugins.platforms.cuda.held_memory import CudaHeldMemory
memory = CudaHeldMemory(torch.device("cuda", 0), 8 << 30)
for number, size in enumerate({_PARTS}):
    memory.take(size).fill_(number + 1)
torch.cuda.synchronize()
pieces = memory.pieces()
ours = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(ours, [repr([piece.num_bytes for piece in pieces]).encode()], [piece.descriptor for piece in pieces])
time.sleep(600)
"""


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def read_in_a_graph(part: torch.Tensor, each: int) -> int:
    """The sum of bytes, all of which are `each`, by a CUDA graph."""
    assert bool((part == each).all())
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(1, dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        out.copy_(part.sum())
    graph.replay()
    return int(out.item())


def test_memory_of_a_killed_process_is_found_and_given_back():
    from frame.interfaces import HeldPiece
    from frame.plugins.platforms.cuda.held_memory import CudaHeldMemory

    read_in_a_graph(torch.ones(9, dtype=torch.uint8, device="cuda"), 1)  # loads the kernels, whose code stays
    torch.cuda.empty_cache()
    before = used_bytes()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        try:
            sizes, files, _, _ = socket.recv_fds(ours, 1 << 16, 64)
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
    pieces = [HeldPiece(file, int(size)) for file, size in zip(files, sizes.decode()[1:-1].split(","), strict=True)]
    held = sum(piece.num_bytes for piece in pieces)
    until(lambda: used_bytes() - before < held + (64 << 20), 20, lambda: f"{used_bytes() - before} of {held} bytes")
    assert used_bytes() - before >= held - (2 << 20)
    memory = CudaHeldMemory(torch.device("cuda", 0), 8 << 30, pieces)
    assert used_bytes() - before < held + (64 << 20)  # mapped, not copied
    for number, size in enumerate(_PARTS):
        part = memory.take(size)
        assert read_in_a_graph(part, number + 1) == size * (number + 1)
    memory.release()
    del memory, part
    torch.cuda.empty_cache()
    until(lambda: used_bytes() - before < 64 << 20, 20, lambda: f"{used_bytes() - before} bytes are left")


@pytest.mark.parametrize(
    "more", [(), ("--quantization", "fp8"), ("--quantization", "int4")], ids=["plain", "fp8", "int4"]
)
def test_the_next_engine_reads_no_weights(more, tmp_path):
    folder = make_checkpoint(tmp_path / "model", "qwen3", dtype=torch.bfloat16, **LARGE)
    torch.zeros(1, device="cuda")
    before = used_bytes()
    with server(
        REAL, *arguments(folder, "--kv-cache-memory-bytes", str(64 << 20), "--dtype", "bfloat16", *more)
    ) as running:
        want = tokens(running)
        serving = used_bytes()
        damage(folder)
        for turn in (1, 2):
            kill(running.children()["engine"])
            began = time.monotonic()
            assert tokens(running) == want
            print(f"{time.monotonic() - began:.2f} s to the last token of {len(want)} prompts")
            assert (running.text.count(FOUND), running.text.count(LOADED)) == (turn, 1), running.text
            assert used_bytes() < serving + (100 << 20)
        running.stop()
        assert running.process.returncode == 0, running.text
    until(lambda: used_bytes() < before + (64 << 20), 20, lambda: f"{used_bytes() - before} bytes are left")


def test_the_cache_is_as_large_as_before(tmp_path: Path):
    folder = make_checkpoint(tmp_path / "model", "qwen3", dtype=torch.bfloat16, **LARGE)
    more = ("--gpu-memory-utilization", "0.3", "--dtype", "bfloat16")

    def blocks(running):
        return running.metric("frame_kv_cache_blocks")

    with server(REAL, *arguments(folder, *more)) as running:
        tokens(running)
        first = blocks(running)
        kill(running.children()["engine"])
        tokens(running)
        assert FOUND in running.text
        assert abs(blocks(running) - first) < 0.02 * first
    with server(REAL, *[one for one in arguments(folder, *more) if one != "--keep-weights"]) as running:
        tokens(running)
        assert abs(blocks(running) - first) < 0.02 * first
