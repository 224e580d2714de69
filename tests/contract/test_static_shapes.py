"""An engine on a platform that takes a few sizes only: it meets no others, and its tokens are those of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.interfaces.step import TokenMasks
from frame.core.ops import Ops
from frame.core.plugin_host.registry import Registry
from frame.core.worker.device import Device
from frame.core.worker.sample.sampler import Sampler
from frame.plugins.platforms.cpu import CpuPlatform, HostStreams
from frame.testing import PlatformSuite
from frame.testing.engines import SMALL, drain, mixed_requests, prompts, request, running, tokens_of
from frame.testing.tiny import write_tiny
from tests.contract import static_shapes


class TestFewSizes(PlatformSuite):
    target = "tests.contract.static_shapes:FewSizes"
    max_sizes = 6


@pytest.mark.parametrize(("kind", "op"), [("UnpaddedWrites", "write_rows"), ("UnpaddedSamples", ".*")])
def test_sizes_that_vary_are_found(kind: str, op: str, tmp_path: Path) -> None:
    suite = type("Suite", (PlatformSuite,), {"target": f"tests.contract.static_shapes:{kind}", "max_sizes": 6})()
    suite.folder = tmp_path
    with pytest.raises(AssertionError, match=f"argument . of op {op} has sizes"):
        suite.test_a_fixed_set_of_sizes_is_met(suite.make(), tmp_path)


ASKED = [
    {"temperature": 0.7, "top_k": 5},
    {"logprobs": 2},
    {"presence_penalty": 1.5},
    {"bad_words_token_ids": [[5, 6], [7]], "min_tokens": 4},
    {"prompt_logprobs": 1},
    {"temperature": 0.9, "min_p": 0.1},
    {},
]


def answers(folder: Path) -> dict[str, list[int]]:
    given = [
        request(f"{place}", prompt, 5 + place, seed=place, **ASKED[place])
        for place, prompt in enumerate(prompts(512, (60, 3, 33, 1, 17, 48, 20)))
    ]
    config = from_flat({**SMALL, "model": str(folder), "num_threads": 1, "max_num_batched_tokens": 40})
    with running(config, Registry.load()) as engine:
        found = {name: tokens_of(outputs) for name, outputs in drain(engine, given).items()}
        return found | mixed_requests(engine, prompts(512, (9, 30, 2, 50, 1)))


def test_whatever_requests_ask_for_tokens_are_those_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path, "LlamaForCausalLM")
    want = answers(tmp_path)
    monkeypatch.setattr(CpuPlatform, "steps", static_shapes.FewSizes.steps)
    assert answers(tmp_path) == want


@pytest.mark.parametrize("count", [1, 3, 8])
def test_masks_that_fill_up_forbid_nothing(count: int) -> None:
    """Rows of a batch that has grammars in some slots, padded to a fixed number of masks, and of rows."""
    device = Device(Ops(), HostStreams(), torch.device("cpu"), shapes=static_shapes.FewShapes())
    sampler = Sampler(device, max_slots=8, vocab_size=40)
    slots = np.arange(count, dtype=np.int32)
    words = np.full((1, 2), 0, np.int32)
    words[0, 0] = 1 << 5
    masks = TokenMasks(slots=slots[-1:], words=words).packed()
    logits = torch.zeros(8, 40)
    logits[:, 39] = 1.0
    sampled = sampler.sample(logits, slots, torch.ones(8, dtype=torch.int32), masks)
    assert sampled.token_ids.tolist() == [39] * (count - 1) + [5] + [39] * (8 - count)
