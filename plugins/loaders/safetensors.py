"""Reads safetensors checkpoints: one file, or several with an index. Files are mapped, tensors read when asked for.

Pickle checkpoints (.bin, .pt) are refused: unpickling runs code that the file brings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from frame.interfaces import LazyTensor, LoaderSetup, WeightLoader

from .pickles import PICKLES, refusal
from .strategies import Strategy, make_strategy

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsTensor(LazyTensor):
    """A tensor of an open file, read as a strategy says."""

    def __init__(self, file: Any, path: Path, name: str, strategy: Strategy) -> None:
        self._file, self._path, self.name, self._strategy = file, path, name, strategy
        view = file.get_slice(name)
        self.shape = tuple(view.get_shape())
        kind = view.get_dtype()
        if kind not in _DTYPES:
            raise ValueError(f"{path}: tensor {name} has type {kind}; frame reads: {', '.join(_DTYPES)}")
        self.dtype = _DTYPES[kind]

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        try:
            if (tensors := self._strategy.tensors(self._path, self.shape, index)) is not None:
                return tensors[self.name][index] if index else tensors[self.name]
            if not index:
                whole: Tensor = self._file.get_tensor(self.name)
                return whole
            piece: Tensor = self._file.get_slice(self.name)[index]
            return piece
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"cannot read tensor {self.name} of {self._path}: {error}") from None


class SafetensorsLoader(WeightLoader):
    """The checkpoint's files in the order of their names, each tensor once and where it lies in the file."""

    def __init__(self, setup: LoaderSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._strategy = make_strategy(setup.strategy)

    def supports(self, folder: Path) -> str | None:
        if (folder / _SINGLE).is_file() or (folder / _INDEX).is_file() or any(folder.glob("*.safetensors")):
            return None
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            return refusal(folder, pickles[0])
        return "there is no .safetensors file"

    def tensors(self) -> Iterator[LazyTensor]:
        reason = self.supports(self.folder)
        if reason is not None:
            raise ValueError(f"cannot read {self.folder}: {reason}")
        files = self._files()
        self._strategy.expect([path for path, _ in files])
        for path, wanted in files:
            yield from self.read_file(path, wanted, self._strategy)

    def _files(self) -> list[tuple[Path, set[str] | None]]:
        """(file, the names to take from it or None for all)."""
        index = self.folder / _INDEX
        if index.is_file():
            by_file: dict[str, set[str]] = {}
            for name, file in self._read_index(index).items():
                by_file.setdefault(file, set()).add(name)
            return [(self._inside(file), by_file[file]) for file in sorted(by_file)]
        single = self.folder / _SINGLE
        if single.is_file():
            return [(single, None)]
        found = sorted(self.folder.glob("*.safetensors"))  # without another copy in Mistral's form
        return [(path, None) for path in found if not path.name.startswith("consolidated")]

    def _inside(self, file: str) -> Path:
        path = self.folder / file
        if Path(file).name != file:
            raise ValueError(f"{self.folder / _INDEX} names {file!r}, which is not a file name")
        if not path.is_file():
            raise ValueError(f"{self.folder / _INDEX} names {file}, which is missing")
        return path

    @staticmethod
    def _read_index(index: Path) -> dict[str, str]:
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from None
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise ValueError(f"{index} is not a safetensors index: weight_map must map names to files")
        return names

    @staticmethod
    def read_file(path: Path, wanted: set[str] | None = None, strategy: Strategy | None = None) -> Iterator[LazyTensor]:
        """The tensors of one file, those `wanted` or all. Raises `ValueError` naming a file that is damaged."""
        try:
            path.open("rb").close()  # `safe_open` would not tell why it cannot
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        try:
            file = safe_open(str(path), framework="pt")
            names = list(file.offset_keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is corrupt or truncated: {error}") from None
        if wanted is not None:
            absent = sorted(wanted.difference(names))
            if absent:
                raise ValueError(f"{path} lacks {len(absent)} of the tensors that the index puts there: {absent[0]}")
        for name in names:
            if wanted is None or name in wanted:
                yield SafetensorsTensor(file, path, name, strategy or Strategy())
