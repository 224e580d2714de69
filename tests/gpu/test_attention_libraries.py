"""The contract for FlashAttention and cuDNN themselves, where they are installed."""

from __future__ import annotations

import pytest
import torch

from frame.testing import AttentionBackendSuite

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestFlash(AttentionBackendSuite):
    plugin = "flash"
    device_type = "cuda"


class TestCudnn(AttentionBackendSuite):
    plugin = "cudnn"
    device_type = "cuda"
