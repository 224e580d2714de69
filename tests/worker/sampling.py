"""A sampler on the CPU and requests for it, for the tests of this folder."""

import numpy as np
import torch

from frame.core.ops import Ops
from frame.core.worker.device import Device
from frame.core.worker.sample.sampler import Sampler
from frame.interfaces import NewRequest, SamplingParams, StepResult
from frame.plugins.platforms.cpu import HostStreams

VOCAB = 40
EOS = 39


def make_sampler(*, vocab_size=VOCAB, max_slots=8, **options):
    return Sampler(Device(Ops(), HostStreams(), torch.device("cpu")), max_slots, vocab_size, **options)


def new_request(slot, prompt=(1, 2, 3), output=(), *, seed=7, request_id=None, **params):
    return NewRequest(
        slot=slot,
        request_id=request_id or f"request-{slot}",
        token_ids=np.array([*prompt, *output], np.int32),
        prompt_len=len(prompt),
        num_computed=0,
        block_ids=[],
        params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=[EOS],
    )


def add(sampler, *requests):
    for request in requests:
        sampler.add(request)
    sampler.apply_staged_writes()


def sample(sampler, logits, slots, lengths, masks=b""):
    """Samples copies of `logits`; everything that reached the host, by name, and the log-probabilities by row."""
    host_slots = np.array(slots, np.int32)
    sampled = sampler.sample(logits.clone(), host_slots, torch.tensor(lengths, dtype=torch.int64), masks)
    arrays = {name: tensor.cpu().numpy() for name, tensor in sampled.tensors().items()}
    empty = np.full((len(slots), 1), -1, np.int32)
    result = StepResult(step=0, token_ids=empty, num_tokens=np.zeros(len(slots), np.int32))
    sampled.fill(result, arrays, np.ones(len(slots), bool))
    return arrays, result.logprobs


def draw(sampler, logits, slots, lengths):
    return sample(sampler, logits, slots, lengths)[0]["token_ids"].tolist()


def some_logits(rows, seed=0, vocab_size=VOCAB):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
