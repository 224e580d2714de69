"""Stands for the CUDA capturer on a CPU: replays with what the host believed when the capture was made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from frame.plugins.platforms.cuda.graphs.capture import CapturedGraph


class FakeCapturer:
    """`sizes` are the bytes that graphs take, in order (the last one goes on); None: the device has none left.

    A replay takes `row_seconds` for each row.
    """

    row_seconds = 0.0

    def __init__(self, *sizes: int | None) -> None:
        self.sizes = list(sizes or (0,))
        self._rows: dict[Callable[[], None], int] = {}
        self.num_captured = self.num_forgotten = self.num_replayed = 0

    def capture(self, forward: Callable[[], Tensor]) -> CapturedGraph:
        forward()
        size = self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]
        if size is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        hidden = torch.zeros_like(forward())
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            hidden.copy_(forward())

        self._rows[replay] = len(hidden)
        return CapturedGraph(replay, hidden, size)

    def seconds(self, replay: Callable[[], None]) -> float:
        """What a replay takes on the device that this stands for."""
        return self._rows[replay] * self.row_seconds

    def forget(self) -> None:
        self.num_forgotten += 1
