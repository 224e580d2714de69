"""`Device`: the ops, streams, shapes and graphs of a worker's platform, as all parts of the worker use them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..interfaces.platform import Streams
from ..interfaces.platform_steps import (
    AnyShape,
    EagerGraphs,
    Graphs,
    Length,
    Shapes,
)
from ..ops import Ops


@dataclass
class Device:
    """One worker's device. `deterministic`: every step is, not only those that hold a deterministic request."""

    ops: Ops
    streams: Streams
    device: torch.device
    shapes: Shapes = field(default_factory=AnyShape)
    graphs: Graphs = field(default_factory=EagerGraphs)
    deterministic: bool = False

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """New memory of zeros on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def pad(self, what: Length, count: int, most: int) -> int:
        """The number of `what` that the platform computes in place of `count`, at most `most`; 0 stays 0."""
        return min(self.shapes.pad(what, count), most) if count else 0

    def padded(self, what: Length, array: np.ndarray, filling: float | None = None, axis: int = -1) -> np.ndarray:
        """`array` with `axis` as long as the platform takes it for so many of `what`.

        The new entries hold `filling`; without one they repeat the last entry.
        """
        count = array.shape[axis]
        missing = self.shapes.pad(what, count) - count if count else 0
        if not missing:
            return array
        more = np.repeat(array.take([-1], axis), missing, axis)
        if filling is not None:
            more.fill(filling)
        return np.concatenate((array, more), axis)

    def stage_padded(self, what: Length, array: np.ndarray, filling: float | None = None, axis: int = -1) -> Tensor:
        """What `padded` gives, on the device."""
        return self.streams.stage(self.padded(what, array, filling, axis))
