"""Every family's logits equal transformers', in one prefill and in prefill plus decode steps."""

import random

import pytest
import torch

from frame.testing.checkpoints import make_checkpoint
from frame.testing.families import FAMILIES
from tests.models.dense import make_model, run


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path, family)
    ids = random.Random(0).choices(range(3, 512), k=60)
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    for chunks in ([60], [33, 20, 1, 1, 1, 1, 1, 1, 1]):
        logits = run(make_model(folder), ids, chunks)
        assert logits.dtype == torch.float32
        assert logits.shape == reference.shape
        assert (logits - reference).abs().max() < 2e-4 * reference.abs().max()
