"""A thousand mixed requests with aborts leave free blocks, slots and the device's memory as they were."""

from __future__ import annotations

import pytest
import torch

from frame.testing.checkpoints import make_checkpoint
from tests.engine.leaks import check_nothing_is_kept

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_thousand_requests_leave_nothing(family, tmp_path):
    folder = str(make_checkpoint(tmp_path, family))
    settings = {"max_model_len": 128, "max_num_seqs": 64, "num_gpu_blocks_override": 200, "gpu_memory_utilization": 0.1}
    check_nothing_is_kept(folder, 1000, vocab_size=512, longest=60, **settings)
