"""The draw of decode steps whose rows ask for an argmax or a temperature and nothing else, as a platform captures it.

logits → draw → each slot gets its token. All of it reads and writes memory at fixed addresses, so that the host
launches one capture. Batches whose requests ask for more are drawn by the `Sampler`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from ...interfaces.platform_steps import StepShape
from ...ops.step import StepBuffers
from ..device import Device
from .draws import PlainSampled
from .sampler import Sampler
from .shards import Rows

GREEDY, RANDOM = "greedy", "random"


class PlainDraw:
    """Draws for the rows of a decode step, as its buffers hold them; what padding rows draw is not read."""

    def __init__(self, device: Device, rows: Rows, sampler: Sampler, token_ids: Tensor, buffers: StepBuffers) -> None:
        self._device = device
        self._rows = rows
        self._sampler = sampler
        self._token_ids = token_ids
        self._buffers = buffers

    def run(self, shape: StepShape, host_slots: np.ndarray, hidden: Tensor) -> PlainSampled | None:
        """The tokens of the batch's rows, which all sample; None when one of them asks for more."""
        random = self._sampler.draws_plainly(host_slots)
        if random is None:
            return None
        kind = RANDOM if random else GREEDY
        packed = self._device.graphs.run(shape, "draw", partial(self._draw, random, hidden), kind)
        return PlainSampled(packed, len(host_slots))

    def run_dummy(self, shape: StepShape, hidden: Tensor) -> None:
        """Draws after a step of padding, once greedy and once random, so that both can be captured."""
        for random, kind in ((False, GREEDY), (True, RANDOM)):
            self._device.graphs.run(shape, "draw", partial(self._draw, random, hidden), kind)

    def _draw(self, random: bool, hidden: Tensor) -> Tensor:
        """Int32 [2, padded rows]: tokens, and the bits of their logits in float32."""
        ops, rows = self._device.ops, len(hidden)
        lengths = self._buffers.seq_lens[:rows]
        noise = (*self._sampler.plain_parameters(rows), lengths.long()) if random else ()
        token_ids, drawn = self._rows.draw(hidden, *noise)
        ops.advance(self._token_ids, self._buffers.rows[:rows], lengths, token_ids)
        return ops.join_drawn(token_ids, drawn)
