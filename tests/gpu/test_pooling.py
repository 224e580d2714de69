"""Pooling on a GPU gives what it gives on the CPU."""

from __future__ import annotations

import pytest
import torch

from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from tests.pooling.conftest import make_prompts, near, open_llm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", ["bert", "xlm-roberta-reranker", "qwen3", "qwen3-classes"])
def test_rows_equal_those_of_the_cpu(family, tmp_path):
    folder = make_pooling_checkpoint(tmp_path, family)
    found = []
    for platform in ("cpu", "cuda"):
        llm = open_llm(folder, platform=platform, gpu_memory_utilization=0.3)
        outputs = llm.encode(make_prompts(), use_tqdm=False)
        found.append([output.outputs.data.tolist() for output in outputs])
        llm.close()
    assert near(found[1], found[0], 2e-3)
