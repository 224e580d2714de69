"""Chooses the layers whose weights are kept in host memory, and takes them off the device as soon as they are made."""

from __future__ import annotations

import logging
import weakref

import torch
from torch import nn

from frame.core.interfaces.platform import Memory, SideQueue
from frame.links.host_memory import host_memory

from .choice import GIB, is_kept, require_gain
from .kept import KeptLayer, layer_bytes, own_parameters, parts_of
from .null import M, NoOffload
from .ring import WeightRing

logger = logging.getLogger("frame.worker")


class WeightOffload(NoOffload):
    """Keeps at most `budget_bytes` of the weights of layers in host memory, of layers spread evenly over the model.

    So the copies of some are made while others compute. `ahead` layers are copied ahead.
    """

    def __init__(self, budget_bytes: int, ahead: int, memory: Memory, queue: SideQueue, device: torch.device) -> None:
        self._budget, self._num_places = budget_bytes, ahead + 1
        self._memory, self._queue, self._device = memory, queue, device
        self._kept: list[KeptLayer] = []
        self._sizes, self._count = list[int](), 0
        self._met: set[int] = set()  # ids of the parameters of all layers
        self._first = torch.empty(0, dtype=torch.uint8, device=device)
        self.kept_bytes = self.saved_bytes = 0

    def layer(self, layer: nn.Module, count: int) -> nn.Module:
        """Keeps the layer's weights if it is its turn."""
        if 0 < self._count == len(self._sizes):
            raise ValueError(
                "cpu_offload_gb: this model has an encoder beside its decoder, and the layers of one alone can be "
                "copied ahead; leave cpu_offload_gb out"
            )
        size = layer_bytes(layer)
        self._count = count
        self._sizes.append(size)
        ids = {id(one) for part in parts_of(layer) for one in own_parameters(part)}
        if self._met & ids:
            raise ValueError(
                "cpu_offload_gb: layers of this model share weights, which would have to be copied once for each; "
                "leave cpu_offload_gb out"
            )
        self._met |= ids
        if len(self._sizes) == 1:
            _require_room(min(self._budget, size * count))
        if is_kept(size, self.kept_bytes, len(self._sizes), count, self._budget):
            _require_room(size)
            self._keep(layer, size)
        return layer

    def _keep(self, layer: nn.Module, size: int) -> None:
        kept = KeptLayer(layer, len(self._kept), self._memory.pinned)
        if len(self._first) < size:
            self._first = torch.empty(size, dtype=torch.uint8, device=self._device)
        kept.lay(self._first)  # until all layers are made; their own memory then serves the next ones
        self._kept.append(kept)
        self.kept_bytes += size

    def finish(self, model: M) -> M:
        """Lays the layers out on the device; raises `ValueError` where so few are kept that nothing would be saved."""
        name = type(model).__name__
        if not self._sizes:
            raise ValueError(
                f"cpu_offload_gb: {name} does not make its layers one by one, so that none can be copied ahead; leave "
                "cpu_offload_gb out"
            )
        require_gain(self._sizes, len(self._kept), self._budget, self._num_places)
        ring = WeightRing(self._kept, self._num_places, self._first, self._queue)
        self.saved_bytes = self.kept_bytes - ring.num_bytes
        ring.watch(model)
        model.weight_ring = ring  # the last part, so that it hears last that weights are loaded
        weakref.finalize(ring, self._queue.close)
        numbers = len(self._kept), len(self._sizes), self.kept_bytes / GIB, self._num_places, ring.num_bytes / GIB
        logger.info(
            "%d of %d layers, %.2f GiB of weights, lie in host memory; the device has %d places for them, %.2f GiB",
            *numbers,
        )
        return model


def _require_room(num_bytes: int) -> None:
    """Raises `ValueError`, one sentence, where this machine has less memory than that now."""
    _, available = host_memory()
    if num_bytes > available:
        raise ValueError(
            f"cpu_offload_gb: {num_bytes / GIB:.1f} GiB of weights are to be kept in host memory, of which "
            f"{available / GIB:.1f} GiB are available: lower it, or end what else uses this machine's memory"
        )
