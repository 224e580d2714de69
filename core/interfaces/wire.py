"""Typed msgpack for messages between processes: structs and numpy arrays, nothing executable.

An array is sent as (dtype, shape, bytes); only plain numeric dtypes are accepted. Knows no transport.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

T = TypeVar("T")

_DTYPES = frozenset(
    f"{order}{code}" for code in ("i1", "u1", "b1", "i2", "i4", "i8", "u4", "u8", "f2", "f4", "f8") for order in "<|"
)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<")
        return dtype.str, value.shape, np.ascontiguousarray(value, dtype).tobytes()
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be sent between processes")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} cannot be received from another process")
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise ValueError(f"array dtype {dtype!r} is not accepted; there are: {', '.join(sorted(_DTYPES))}")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(value: Any) -> bytes:
    """Returns the bytes of a struct, or of plain containers of numbers, text, bytes and numpy arrays."""
    return _encoder.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Parses bytes as `kind`; raises `msgspec.ValidationError` when they are something else."""
    decoder = _decoders.get(cast("Any", kind))
    message: T = (decoder or _make_decoder(kind)).decode(data)
    return message


#: Made once for each kind, since that takes longer than most messages.
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_making = threading.Lock()


def _make_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Makes the decoder of `kind`, in one thread at a time.

    While msgspec reads the fields of a struct in two threads, one uses what the other has half read: SIGSEGV was seen.
    """
    with _making:
        return _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind, dec_hook=_decode_array))
