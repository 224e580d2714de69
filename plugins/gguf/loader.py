"""Reads the weights of GGUF files: tensors by the names that layers know them by, in the blocks of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import LazyTensor, WeightLoader

from ..loaders.rope_rows import half_split
from .choice import files_in
from .file import TensorInfo, read_files
from .names import TABLES, Change, place_of
from .settings import Metadata, model_type_of
from .types import BY_LIBRARY
from .widened import WidenedTensor, tell

_PLAIN = {"F32": (np.float32, torch.float32), "F16": (np.float16, torch.float16), "BF16": (np.int16, torch.bfloat16)}


class GgufTensor(LazyTensor):
    """A tensor of a file, or one expert's part of it, whose bytes are read when asked for.

    One in blocks of codes is uint8 [rows, blocks, bytes of a block]. `heads` are those whose rows were permuted.
    """

    def __init__(self, path: Path, info: TensorInfo, name: str, change: Change, heads: int, expert: int | None) -> None:
        self._path, self._change, self._heads = path, change, heads
        shape, kind = info.shape, info.kind
        self._start, self._num_bytes = info.start, info.num_bytes
        if expert is not None:
            self._num_bytes //= shape[0]
            self._start += expert * self._num_bytes
            shape = shape[1:]
        self._stored, self.dtype = _PLAIN.get(kind.name, (np.uint8, torch.uint8))
        packed = kind.name not in _PLAIN
        self.name = f"{name}.{kind.name.lower()}" if packed else name
        self.shape = (*shape[:-1], shape[-1] // kind.values, kind.num_bytes) if packed else shape

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        mapped = np.memmap(self._path, self._stored, "r", self._start, self.shape)
        if self._heads:
            rows = half_split(self.shape[0], self._heads)[index[0] if index else slice(None)]
            piece: Any = np.ascontiguousarray(mapped[rows][(slice(None), *index[1:])])
        else:
            piece = np.array(mapped[index])
        tensor = torch.from_numpy(piece)
        tensor = tensor.view(self.dtype) if tensor.dtype != self.dtype else tensor
        return tensor - 1 if self._change == "minus one" else tensor


class GgufLoader(WeightLoader):
    """The tensors of the one model that the folder has in GGUF files."""

    def supports(self, folder: Path) -> str | None:
        try:
            files = files_in(folder)
        except ValueError as error:
            return str(error)
        return None if files else "there is no .gguf file"

    def tensors(self) -> Iterator[LazyTensor]:
        if reason := self.supports(self.folder):
            raise ValueError(f"cannot read {self.folder}: {reason}")
        files = files_in(self.folder)
        metadata, tensors = read_files(files)
        try:
            yield from self._named(files[0], Metadata(metadata), tensors)
        except ValueError as error:
            raise ValueError(f"{files[0]}: {error}") from None

    @staticmethod
    def _named(first: Path, meta: Metadata, tensors: list[tuple[Path, TensorInfo]]) -> Iterator[LazyTensor]:
        table = TABLES[model_type_of(meta)]
        tell(first, (info for _, info in tensors if place_of(info.name, table) is not None))
        heads = meta.size("attention.head_count")
        turned: Mapping[Change, int] = {"queries": heads, "keys": meta.get("attention.head_count_kv", heads)}
        for path, info in tensors:
            place = place_of(info.name, table)
            if place is None:
                continue
            found = turned.get(place.change, 0)
            for expert in range(info.shape[0]) if place.stacked else (None,):
                base = place.name if expert is None else place.name.format(expert)
                whole = f"{base}.{place.end}"
                name = whole if info.kind.name in _PLAIN else base
                tensor = GgufTensor(path, _with_rows(info, base), name, place.change, found, expert)
                yield WidenedTensor(tensor, whole, info.kind) if info.kind.name in BY_LIBRARY else tensor


def _with_rows(info: TensorInfo, name: str) -> TensorInfo:
    """A vector of the file that is the one row of a matrix."""
    is_row = name.endswith("shared_expert_gate") and len(info.shape) == 1
    return TensorInfo(info.name, (1, *info.shape), info.kind, info.start, info.num_bytes) if is_row else info
