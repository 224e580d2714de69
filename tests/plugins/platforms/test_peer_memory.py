"""How the memory that GPUs share is divided; no GPU is used."""

import pytest
import torch

pytest.importorskip("triton")
kernels = pytest.importorskip("frame.kernels.all_reduce")
peer_memory = pytest.importorskip("frame.plugins.platforms.cuda.peer_memory")


@pytest.mark.parametrize("size", range(2, peer_memory.MAX_RANKS + 1))
def test_every_number_of_ranks_divides_the_memory_into_whole_words(size):
    nothing = torch.empty(0)
    plain = peer_memory.plain_bytes(size)
    buffers = kernels.PeerBuffers(0, size, nothing, nothing, peer_memory.PACKED_BYTES, plain)
    assert (plain % 16, buffers.plain_at % 16, buffers.num_bytes % 16) == (0, 0, 0)
    assert peer_memory.PLAIN_BYTES - plain * size < 16 * size
