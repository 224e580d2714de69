"""Lists the tensors of a safetensors file from its header. Reads no weights and imports no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.settings import ConfigError

_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: name, type as the file names it, number of elements, bytes."""

    name: str
    dtype: str
    elements: int
    num_bytes: int


def read_header(path: Path) -> Iterator[StoredTensor]:
    """Yields the tensors of a file; raises `ConfigError` if it is no safetensors file or is cut off."""
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
            size = struct.unpack("<Q", head)[0] if len(head) == 8 else _MAX_HEADER_BYTES + 1
            if size > _MAX_HEADER_BYTES:
                raise ValueError("no header")
            tensors = json.loads(stream.read(size))
        for name, entry in tensors.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield StoredTensor(name, str(entry["dtype"]), math.prod(entry["shape"]), end - start)
        if path.stat().st_size < 8 + size + max((e["data_offsets"][1] for e in _entries(tensors)), default=0):
            raise ConfigError(f"{path} is shorter than its header says; download it again")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a safetensors file") from None


def _entries(tensors: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for name, entry in tensors.items() if name != "__metadata__"]
