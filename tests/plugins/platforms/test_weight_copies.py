"""Weights by several threads through buffers: on a CPU the same code runs, with ordinary memory."""

from __future__ import annotations

import threading

import pytest
import torch

from frame.plugins.platforms.cuda.weight_copies import Lane, fill

CPU = torch.device("cpu")
CASES = {
    "plain": (torch.bfloat16, torch.bfloat16, lambda x: x),
    "cast": (torch.float32, torch.bfloat16, lambda x: x),
    "transposed": (torch.bfloat16, torch.bfloat16, lambda x: x.transpose(0, 1)),
    "columns": (torch.float16, torch.float16, lambda x: x[:, 3:40]),
    "bytes": (torch.float8_e4m3fn, torch.float8_e4m3fn, lambda x: x),
}


@pytest.mark.parametrize("buffer_bytes", [64, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_element_arrives(case: tuple, buffer_bytes: int) -> None:
    """Buffers that hold less than a row, some rows and all of a tensor."""
    source_type, target_type, view = case
    whole = torch.randn(61, 61)
    sources = [whole.to(source_type), whole.to(source_type)]
    targets = [torch.full((61, 61), 7.0).to(target_type) for _ in sources]
    lanes = [Lane(CPU, buffer_bytes) for _ in range(3)]
    fill([(view(target), lambda source=source: view(source)) for target, source in zip(targets, sources, strict=True)],
         lanes)  # fmt: skip
    for target in targets:
        want = torch.full((61, 61), 7.0).to(target_type)
        view(want).copy_(view(whole.to(source_type)))
        assert torch.equal(target.float(), want.float())


def test_other_shapes() -> None:
    shapes = [(), (0,), (5,), (1, 1), (3, 4, 5), (2, 0, 4)]
    sources = [torch.randn(shape) for shape in shapes]
    targets = [torch.zeros(shape) for shape in shapes]
    fill([(target, lambda source=source: source) for target, source in zip(targets, sources, strict=True)], [Lane(CPU)])
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_no_more_read_at_a_time_than_there_are_lanes() -> None:
    reading, most, lock = 0, 0, threading.Lock()

    def read() -> torch.Tensor:
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
        found = torch.ones(1000)
        with lock:
            reading -= 1
        return found

    fill([(torch.zeros(1000), read) for _ in range(50)], [Lane(CPU) for _ in range(3)])
    assert 1 <= most <= 3


def test_a_file_that_cannot_be_read_ends_the_load() -> None:
    def fail() -> torch.Tensor:
        raise ValueError("cannot read tensor x of model.safetensors")

    pieces = [(torch.zeros(2), lambda: torch.ones(2)), (torch.zeros(2), fail), (torch.zeros(2), lambda: torch.ones(2))]
    with pytest.raises(ValueError, match="cannot read tensor x"):
        fill(pieces, [Lane(CPU), Lane(CPU)])
