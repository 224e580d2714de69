"""Engines of tiny pooling models, closed at the end of a module."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from frame import LLM

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 400, "max_model_len": 128}
LENGTHS = (60, 3, 33, 1, 17, 60, 48, 128, 2)


def open_llm(folder: Any, **settings: Any) -> LLM:
    return LLM(str(folder), **{**SETTINGS, "skip_tokenizer_init": True, **settings})


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 7) -> list[dict[str, list[int]]]:
    draw = random.Random(seed)
    return [{"prompt_token_ids": draw.choices(range(3, 512), k=length)} for length in lengths]


def hidden_states(model: Any, prompts: list[dict[str, list[int]]]) -> list[torch.Tensor]:
    """What transformers gives each prompt alone, [tokens, hidden_size]."""
    with torch.inference_mode():
        return [model(torch.tensor([prompt["prompt_token_ids"]])).last_hidden_state[0] for prompt in prompts]


def logits(model: Any, prompts: list[dict[str, list[int]]]) -> torch.Tensor:
    """What transformers scores the classes of each prompt, [prompts, classes]."""
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt["prompt_token_ids"]])).logits for prompt in prompts])


def near(found: Any, wanted: Any, bound: float = 1e-5) -> bool:
    gap = np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)).max()
    assert gap < bound, gap
    return True


@pytest.fixture(scope="module")
def closing():
    """Opens engines that the module closes."""
    opened: list[LLM] = []

    def make(folder: Any, **settings: Any) -> LLM:
        opened.append(open_llm(folder, **settings))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()
