"""What the capturer of pieces leaves behind where the driver gives a capture up. The device is made up."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from frame.plugins.platforms.cuda.graphs import capture as cuda_capturer
from frame.plugins.platforms.cuda.graphs.capture import Capturer
from frame.plugins.platforms.cuda.graphs.piecewise_capture import PieceCapturer


class Driver:
    """Ends graphs with `errors`, in order, and notes what is asked of the allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[Exception | None] = []
        self.done: list[tuple[str, int, object]] = []
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "current_stream": lambda device: stream, "Stream": lambda device: stream, "stream": nullcontext,
            "CUDAGraph": lambda: self, "graph_pool_handle": object,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("end", "release"):
            asked = {"end": "_cuda_endAllocateToPool", "release": "_cuda_releasePool"}[name]
            note = lambda index, pool, name=name: self.done.append((name, index, pool))  # noqa: E731
            monkeypatch.setattr(torch._C, asked, note, raising=False)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.pool = pool

    def capture_end(self) -> None:
        if error := self.errors.pop(0):
            raise error

    def replay(self) -> None:
        """Nothing."""


def test_a_pool_is_closed_where_the_driver_gives_a_capture_up(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    capturer = PieceCapturer(torch.device("cuda", 1))
    invalid = RuntimeError("operation failed due to a previous error during capture")

    def record(error: Exception | None = None) -> None:
        with capturer.capture():
            capturer.begin()
            if error:
                raise error
            capturer.end()

    driver.errors = [None, None]
    record()
    with pytest.raises(ValueError, match="wrong"):
        record(ValueError("wrong"))
    assert not driver.done, "a capture that ends as it should needs nothing"
    shared = driver.pool
    for error in (None, ValueError("wrong")):
        driver.errors = [invalid]
        with pytest.raises(type(error or invalid)):
            record(error)
        assert driver.done == [("end", 1, shared), ("release", 1, shared)]
        driver.done.clear()
    capturer.forget()
    driver.errors = [None]
    record()
    assert driver.pool is not shared


@pytest.mark.parametrize("error", [None, ValueError("wrong")])
def test_a_decode_that_the_driver_gives_up_leaves_as_little(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch)
    for name in ("synchronize", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda device: (0, 0))
    capturer, invalid = Capturer(torch.device("cuda", 1)), RuntimeError("previous error during capture")
    calls = list[int]()

    def forward() -> torch.Tensor:
        calls.append(1)
        if error and len(calls) == 2:  # while it is captured
            raise error
        return torch.zeros(1)

    driver.errors = [invalid]
    with pytest.raises(type(error or invalid)):
        capturer.capture(forward)
    given_up = driver.pool
    assert driver.done == [("end", 1, given_up), ("release", 1, given_up)]
    assert cuda_capturer._GIVEN_UP[-1] is driver, "torch asks it for good"
    driver.errors = [None]
    capturer.capture(forward)
    assert driver.pool is not given_up
