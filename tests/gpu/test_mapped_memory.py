"""Memory of a GPU that another process maps, proves to have, and writes to by a copy engine and by a kernel."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BYTES = 64 << 20
PIECE = 48 << 10


def test_a_process_writes_to_another_ones_buffer() -> None:
    from frame.plugins.connectors.blocks.mapped_memory import PROBE_BYTES, CudaSharing
    from frame.plugins.connectors.push.buffer import DeviceBuffer

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=write, args=(there,))
    process.start()
    try:
        buffer = DeviceBuffer(CudaSharing(torch.device("cuda", 0)), "here", BYTES, 4)
        scratch = buffer.scratch.take(PROBE_BYTES)
        assert scratch is not None
        offered = buffer.offered(scratch)
        part = buffer.arena.take(BYTES // 2)
        assert part is not None
        part.zero_()
        torch.cuda.synchronize()
        here.send((offered, part.data_ptr()))
        assert here.poll(60)
        written = here.recv()
        assert buffer.proves(scratch, written)
        assert not buffer.proves(scratch, bytes(len(written)))
        here.send(None)
        assert here.poll(60)
        assert here.recv() == BYTES // 2
        assert torch.equal(part.cpu(), content())
        here.send(None)
        process.join(60)
        assert process.exitcode == 0
        assert torch.equal(part.cpu(), content())
    finally:
        process.kill()


def content() -> torch.Tensor:
    """What is written."""
    return torch.arange(BYTES // 2, dtype=torch.int64).mul_(2654435761).bitwise_right_shift_(7).to(torch.uint8)


def write(pipe: multiprocessing.connection.Connection) -> None:
    """Maps what it is offered, proves that, and writes half from the device and half from host memory."""
    import numpy as np

    from frame.plugins.connectors.blocks.mapped_memory import PROBE_BYTES, CudaSharing, Mapper

    device = torch.device("cuda", 1 % torch.cuda.device_count())
    sharing = CudaSharing(device)
    mapper = Mapper(sharing, "here")
    assert pipe.poll(60)
    offered, target = pipe.recv()
    opened = mapper.open(offered.offer)
    place = int(opened.addresses(np.array([offered.scratch]), np.array([PROBE_BYTES]))[0])
    assert mapper.read(place) == offered.content
    mapper.write(place, b"w" * PROBE_BYTES)
    pipe.send(b"w" * PROBE_BYTES)
    pipe.recv()
    place = int(opened.addresses(np.array([target]), np.array([BYTES // 2]))[0])
    near, far = content().to(device), content().pin_memory()
    torch.cuda.synchronize(device)
    half = BYTES // 4
    sharing.move(near.data_ptr(), place, half).wait()
    sharing.move(far.data_ptr() + half, place + half, half).wait()
    pipe.send(BYTES // 2)
    pipe.recv()
    opened.close()
    with pytest.raises(ValueError, match="outside"):
        opened.addresses(np.array([target]), np.array([2 * BYTES]))


def test_a_process_writes_by_a_kernel_what_a_step_has_computed() -> None:
    from frame.plugins.connectors.blocks.mapped_memory import CudaSharing, Offering

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=launch, args=(there,))
    process.start()
    try:
        sharing = CudaSharing(torch.device("cuda", 0))
        memory = sharing.allocate(PIECE * 64)
        memory.zero_()
        torch.cuda.synchronize()
        offering = Offering(sharing, "here", [memory])
        here.send((offering.offer, memory.data_ptr()))
        assert here.poll(60)
        assert here.recv() == "written"
        assert torch.equal(memory.cpu(), content()[: PIECE * 64].view(64, PIECE).flip(0).reshape(-1))
        here.send(None)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


def launch(pipe: multiprocessing.connection.Connection) -> None:
    """Has pieces be written in another order than they have here, beside the stream that computes them."""
    import time

    import numpy as np

    from frame.plugins.connectors.blocks.mapped_memory import CudaSharing, Mapper
    from frame.plugins.platforms.cuda.streams import SideStream

    device = torch.device("cuda", 1 % torch.cuda.device_count())
    torch.cuda.set_device(device)
    sharing, queue = CudaSharing(device), SideStream(device)
    assert pipe.poll(60)
    offer, target = pipe.recv()
    by_kernel = lambda source, to, size: sharing.copy(np.array([[source, to, size, 0]], np.int64))  # noqa: E731
    opened = Mapper(sharing, "here", by_kernel).open(offer)
    places = opened.addresses(np.arange(64) * PIECE + target, np.full(64, PIECE))
    computed, memory = content()[: PIECE * 64].to(device), torch.zeros(PIECE * 64, dtype=torch.uint8, device=device)
    pieces = np.arange(64)[::-1] * PIECE + memory.data_ptr()
    table = np.stack([pieces, places, np.full(64, PIECE), np.zeros(64, np.int64)], 1)
    torch.cuda.synchronize(device)
    spent = []
    torch.cuda._sleep(400_000_000)  # some 0.2 seconds
    memory.copy_(computed)
    began = time.perf_counter()
    queue.run(lambda: spent.append(sharing.launch(table)))
    mark = queue.mark()
    assert time.perf_counter() - began < 0.1, "the host waited for the stream"
    assert not mark.done()
    mark.wait()
    assert 0 < spent[0]() < 0.1, "what it waited for is no part of its time"
    pipe.send("written")
    pipe.recv()
    opened.close()
