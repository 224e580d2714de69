"""Reads the header of a GGUF file: its metadata, and what tensors lie where. Imports no torch."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .types import BY_LIBRARY, OTHERS, TYPES, BlockType

_STRING, _ARRAY = 8, 9
#: numpy's names of the types of metadata, by number; 7 is a truth value.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_VERSIONS = (2, 3)
_MOST_AXES = 4
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: its shape, outermost axis first, and the bytes of the file that hold it."""

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    start: int
    num_bytes: int


class _Cursor:
    """Reads values one after the other. Raises `EOFError` where the file ends first."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data, self._size, self.at = data, len(data), 0

    def take(self, count: int) -> int:
        """Skips `count` bytes and says where they begin."""
        start, self.at = self.at, self.at + count
        if count < 0 or self.at > self._size:
            raise EOFError
        return start

    def number(self, kind: str) -> Any:
        """A number of the type that `struct` calls `kind`."""
        start = self.take(struct.calcsize(f"<{kind}"))
        return struct.unpack_from(f"<{kind}", self._data, start)[0]

    def text(self) -> str:
        """A string."""
        start = self.take(self.number("Q"))
        return self._data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A value of metadata of the type with this number."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in (_STRING, _ARRAY):
                if count > self._size:
                    raise EOFError
                return [self.value(inner) for _ in range(count)]
            return self._numbers(inner, count).tolist()
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"its metadata has a value of the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        start = self.take(dtype.itemsize * count)
        return np.frombuffer(self._data, dtype, count, start)


class GgufFile:
    """The header of one file. Raises `ValueError`, one sentence, for one that is damaged or of an unknown kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: list[TensorInfo] = []
        size = path.stat().st_size
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read(_Cursor(data), size)
        except EOFError:
            raise ValueError(f"{path} is truncated: its {size} bytes end within the header") from None
        except (ValueError, struct.error, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as GGUF: {error}") from None

    def _read(self, cursor: _Cursor, size: int) -> None:
        magic = cursor.number("4s")
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r} in place of GGUF")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version}; frame reads little-endian files of versions 2 and 3")
        num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
        if num_tensors > size or num_values > size:
            raise EOFError
        for _ in range(num_values):
            name = cursor.text()
            self.metadata[name] = cursor.value(cursor.number("I"))
        found = [_tensor(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment must be a positive integer, got {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in found:
            num_bytes = prod(shape) // kind.values * kind.num_bytes
            if start + offset + num_bytes > size:
                raise ValueError(f"it is truncated: tensor {name} ends at byte {start + offset + num_bytes} of {size}")
            self.tensors.append(TensorInfo(name, shape, kind, start + offset, num_bytes))


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    name, num_axes = cursor.text(), cursor.number("I")
    if num_axes > _MOST_AXES:
        raise ValueError(f"tensor {name:.80} has {num_axes} axes")
    shape = tuple(cursor.number("Q") for _ in range(num_axes))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    kind = TYPES.get(number)
    if kind is None:
        called = OTHERS.get(number, f"number {number}")
        raise ValueError(
            f"tensor {name} has type {called}; frame reads: {', '.join(each.name for each in TYPES.values())}"
        )
    if shape and shape[-1] % kind.values:
        raise ValueError(f"tensor {name} has rows of {shape[-1]} values, which blocks of {kind.values} do not divide")
    return name, shape, kind, offset


def parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to, in order; raises `ValueError` where one is missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    parts = [path.with_name(f"{stem}-{number:05d}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(f"{path.parent} lacks {missing[0]}, one of the {len(parts)} files of the model {stem}")
    return parts


def read_files(paths: list[Path]) -> tuple[Mapping[str, Any], list[tuple[Path, TensorInfo]]]:
    """(the metadata, the tensors with their files) of a model in one or several files.

    Raises `ValueError` for a tensor that two of them hold, or whose type wants a package that is not installed.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, tuple[Path, TensorInfo]] = {}
    for path in paths:
        file = GgufFile(path)
        metadata = {**file.metadata, **metadata}
        for info in file.tensors:
            if info.name in tensors:
                raise ValueError(f"{path} holds the tensor {info.name}, which is in {tensors[info.name][0].name} too")
            if info.kind.name in BY_LIBRARY and find_spec("gguf") is None:
                raise ValueError(
                    f"{path}: tensor {info.name} has type {info.kind.name}, which the package gguf reads and which is "
                    "not installed: pip install 'frame-llm[gguf]'"
                )
            tensors[info.name] = path, info
    return metadata, list(tensors.values())
