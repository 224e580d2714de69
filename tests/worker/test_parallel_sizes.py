"""What no platform here can do is refused, never ignored."""

from __future__ import annotations

import pytest
import torch

from frame import LLM
from frame.core.interfaces.platform import Platform, PlatformSpec
from frame.core.plugin_host.offers import PluginError
from frame.plugins.platforms.cpu import CpuPlatform
from frame.plugins.platforms.cuda.platform import CudaPlatform


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("executor", ["inline", "process"])
def test_a_second_device_is_refused_by_the_settings_name(name: str, executor: str) -> None:
    with pytest.raises(PluginError) as caught:
        LLM(executor=executor, **{name: 2})
    assert str(caught.value) == (
        f"{name} 2: this version of frame runs a model on one device; set {name} to 1, and choose a model that fits "
        "there (`frame doctor MODEL` predicts whether it does)"
    )


@pytest.mark.parametrize("kind", [CpuPlatform, CudaPlatform])
def test_more_ranks_than_the_platform_serves_are_refused(kind: type[Platform]) -> None:
    platform = object.__new__(kind)
    reason = platform.supports(PlatformSpec(torch.float32, world_size=2))
    assert reason == "2 ranks (tensor_parallel_size × pipeline_parallel_size) asked for, one is supported"
