"""The kernels in C, called with tensors of host memory; each gives None for tensors that it does not take.

They compute row by row, so that a row's bits depend on no other row, and their number is free. Types are float32 and
bfloat16.
"""

from __future__ import annotations

import threading
from ctypes import c_float, c_int, c_long, c_void_p
from typing import Any

import torch
from torch import Tensor

from .library import Library, begin as begin, library
from .nibbles import NibbleWeight
from .packed import BLOCK, address_of, packed_width

_P, _L, _F, _I = c_void_p, c_long, c_float, c_int
#: The types of numbers, as functions are named by them.
_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
#: Functions of each type that keep Python's lock, and their arguments; then those that give it up.
_QUICK = {
    "rms_norm": [_L] * 4 + [_P] * 5 + [_F] * 2 + [_I],
    "silu_mul": [_L] * 2 + [_P] * 2 + [_I],
    "rotary": [_L] * 6 + [_P] * 8 + [_F] * 2 + [_I],
    "store": [_L] * 5 + [_P] * 5,
}
_LONG = {"attend": [_L] * 7 + [_P] * 6 + [_F, _I], "packed_rows": [_L] * 5 + [_P] * 4 + [_I]}
_LONG["nibble_linear"] = [_L] * 3 + [_P] * 4 + [_I]
_BYTES = {"byte_linear": [_L] * 5 + [_P] * 5 + [_I] * 2}
#: Elements from which rows are divided over threads.
_DIVIDED = 1 << 15
#: Rows that are multiplied by codes of groups: more are quicker with a weight that was put together.
_MOST_NIBBLES, _MOST_GROUPED = 16, 16
#: As in the sources.
_MOST_GROUP, _MOST_DIM, _MOST_DIGITS, _MOST_PACKED = 16, 256, 8, 4
#: Outputs for each thread with which oneDNN's order is divided well.
_LEAST_OUTPUTS = 4 * BLOCK
#: Digits of a number of each type, in bytes.
DIGITS = {torch.float32: 3, torch.bfloat16: 2}
#: The most products of a byte and a digit that have a sum in 32 bits.
_MOST_COLUMNS = (2**31 - 1) // (127 * 128)


