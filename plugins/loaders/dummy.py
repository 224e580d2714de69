"""Random weights for a checkpoint that has none: benchmarks, and models whose weights arrive later."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from frame.interfaces import LazyTensor, WeightLoader


class DummyLoader(WeightLoader):
    """Small random values, made on the parameter's device; equal for an equal seed and parameter name."""

    def supports(self, folder: Path) -> str | None:
        del folder
        return None if self.setup.named else "random weights are made only when asked for by name"

    def tensors(self) -> Iterator[LazyTensor]:
        return iter(())

    @property
    def complete(self) -> bool:
        return False

    def fill(self, name: str, parameter: Tensor) -> None:
        """Matrices around 0, norm weights around 1, biases small: activations keep their scale through the layers."""
        # one hash of both: torch's CPU generator takes 32 bits of its seed
        seed = zlib.crc32(f"{self.setup.seed} {name}".encode())
        generator = torch.Generator(device=parameter.device).manual_seed(seed)
        if parameter.dim() > 1:
            parameter.uniform_(-0.05, 0.05, generator=generator)
        elif name.endswith("bias"):
            parameter.uniform_(-0.01, 0.01, generator=generator)
        else:
            parameter.uniform_(0.9, 1.1, generator=generator)
