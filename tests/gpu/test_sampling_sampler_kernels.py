"""The sampler on kernels: the tokens of the sampler on references, and on a GPU never a wait for the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from frame.core.interfaces.platform import Streams
from frame.core.ops import Ops
from frame.core.worker.device import Device
from frame.core.worker.sample.sampler import Sampler
from frame.interfaces import TokenMasks
from frame.kernels import filters, logits, logprobs, sampling
from frame.plugins.platforms.cpu import HostStreams
from tests.worker.sampling import new_request

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
VOCAB = 700


class KernelOps(Ops):
    """The references, with every sampling kernel in place of its own."""

    greedy = staticmethod(sampling.greedy)
    draw = staticmethod(sampling.draw)
    keep_threshold = staticmethod(filters.keep_threshold)
    add_bias = staticmethod(logits.add_bias)
    apply_bitmask = staticmethod(logits.apply_bitmask)
    penalize = staticmethod(logits.penalize)
    count_tokens = staticmethod(logits.count_tokens)
    top_logprobs = staticmethod(logprobs.top_logprobs)


def streams() -> Streams:
    if DEVICE.type == "cpu":
        return HostStreams()
    from frame.plugins.platforms.cuda.streams import CudaStreams

    return CudaStreams(DEVICE)


@contextmanager
def no_waits() -> Iterator[None]:
    if DEVICE.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sampler_of(ops: Ops, mode: str) -> Sampler:
    made = Sampler(Device(ops, streams(), DEVICE), 8, VOCAB, mode)
    for request in (
        new_request(0, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, logprobs=3),
        new_request(1, temperature=0.8, top_k=20, top_p=0.9, frequency_penalty=0.7),
        new_request(2, temperature=1.0, top_p=0.95, logprobs=5),
        new_request(3, temperature=1.2, min_p=0.05, logit_bias={5: 4.0, 6: -100.0}, min_tokens=2),
        new_request(4, temperature=0.7, allowed_token_ids=list(range(3, 600, 7)), logprobs=0),
        new_request(5, temperature=1.0, bad_words_token_ids=[[7, 8], [9]]),
        new_request(6, temperature=0.0),
    ):
        made.add(request)
    made.apply_staged_writes()
    return made


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_mixed_batch_draws_what_the_references_draw(mode: str) -> None:
    host_slots = np.arange(7, dtype=np.int32)
    words = np.full((1, (VOCAB + 31) // 32), 0x55555555, np.int32)
    masks = TokenMasks(slots=np.array([2], np.int32), words=words).packed()
    fast, plain = sampler_of(KernelOps(), mode), sampler_of(Ops(), mode)
    # of two outputs that a request asks for at least, the first steps have none; the interpreter takes a second a step
    for step in range(4) if DEVICE.type == "cuda" else (0, 3):
        given = (torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(step)) * 3).to(DEVICE)
        lengths = torch.full((7,), 3 + step, dtype=torch.int64).to(DEVICE)
        expected = plain.sample(given.clone(), host_slots, lengths, masks)
        copy = given.clone()
        if step == 0:
            found = fast.sample(copy, host_slots, lengths, masks)  # compiles
        else:
            with no_waits():
                found = fast.sample(copy, host_slots, lengths, masks)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        for name, tensor in expected.tensors().items():
            if "ids" not in name or name == "token_ids":
                torch.testing.assert_close(found.tensors()[name], tensor, rtol=1e-5, atol=1e-5, msg=f"{name}, {step}")
