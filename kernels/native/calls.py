"""Calls of the kernels in C that are written down as they are made, and made again without Python.

Who writes calls down keeps the tensors whose addresses they have.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import c_float, c_void_p
from typing import Any

from .library import Library


class Calls:
    """Calls in the order in which they were made, of functions whose arguments are numbers and addresses."""

    def __init__(self, found: Library) -> None:
        self._library = found
        self._made: list[tuple[int, int]] = []  # the function that takes words, and its first word
        self._words = bytearray()
        #: what must not go while the calls may be made again
        self.kept: list[Any] = []
        self._ready: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self._made)

    def add(self, name: str, types: Sequence[Any], given: Sequence[Any]) -> None:
        """Writes down a call of function `name`, a word for each argument, as the sources' `WORDS` reads them."""
        self._made.append((self._library.address(name), len(self._words)))
        for type_, value in zip(types, given, strict=True):
            self._words += _word(type_, value)
            if isinstance(value, c_void_p):  # as it may hold what it points to
                self.kept.append(value)

    def run(self) -> None:
        """Makes all calls again, without Python's lock."""
        if self._ready is None:
            words = ctypes.create_string_buffer(bytes(self._words), max(1, len(self._words)))
            first = ctypes.addressof(words)
            pairs = [value for function, word in self._made for value in (function, first + word)]
            self._ready = (c_void_p * len(pairs))(*pairs), words
        self._library.run_calls(len(self._made), self._ready[0])


def _word(type_: Any, value: Any) -> bytes:
    if type_ is c_float:
        return struct.pack("=d", value)
    if type_ is c_void_p:
        return struct.pack("=Q", _address(value))
    return struct.pack("=q", int(value))


def _address(value: Any) -> int:
    if isinstance(value, c_void_p):
        value = value.value
    return value or 0
