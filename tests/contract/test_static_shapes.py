"""An engine on a platform that takes a few sizes only: it meets no others, and its tokens are those of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.interfaces.step import TokenMasks
from frame.core.ops import Ops
from frame.core.plugin_host.registry import Registry
from frame.core.worker.device import Device
from frame.core.worker.sample.sampler import Sampler
from frame.interfaces import Length
from frame.plugins.platforms.cpu import CpuPlatform, HostStreams
from frame.testing import PlatformSuite
from frame.testing.checkpoints import write_tokenizer
from frame.testing.engines import SMALL, drain, every_kind, mixed_requests, prompts, running, tokens_of
from frame.testing.tiny import write_tiny
from tests.contract import static_shapes


class TestFewSizes(PlatformSuite):
    target = "tests.contract.static_shapes:FewSizes"
    max_sizes = 6


def suite_of(kind: str, folder: Path) -> Any:
    suite = type("Suite", (PlatformSuite,), {"target": f"tests.contract.static_shapes:{kind}", "max_sizes": 6})()
    suite.folder = folder
    return suite


def test_numbers_of_samples_that_vary_are_found(tmp_path: Path) -> None:
    suite = suite_of("UnpaddedSamples", tmp_path)
    with pytest.raises(AssertionError, match=r"argument . \(axis .\) of op .* has sizes"):
        suite.test_a_fixed_set_of_sizes_is_met(suite.make(), tmp_path)


@pytest.mark.some(2)
@pytest.mark.parametrize("what", get_args(Length))
def test_lengths_that_vary_are_found(what: Length, tmp_path: Path) -> None:
    """Requests of every kind meet each length that a platform may pad."""
    static_shapes.Unpadded.forget(what)
    suite = suite_of("Unpadded", tmp_path)
    with pytest.raises(AssertionError, match=r"argument . \(axis .\) of op .* has sizes"):
        suite.test_whatever_is_asked_for_meets_a_fixed_set_of_sizes(suite.make(), tmp_path, "ngram")


def answers(folder: Path, settings: dict[str, Any]) -> dict[str, list[int]]:
    given = [(prompt[:5] * 20)[: len(prompt)] for prompt in prompts(400, (60, 3, 33, 1, 17, 48, 20))]
    config = from_flat({**SMALL, "model": str(folder), "num_threads": 1, "max_num_batched_tokens": 40, **settings})
    with running(config, Registry.load()) as engine:
        found = {name: tokens_of(outputs) for name, outputs in drain(engine, every_kind(given, 3)).items()}
        return found | mixed_requests(engine, prompts(512, (9, 30, 2, 50, 1)))


DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}


@pytest.mark.parametrize("settings", [{}, DRAFTS], ids=["one token a step", "drafts"])
def test_whatever_requests_ask_for_tokens_are_those_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    write_tiny(tmp_path, "LlamaForCausalLM")
    write_tokenizer(tmp_path)
    want = answers(tmp_path, settings)
    monkeypatch.setattr(CpuPlatform, "steps", static_shapes.FewSizes.steps)
    assert answers(tmp_path, settings) == want


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
