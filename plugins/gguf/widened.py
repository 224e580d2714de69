"""Tensors of the types that frame holds in no codes: the package gguf gives them their values as they are read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import LazyTensor

from .file import TensorInfo
from .types import BY_LIBRARY, BlockType

logger = logging.getLogger(__name__)

#: Values that are made at once.
_AT_ONCE = 1 << 22


class WidenedTensor(LazyTensor):
    """The float32 values [..., columns] of a tensor of blocks uint8 [..., blocks, bytes of a block]."""

    def __init__(self, blocks: LazyTensor, name: str, kind: BlockType) -> None:
        self._blocks, self._kind = blocks, kind
        self.name, self.dtype = name, torch.float32
        self.shape = (*blocks.shape[:-2], blocks.shape[-2] * kind.values)

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        axes, values = len(self.shape), self._kind.values
        start, stop, _ = index[axes - 1].indices(self.shape[-1]) if len(index) == axes else (0, self.shape[-1], 1)
        first, last = start // values, -(-stop // values)
        whole = (*index[: axes - 1], *(slice(None),) * (axes - 1 - len(index)), slice(first, last))
        blocks = self._blocks.read(whole)
        out = torch.empty((*blocks.shape[:-2], stop - start), dtype=torch.float32)
        count = prod(blocks.shape[:-2])
        rows = blocks.reshape(count, (last - first) * self._kind.num_bytes).numpy()
        into = out.view(count, stop - start)
        step = max(1, _AT_ONCE // max(1, (last - first) * values))
        for row in range(0, count, step):
            some = dequantize(rows[row : row + step], self._kind.name)
            into[row : row + step] = torch.from_numpy(some)[:, start - first * values : stop - first * values]
        return out


def dequantize(rows: np.ndarray, kind: str) -> np.ndarray:
    """float32 [rows, columns] of uint8 [rows, bytes]; raises `ValueError` where the package does not know the type."""
    try:
        import gguf

        with np.errstate(all="ignore"):  # scales of a damaged file
            return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    except (ImportError, AttributeError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"the package gguf that is installed does not read {kind} ({error}): "
            "pip install --upgrade 'frame-llm[gguf]'"
        ) from None


def tell(path: Path, tensors: Iterable[TensorInfo]) -> None:
    """Logs which of the tensors of a model are given their values as they load, and what that takes."""
    found = [info for info in tensors if info.kind.name in BY_LIBRARY]
    if not found:
        return
    counts = Counter(info.kind.name for info in found)
    kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(counts.items()))
    values, stored = sum(prod(info.shape) for info in found), sum(info.num_bytes for info in found)
    _log(f"{path}: {len(found)} tensors ({kinds}) are dequantised as they load, {stored / 1e9:.2f} GB of the file to "
         f"{2 * values / 1e9:.2f} GB in types of 16 bits")  # fmt: skip


@cache
def _log(text: str) -> None:
    """Logs a line once: a start asks for the tensors several times."""
    logger.info("%s", text)
