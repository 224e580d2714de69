"""Models with an encoder and a decoder give on a GPU what transformers gives on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from frame import LLM, SamplingParams
from frame.testing.encoder_decoders import continued, make_encoder_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", ["t5", "umt5", "bart", "mbart"])
def test_tokens_equal_those_of_transformers(family, tmp_path):
    """In float32: T5's own attention, which has biases, and what reads the encoder run in plain torch there."""
    folder = make_encoder_decoder(tmp_path, family)
    draw, start = random.Random(7), {"t5": 0, "umt5": 0, "bart": 2, "mbart": 2}[family]
    prompts = [draw.choices(range(3, 512), k=length) for length in (60, 3, 33, 1, 17, 48)]
    expected = [continued(folder, prompt, [start], 12) for prompt in prompts]
    llm = LLM(
        str(folder), platform="cuda", dtype="float32", max_model_len=128, skip_tokenizer_init=True,
        gpu_memory_utilization=0.3,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    for several in ([given[0]], given, given):
        found = llm.generate(several, params, use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in found] == expected[: len(several)]
    llm.close()
