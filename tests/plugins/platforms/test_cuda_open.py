"""Opening the CUDA platform looks for what an earlier engine left only where there may be something."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("triton")

from frame.core.config.flat import from_flat
from frame.plugins.platforms.cuda import platform as cuda
from frame.plugins.platforms.cuda.graphs.capture import Capturer
from frame.plugins.platforms.cuda.platform import CudaPlatform
from frame.testing import make_setup


@pytest.mark.parametrize(("reserved", "left"), [(0, []), (1 << 20, ["collect", "empty_cache"])])
def test_an_earlier_engine_is_swept_up(reserved: int, left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for module, name in ((gc, "collect"), (torch.cuda, "empty_cache"), (torch.cuda, "reset_peak_memory_stats")):
        monkeypatch.setattr(module, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    CudaPlatform(make_setup("platform", config=from_flat({})))
    assert done == [*left, "reset_peak_memory_stats"]


def test_the_kernels_of_attention_are_where_a_start_looks_for_them() -> None:
    """It goes on without those that cannot be imported, so a wrong name would not show."""
    assert all(find_spec(f"frame.kernels.{name}") for name in cuda._ATTENTION)


def test_graphs_that_were_tried_do_not_count_in_the_peak_of_the_largest_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have a budget of their own, and what steps with prompts take is worked out from that peak."""
    done: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: done.append(name))
    Capturer(torch.device("cuda")).forget()
    assert done == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
