"""The adapters of a worker: read in threads, kept in host memory, and which slot each row and token of a step has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..interfaces.adapters import AdapterLoad, Adapters, ReadAdapter
from ..interfaces.step import NewRequest
from .device import Device
from .step.request_state import StagedRows


class NoAdapterSlots:
    """A worker without adapters. The null object."""

    def read(self, key: int, path: str) -> str | None:
        """The digest of an adapter, which a thread begins to read with the first call; None while it does.

        Raises `ValueError` for one that does not fit.
        """
        raise ValueError("adapters are off: start with enable_lora")

    def drop(self, key: int) -> None:
        """Gives the host memory of an adapter back; unknown numbers are ignored."""

    def close(self) -> None:
        """Ends the threads."""

    def begin(self, loads: Sequence[AdapterLoad]) -> None:
        """Called first in each step: loads what it asks for."""

    def add(self, request: NewRequest) -> None:
        """Notes the adapter of a request that enters a slot."""

    def apply_staged_writes(self) -> None:
        """Sends what changed to the device."""

    def choose(self, adapted: bool) -> None:
        """Says whether the step that follows has adapters."""

    def fill(self, rows: Tensor, query_start: Tensor, num_tokens: int) -> None:
        """Gives each token its row's adapter; part of the forward pass."""

    def memory(self) -> Mapping[str, Tensor]:
        """The tensors that captured steps read."""
        return {}


class AdapterSlots(NoAdapterSlots):
    """`table` int32 [slots of the batch, 1] has the adapter of each request, 0 for none."""

    def __init__(self, adapters: Adapters, device: Device, max_slots: int) -> None:
        self._adapters, self._device = adapters, device
        self._threads = ThreadPoolExecutor(1, "frame-adapters")
        self._found: dict[int, Future[ReadAdapter]] = {}  # by the number that the engine gave it
        self._table = device.zeros(max_slots, 1, dtype=torch.int32)
        self._staged = StagedRows(device, self._table)

    def read(self, key: int, path: str) -> str | None:
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._threads.submit(self._adapters.read, Path(path))
        return found.result().digest if found.done() else None

    def drop(self, key: int) -> None:
        found = self._found.pop(key, None)
        if found is not None:
            found.cancel()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def begin(self, loads: Sequence[AdapterLoad]) -> None:
        self._staged.begin()
        for one in loads:
            self._adapters.load(one.slot, self._found[one.key].result())

    def add(self, request: NewRequest) -> None:
        self._staged.replace(request.slot, np.array([request.adapter], np.int32))

    def apply_staged_writes(self) -> None:
        self._staged.apply()

    def choose(self, adapted: bool) -> None:
        self._adapters.active = adapted

    def fill(self, rows: Tensor, query_start: Tensor, num_tokens: int) -> None:
        if not self._adapters.active:
            return
        self._device.ops.spread_slots(self._adapters.slots, self._table[:, 0], rows, query_start, num_tokens)
        self._adapters.prepare(num_tokens)

    def memory(self) -> Mapping[str, Tensor]:
        return {"adapters of slots": self._table, "adapters of tokens": self._adapters.slots}
