"""Chooses the layers whose weights are kept in host memory, and takes them off the device as soon as they are made."""

from __future__ import annotations

import logging
import weakref

import torch
from torch import nn

from frame.core.interfaces.platform import Memory, SideQueue
from frame.links.host_memory import host_memory

from .kept import KeptLayer, layer_bytes, own_parameters, parts_of
from .null import M, NoOffload
from .ring import WeightRing

logger = logging.getLogger("frame.worker")

GIB = 1 << 30


class WeightOffload(NoOffload):
    """Keeps at most `budget_bytes` of the weights of layers in host memory, of layers spread evenly over the model.

    So the copies of some are made while others compute. `ahead` layers are copied ahead.
    """

    def __init__(self, budget_bytes: int, ahead: int, memory: Memory, queue: SideQueue, device: torch.device) -> None:
        self._budget, self._num_places = budget_bytes, ahead + 1
        self._memory, self._queue, self._device = memory, queue, device
        self._kept: list[KeptLayer] = []
        self._num_made = self._count = self._largest = 0
        self._met: set[int] = set()  # ids of the parameters of all layers
        self._first = torch.empty(0, dtype=torch.uint8, device=device)
        self.kept_bytes = self.saved_bytes = 0

    def layer(self, layer: nn.Module, count: int) -> nn.Module:
        """Keeps the layer's weights if it is its turn: after n layers at most n / `count` of the budget is used."""
        if 0 < self._count == self._num_made:
            raise ValueError(
                "cpu_offload_gb: this model has an encoder beside its decoder, and the layers of one alone can be "
                "copied ahead; leave cpu_offload_gb out"
            )
        self._count, self._num_made = count, self._num_made + 1
        size = layer_bytes(layer)
        self._largest = max(self._largest, size)
        ids = {id(one) for part in parts_of(layer) for one in own_parameters(part)}
        if self._met & ids:
            raise ValueError(
                "cpu_offload_gb: layers of this model share weights, which would have to be copied once for each; "
                "leave cpu_offload_gb out"
            )
        self._met |= ids
        if self._num_made == 1:
            _require_room(min(self._budget, size * count))
        if size and self.kept_bytes + size <= self._budget * self._num_made // count:
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
        if not self._num_made:
            raise ValueError(
                f"cpu_offload_gb: {name} does not make its layers one by one, so that none can be copied ahead; leave "
                "cpu_offload_gb out"
            )
        places = self._num_places
        if len(self._kept) <= places:
            more = f"give at least {self._largest * (places + 1) / GIB:.2g} GiB, "
            raise ValueError(
                f"cpu_offload_gb {self._budget / GIB:g} keeps {len(self._kept)} of {self._num_made} layers of {name} "
                f"in host memory, and the device holds {places} of them at a time: nothing would be saved; "
                f"{more if places < self._num_made else ''}lower cpu_offload_ahead, or leave cpu_offload_gb out"
            )
        ring = WeightRing(self._kept, places, self._first, self._queue)
        self.saved_bytes = self.kept_bytes - ring.num_bytes
        ring.watch(model)
        model.weight_ring = ring  # the last part, so that it hears last that weights are loaded
        weakref.finalize(ring, self._queue.close)
        logger.info(
            "%d of %d layers, %.2f GiB of weights, are kept in host memory; %d of them lie on the device at a time, in "
            "%.2f GiB", len(self._kept), self._num_made, self.kept_bytes / GIB, places, ring.num_bytes / GIB,
        )  # fmt: skip
        return model


def _require_room(num_bytes: int) -> None:
    """Raises `ValueError`, one sentence, where this machine has less memory than that now."""
    _, available = host_memory()
    if num_bytes > available:
        raise ValueError(
            f"cpu_offload_gb: {num_bytes / GIB:.1f} GiB of weights are to be kept in host memory, of which "
            f"{available / GIB:.1f} GiB are available: lower it, or end what else uses this machine's memory"
        )
