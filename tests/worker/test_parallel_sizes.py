"""More workers than an executor runs, or than there are devices, are refused in one sentence."""

from __future__ import annotations

import re

import pytest
import torch

from frame import LLM
from frame.core.plugin_host.offers import PluginError
from frame.interfaces import Placement
from frame.plugins.platforms.cuda.platform import CudaPlatform
from frame.testing import make_setup


def test_an_executor_that_runs_one_worker_is_refused() -> None:
    with pytest.raises(PluginError, match=re.escape("executor 'inline' cannot be used here: it runs one worker")):
        LLM(executor="inline", tensor_parallel_size=2)


def test_a_worker_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    setup = make_setup("platform", placement=Placement(rank=1, local_rank=1))
    with pytest.raises(ValueError, match="no CUDA device 1 for this worker: torch sees 1; lower tensor_parallel_size"):
        CudaPlatform(setup)
