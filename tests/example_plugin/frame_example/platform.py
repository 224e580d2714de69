"""A platform in one file: the CPU through torch, with one op of its own and steps padded to a few sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import (
    AnyShape,
    HostCopy,
    Memory,
    MemorySnapshot,
    Platform,
    PlatformSpec,
    StepPlan,
    Steps,
    StepShape,
    Streams,
)
from frame.ops import Ops

CACHE_BYTES = 64 << 20


# --8<-- [start:ops]
class ExampleOps(Ops):
    """What is not overridden here is frame's reference."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight + offset, eps)


# --8<-- [end:ops]
# --8<-- [start:platform]
class ExampleCpu(Platform):
    """Nothing of the CPU has to be claimed, so every method is a line."""

    device_type = "cpu"

    @classmethod
    def probe(cls) -> str | None:
        return None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def supports(self, spec: PlatformSpec) -> str | None:
        if spec.world_size > 1:
            return (
                f"{spec.world_size} ranks (tensor_parallel_size × pipeline_parallel_size) asked for, one is supported"
            )
        if spec.deterministic:
            return "deterministic is not supported"
        return None if spec.dtype == torch.float32 else f"dtype {spec.dtype} is not float32"

    def auto_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        return torch.float32

    @cached_property
    def _ops(self) -> ExampleOps:
        return ExampleOps()

    def ops(self) -> Ops:
        return self._ops

    def streams(self) -> Streams:
        return HostStreams()

    def memory(self) -> Memory:
        return FixedMemory()

    def steps(self) -> Steps:
        return Steps(shapes=PowersOfTwo())


# --8<-- [end:platform]
# --8<-- [start:device]
class Arrived(HostCopy):
    """A copy that is there already. A device would record an event and wait for it."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def ready(self) -> bool:
        return True

    def wait(self) -> dict[str, np.ndarray]:
        return self._arrays


class HostStreams(Streams):
    """Work is done when a call returns, so there is nothing to wait for."""

    def stage(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy())

    def copy_out(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        return Arrived({name: tensor.numpy().copy() for name, tensor in tensors.items()})

    def synchronize(self) -> None:
        return


class FixedMemory(Memory):
    """Pretends to be a device of a gibibyte, and keeps its cache small."""

    def snapshot(self) -> MemorySnapshot:
        return MemorySnapshot(total=1 << 30, free=1 << 29, held=0, peak=0)

    def kv_bytes(self, start: MemorySnapshot, utilization: float, weights_bytes: int, full_bytes: int) -> int:
        return max(0, min(CACHE_BYTES, full_bytes, int(start.total * utilization) - weights_bytes))


# --8<-- [end:device]
# --8<-- [start:shapes]
class PowersOfTwo(AnyShape):
    """Pads tokens and rows of every step to powers of two."""

    def choose(self, plan: StepPlan) -> StepShape:
        exact = super().choose(plan)
        tokens, rows = _power_of_two(exact.padded_tokens), _power_of_two(exact.padded_rows)
        return replace(exact, padded_tokens=tokens, padded_rows=rows)


# --8<-- [end:shapes]
def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def describe(worker: Any) -> str:
    """The class of a worker's platform; for `LLM.collective_rpc`."""
    return type(worker.started.opened.platform).__name__