class NativeRows:
    """The functions of a `Library` by the type of numbers."""

    def __init__(self, found: Library) -> None:
        self.multiplies_bytes = found.multiplies_bytes
        self._of: dict[torch.dtype, dict[str, Any]] = {dtype: {} for dtype in _TYPES}
        self._widths: dict[tuple[Any, ...], int] = {}
        for dtype, name in _TYPES.items():
            bytes_ = _BYTES if found.multiplies_bytes else {}
            for library_, functions in ((found.quick, _QUICK), (found.long, _LONG), (found.long, bytes_)):
                for function, arguments in functions.items():
                    self._of[dtype][function] = _typed(library_, f"{function}_{name}", arguments)
        self._space = threading.local()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor | None:
        """`Ops.rms_norm`."""
        functions, shape = self._of.get(x.dtype), x.shape
        if functions is None or weight.dtype != x.dtype or not weight.is_contiguous() or not shape[-1]:
            return None
        if weight.numel() != shape[-1]:
            return None
        if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == shape[2]:
            rows, heads, stride = shape[0], shape[1], x.stride(0)
        else:
            x = x.contiguous()
            rows, heads, stride = x.numel() // shape[-1], 1, shape[-1]
        out = torch.empty(shape, dtype=x.dtype)
        given = x.data_ptr(), None, weight.data_ptr(), None, out.data_ptr()
        functions["rms_norm"](rows, heads, shape[-1], stride, *given, eps, offset, _threads(out))
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor] | None:
        """`Ops.add_rms_norm`."""
        functions, dim = self._of.get(x.dtype), x.shape[-1]
        if functions is None or not dim or weight.dtype != x.dtype or residual.dtype != x.dtype:
            return None
        if x.shape != residual.shape or not weight.is_contiguous() or weight.numel() != dim:
            return None
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        given = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr()
        functions["rms_norm"](x.numel() // dim, 1, dim, dim, *given, eps, offset, _threads(out))
        return out, total

    def silu_mul(self, x: Tensor) -> Tensor | None:
        """`Ops.silu_mul`."""
        functions, size = self._of.get(x.dtype), x.shape[-1] // 2
        if functions is None or not size or x.shape[-1] % 2:
            return None
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
        functions["silu_mul"](out.numel() // size, size, x.data_ptr(), out.data_ptr(), _threads(out))
        return out

    def rotary(
        self,
        query: Tensor,
        key: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        weights: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
        offset: float = 0.0,
    ) -> tuple[Tensor, Tensor] | None:
        """`Ops.rotary` of whole heads whose halves are pairs, or with `weights` `Ops.norm_rotary`."""
        functions, (rows, heads, dim) = self._of.get(query.dtype), query.shape
        kv_heads = key.shape[1]
        if functions is None or key.dtype != query.dtype or cos_sin.dtype != torch.float32 or not rows:
            return None
        if cos_sin.shape[-1] != dim or dim % 2 or not cos_sin.is_contiguous() or not _by_heads(query, dim):
            return None
        if not _by_heads(key, dim) or positions.dtype != torch.int64 or positions.stride(0) != 1:
            return None
        norms: tuple[int | None, int | None] = (None, None)
        if weights is not None:
            if any(one.dtype != query.dtype or not one.is_contiguous() or one.numel() != dim for one in weights):
                return None
            norms = weights[0].data_ptr(), weights[1].data_ptr()
        turned = torch.empty((rows, heads, dim), dtype=query.dtype)
        turned_key = torch.empty((rows, kv_heads, dim), dtype=query.dtype)
        given = positions.data_ptr(), cos_sin.data_ptr(), query.data_ptr(), key.data_ptr(), *norms
        functions["rotary"](
            rows, heads, kv_heads, dim, query.stride(0), key.stride(0), *given, turned.data_ptr(),
            turned_key.data_ptr(), eps, offset, _threads(turned),
        )  # fmt: skip
        return turned, turned_key

    def attends(self, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
        """Whether `attend` and `store` take such heads."""
        group = num_heads // num_kv_heads
        return dtype in self._of and group <= _MOST_GROUP and head_dim <= _MOST_DIM and head_dim % 16 == 0

    def store(self, key: Tensor, value: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes `key`, `value` [n, Hk, D] to rows `slots` int64 [n] of `keys`, `values` [slots, Hk, D]."""
        size = key.shape[1] * key.shape[2]
        given = key.data_ptr(), value.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr()
        self._of[key.dtype]["store"](len(key), size, key.stride(0), value.stride(0), keys.stride(0), *given)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, slots: Tensor | None, lengths: Tensor, scale: float
    ) -> Tensor:
        """[n, H, D]: row i of `query` over lengths[i] keys and values.

        Those are slots[i] int64 [n, L] of `keys`, `values` [slots, Hk, D]; without slots, the first ones, of one row.
        """
        rows, heads, dim = query.shape
        out = torch.empty((rows, heads, dim), dtype=query.dtype)
        places, width = (None, 0) if slots is None else (slots.data_ptr(), slots.stride(0))
        given = query.data_ptr(), keys.data_ptr(), values.data_ptr(), places, lengths.data_ptr(), out.data_ptr()
        self._of[query.dtype]["attend"](
            rows, heads, keys.shape[1], dim, query.stride(0), keys.stride(0), width, *given, scale,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def learn(self, weight: Tensor, packed: Tensor) -> None:
        """Called with each weight that oneDNN has packed, so that `packed_linear` knows how such ones lie."""
        key = weight.dtype, *weight.shape
        width = packed_width(weight, packed)
        self._widths[key] = width if self._widths.get(key, width) == width else 0

    def packed_linear(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor | None:
        """x Wᵀ + b for a few rows of x [..., K] and W [N, K] that oneDNN has packed."""
        outputs, dim = packed.shape
        rows, threads = x.numel() // dim, torch.get_num_threads()
        if x.shape[-1] != dim or not x.is_contiguous():
            return None
        if not 0 < rows <= _MOST_PACKED or outputs < threads * _LEAST_OUTPUTS:
            return None
        width, dtype = self._widths.get((packed.dtype, outputs, dim), 0), x.dtype
        if not width or dtype != packed.dtype or not (bias is None or (bias.is_contiguous() and bias.dtype == dtype)):
            return None
        out = torch.empty((*x.shape[:-1], outputs), dtype=dtype)
        given = x.data_ptr(), address_of(packed), None if bias is None else bias.data_ptr(), out.data_ptr()
        self._of[dtype]["packed_rows"](rows, outputs, dim, width, dim, *given, threads)
        return out

    def byte_linear(self, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor | None:
        """x Wᵀ for a few rows of x [..., K] and the weight of codes int8 [N, K] and their scales.

        Those are float32 [N, 1], or float16 [N, K / 32], each of 32 columns. x is multiplied as `DIGITS` bytes a
        number, each the rest of the one before times 254.
        """
        dtype, (outputs, dim) = x.dtype, codes.shape
        count, rows, grouped = DIGITS.get(dtype, 0), x.numel() // dim, scales.dtype == torch.float16
        if not self.multiplies_bytes or not count or not rows or dim > _MOST_COLUMNS or x.shape[-1] != dim:
            return None
        if rows > (_MOST_GROUPED if grouped else _MOST_DIGITS // count):
            return None
        if not (x.is_contiguous() and codes.is_contiguous() and scales.is_contiguous()):
            return None
        if grouped and (dim % 32 or scales.shape[1] != dim // 32):
            return None
        out, width, once = torch.empty((*x.shape[:-1], outputs), dtype=dtype), -(-dim // 64) * 64, _MOST_DIGITS // count
        space, size, multiply = (
            self._room(once * (2 * count * width + 4)),
            dtype.itemsize,
            self._of[dtype]["byte_linear"],
        )
        for first in range(0, rows, once):
            source, target = x.data_ptr() + first * dim * size, out.data_ptr() + first * outputs * size
            given = source, space, codes.data_ptr(), scales.data_ptr(), target
            multiply(min(once, rows - first), outputs, dim, width, dim, *given, grouped, torch.get_num_threads())
        return out

    def nibble_linear(self, x: Tensor, weight: NibbleWeight) -> Tensor | None:
        """x Wᵀ for a few rows of x [..., K] and a weight [N, K] of 4-bit codes."""
        functions, dim = self._of.get(x.dtype), x.shape[-1]
        rows = x.numel() // dim
        if (
            functions is None
            or not 0 < rows <= _MOST_NIBBLES
            or 8 * weight.low.shape[1] != dim
            or not x.is_contiguous()
        ):
            return None
        outputs = len(weight.low)
        out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype)
        space, size, given = self._room(_MOST_PACKED * (dim + dim // 32) * 4), x.element_size(), weight.struct()
        for first in range(0, rows, _MOST_PACKED):
            count = min(_MOST_PACKED, rows - first)
            source, target = x.data_ptr() + first * dim * size, out.data_ptr() + first * outputs * size
            functions["nibble_linear"](count, outputs, dim, source, space, given, target, torch.get_num_threads())
        return out

    def _room(self, size: int) -> int:
        """The address of so many bytes, which are this thread's until it asks again."""
        room = getattr(self._space, "room", None)
        if room is None or room.numel() < size:
            room = self._space.room = torch.empty(size, dtype=torch.int8)
        address: int = room.data_ptr()
        return address


def native_rows() -> NativeRows | None:
    """The kernels, once they are compiled; None where they cannot be."""
    found = library()
    return None if found is None else NativeRows(found)


def _typed(found: Any, name: str, arguments: Any) -> Any:
    function = getattr(found, name)
    function.argtypes, function.restype = arguments, None
    return function


def _threads(out: Tensor) -> int:
    return torch.get_num_threads() if out.numel() >= _DIVIDED else 1


def _by_heads(x: Tensor, dim: int) -> bool:
    return x.stride(2) == 1 and x.stride(1) == dim
