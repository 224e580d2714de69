"""What no platform here can do is refused, never ignored."""

from __future__ import annotations

import pytest
import torch

from frame import LLM
from frame.core.interfaces.platform import Platform, PlatformSpec
from frame.core.plugin_host.offers import PluginError
from frame.plugins.executors.inline import InlineExecutor
from frame.plugins.platforms.cpu import CpuPlatform
from frame.plugins.platforms.cuda.platform import CudaPlatform


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_more_workers_than_the_executor_runs_are_refused_by_the_settings_name(name: str) -> None:
    with pytest.raises(
        PluginError, match=f"{name} 2 .*need 2 workers, which executor 'inline' cannot run: it runs one"
    ):
        LLM(**{name: 2})


def test_two_workers_are_refused_even_where_an_executor_could_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InlineExecutor, "supports", classmethod(lambda cls, mesh: None))
    with pytest.raises(PluginError, match="need 2 workers, but a model is not divided among workers yet"):
        LLM(tensor_parallel_size=2)


@pytest.mark.parametrize("kind", [CpuPlatform, CudaPlatform])
def test_more_ranks_than_the_platform_serves_are_refused(kind: type[Platform]) -> None:
    platform = object.__new__(kind)
    reason = platform.supports(PlatformSpec(torch.float32, world_size=2))
    assert reason == "2 ranks (tensor_parallel_size × pipeline_parallel_size) asked for, one is supported"
