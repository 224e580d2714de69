"""Typed msgpack for messages between processes: structs and numpy arrays, nothing executable.

An array is sent as (dtype, shape, bytes); only plain numeric dtypes are accepted. A transport with memory of its own
may have the bytes of large arrays placed there (`encoder_apart`, `decoder_apart`). Knows no transport.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

T = TypeVar("T")

_DTYPES = frozenset(
    f"{order}{code}" for code in ("i1", "u1", "b1", "i2", "i4", "i8", "u4", "u8", "f2", "f4", "f8") for order in "<|"
)

#: Arrays of at least as many bytes are placed apart, where the transport does that.
APART_BYTES = 1024


class Borrowed:
    """Bytes of a message that its receiver may read only until it has handled the message: they are not copied."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data


def check_dtype(dtype: str) -> str:
    """Returns `dtype`; raises `ValueError` for one that arrays between processes may not have."""
    if dtype not in _DTYPES:
        raise ValueError(f"array dtype {dtype!r} is not accepted; there are: {', '.join(sorted(_DTYPES))}")
    return dtype


def _encode_array(value: Any) -> Any:
    if isinstance(value, Borrowed):
        return value.data
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<")
        return dtype.str, value.shape, np.ascontiguousarray(value, dtype).tobytes()
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be sent between processes")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is Borrowed:
        return Borrowed(value)
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} cannot be received from another process")
    dtype, shape, data = value
    return np.frombuffer(data, dtype=check_dtype(dtype)).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(value: Any) -> bytes:
    """Returns the bytes of a struct, or of plain containers of numbers, text, bytes and numpy arrays."""
    return _encoder.encode(value)


def encoder_apart(place: Callable[[memoryview], int]) -> Callable[[Any], bytes]:
    """An `encode` that gives the bytes of `Borrowed` and of large arrays to `place` and sends what that returns.

    `place` copies them to where the receiver finds them by its number.
    """

    def hook(value: Any) -> Any:
        if isinstance(value, Borrowed):
            return place(memoryview(value.data)), len(value.data)
        if isinstance(value, np.ndarray) and value.nbytes >= APART_BYTES:
            array = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
            return array.dtype.str, array.shape, (place(array.reshape(-1).view(np.uint8).data), array.nbytes)
        return _encode_array(value)

    return msgspec.msgpack.Encoder(enc_hook=hook).encode


def decoder_apart(kind: Any, find: Callable[[int, int], memoryview]) -> Callable[[memoryview], Any]:
    """The counterpart of `encoder_apart`: `find` returns the bytes that begin at a place, and raises for a wrong one.

    Arrays are copied, once; `Borrowed` is a view of what `find` returns. Raises as `decode` does.
    """

    def hook(wanted: type, value: Any) -> Any:
        if wanted is Borrowed:
            return Borrowed(find(*value))
        if wanted is np.ndarray and not isinstance(value[2], bytes):
            return _decode_array(wanted, (value[0], value[1], find(*value[2])))
        return _decode_array(wanted, value)

    with _making:
        return msgspec.msgpack.Decoder(kind, dec_hook=hook).decode


def decode(data: bytes, kind: type[T]) -> T:
    """Parses bytes as `kind`; raises `msgspec.ValidationError` when they are something else."""
    decoder = _decoders.get(cast("Any", kind))
    try:
        message: T = (decoder or _make_decoder(kind)).decode(data)
    except RecursionError:
        raise msgspec.ValidationError("the message is nested too deeply") from None
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
