"""The kernels in C, called with tensors of host memory; each gives None for tensors that it does not take.

They compute row by row, so that a row's bits depend on no other row, and their number is free. Types are float32 and
bfloat16.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_long, c_void_p
from typing import Any

import torch
from torch import Tensor

from .calls import Calls
from .library import Library, begin as begin, library
from .nibbles import NibbleWeight
from .packed import BLOCK, address_of, packed_width

_P, _L, _F, _I = c_void_p, c_long, c_float, c_int
#: The types of numbers, as functions are named by them.
_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
#: Functions of each type that keep Python's lock, and their arguments; then those that give it up.
_QUICK: dict[str, list[Any]] = {
    "rms_norm": [_L] * 4 + [_P] * 5 + [_F] * 2 + [_I],
    "silu_mul": [_L] * 2 + [_P] * 2 + [_I],
    "rotary": [_L] * 6 + [_P] * 8 + [_F] * 2 + [_I],
    "store": [_L] * 7 + [_P] * 5,
    "lookup": [_L] * 2 + [_P] * 3,
    "greedy": [_L] * 2 + [_P] * 3,
}
#: Those that know no type of numbers.
_PLAIN: dict[str, list[Any]] = {
    "step_rows": [_L] * 2 + [_P] * 6,
    "step_blocks": [_L] * 4 + [_P] * 4,
    "append_drawn": [_L] * 2 + [_P] * 4,
    "join_drawn": [_L, _P, _P, _P],
}
_LONG: dict[str, list[Any]] = {"attend": [_L] * 10 + [_P] * 6 + [_F, _I], "packed_rows": [_L] * 5 + [_P] * 4 + [_I]}
_LONG["nibble_linear"] = [_L] * 3 + [_P] * 4 + [_I]
_BYTES: dict[str, list[Any]] = {"byte_linear": [_L] * 5 + [_P] * 5 + [_I] * 2}
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
        self._library = found
        self._widths: dict[tuple[Any, ...], int] = {}
        self._of = self._functions(_typed)
        self._plain = {name: _typed(found.quick, name, "", types) for name, types in _PLAIN.items()}
        self._space = threading.local()
        self._noted: Calls | None = None

    def _functions(self, made: Callable[[Any, str, str, list[Any]], Any]) -> dict[torch.dtype, dict[str, Any]]:
        """What `made` gives for each function, by type and name."""
        quick, long = self._library.quick, self._library.long
        bytes_ = _BYTES if self.multiplies_bytes else {}
        parts: list[tuple[Any, dict[str, list[Any]]]] = [(quick, _QUICK), (long, _LONG), (long, bytes_)]
        return {
            dtype: {
                name: made(library_, name, f"_{type_}", types)
                for library_, functions in parts
                for name, types in functions.items()
            }
            for dtype, type_ in _TYPES.items()
        }

    @contextmanager
    def noted(self) -> Iterator[Calls]:
        """Writes down the calls that this thread makes within it.

        They may be made again while the tensors that they were given, and got, are where they were.
        """
        before, calls, thread = (self._of, self._plain), Calls(self._library), threading.get_ident()

        def noting(library_: Any, name: str, type_: str, types: list[Any]) -> Callable[..., None]:
            function = _typed(library_, name, type_, types)

            def call(*given: Any) -> None:
                if threading.get_ident() == thread:
                    calls.add(f"{name}_words{type_}", types, given)
                function(*given)

            return call

        self._of = self._functions(noting)
        self._plain = {name: noting(self._library.quick, name, "", types) for name, types in _PLAIN.items()}
        self._noted = calls
        try:
            yield calls
        finally:
            (self._of, self._plain), self._noted = before, None

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
        """Writes `key`, `value` [n, Hk, D] to slots int64 [n] of `keys`, `values` [blocks, tokens, Hk, D].

        Those lie at even distances, and the heads of a token one behind the other. Negative slots are left out.
        """
        block, size = keys.shape[1], key.shape[1] * key.shape[2]
        given = key.data_ptr(), value.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr()
        strides = key.stride(0), value.stride(0), block, keys.stride(0), keys.stride(1)
        self._of[key.dtype]["store"](len(key), size, *strides, *given)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """[n, H, D]: row i of `query` over the first lengths[i] tokens of tables[i], or the last `window` of those.

        `tables` int32 [n, most blocks] name blocks of `keys`, `values`, as `store` takes them; `lengths` are int32 [n].
        A row without tokens gets zeros.
        """
        rows, heads, dim = query.shape
        out = torch.empty((rows, heads, dim), dtype=query.dtype)
        given = query.data_ptr(), keys.data_ptr(), values.data_ptr(), tables.data_ptr(), lengths.data_ptr()
        strides = query.stride(0), keys.shape[1], keys.stride(0), keys.stride(1), tables.stride(0)
        self._of[query.dtype]["attend"](
            rows, heads, keys.shape[2], dim, *strides, window, *given, out.data_ptr(), scale, torch.get_num_threads()
        )
        return out

    def lookup(self, ids: Tensor, table: Tensor) -> Tensor | None:
        """`Ops.lookup` of int32 ids."""
        functions = self._of.get(table.dtype)
        if functions is None or ids.dtype != torch.int32 or ids.stride() != (1,) or not table.is_contiguous():
            return None
        rows, dim = len(ids), table.shape[1]
        out = torch.empty((rows, dim), dtype=table.dtype)
        functions["lookup"](rows, dim, table.data_ptr(), ids.data_ptr(), out.data_ptr())
        return out

    def one_token_each(self, rows: Tensor, tokens: int, *tables: Tensor) -> bool:
        """Whether `step_rows` and `step_blocks` take rows [3, n] of so many tokens, and these tables."""
        if tokens != rows.shape[1] or not rows.is_contiguous() or any(one.dtype != torch.int32 for one in tables):
            return False
        return rows.dtype == torch.int32 and bool(self._library.quick.one_token_each(tokens, rows.data_ptr()))

    def step_rows(
        self, rows: Tensor, token_ids: Tensor, ids: Tensor, positions: Tensor, query_start: Tensor, lengths: Tensor
    ) -> None:
        """What `Ops.build_inputs` knows of rows [3, n] of one token each, or none, besides their blocks."""
        addresses = [one.data_ptr() for one in (rows, token_ids, ids, positions, query_start, lengths)]
        self._plain["step_rows"](rows.shape[1], token_ids.stride(0), *addresses)

    def step_blocks(self, rows: Tensor, size: int, table: Tensor, own: Tensor, mapping: Tensor) -> None:
        """The blocks, of `size` tokens each, of such rows in one group of the cache, and where their tokens go."""
        addresses = [one.data_ptr() for one in (rows, table, own, mapping)]
        self._plain["step_blocks"](rows.shape[1], size, table.stride(0), own.stride(0), *addresses)

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """`Ops.greedy`."""
        functions, (rows, size) = self._of.get(logits.dtype), logits.shape
        if functions is None or not size or not logits.is_contiguous():
            return None
        best, values = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.float32)
        functions["greedy"](rows, size, logits.data_ptr(), best.data_ptr(), values.data_ptr())
        return best, values

    def advance(self, token_ids: Tensor, slots: Tensor, lengths: Tensor, sampled: Tensor) -> bool:
        """`Ops.advance` of int32 vectors; False for others, of which nothing was done."""
        given = slots, lengths, sampled
        if token_ids.dtype != torch.int32 or token_ids.stride(1) != 1:
            return False
        if any(one.dtype != torch.int32 or one.stride() != (1,) for one in given):
            return False
        addresses = token_ids.data_ptr(), *(one.data_ptr() for one in given)
        self._plain["append_drawn"](len(slots), token_ids.stride(0), *addresses)
        return True

    def join_drawn(self, token_ids: Tensor, drawn: Tensor) -> Tensor:
        """`Ops.join_drawn`."""
        out = torch.empty((2, len(token_ids)), dtype=torch.int32)
        addresses = token_ids.contiguous().data_ptr(), drawn.contiguous().data_ptr(), out.data_ptr()
        self._plain["join_drawn"](len(token_ids), *addresses)
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
        """The address of so many bytes, which are this thread's until it asks again.

        For calls that are written down they are new, so that they stay theirs.
        """
        if self._noted is not None:
            self._noted.kept.append(torch.empty(size, dtype=torch.int8))
            return int(self._noted.kept[-1].data_ptr())
        room = getattr(self._space, "room", None)
        if room is None or room.numel() < size:
            room = self._space.room = torch.empty(size, dtype=torch.int8)
        address: int = room.data_ptr()
        return address


def native_rows() -> NativeRows | None:
    """The kernels, once they are compiled; None where they cannot be."""
    found = library()
    return None if found is None else NativeRows(found)


def _typed(found: Any, name: str, type_: str, arguments: list[Any]) -> Any:
    function = getattr(found, name + type_)
    function.argtypes, function.restype = arguments, None
    return function


def _threads(out: Tensor) -> int:
    return torch.get_num_threads() if out.numel() >= _DIVIDED else 1


def _by_heads(x: Tensor, dim: int) -> bool:
    return x.stride(2) == 1 and x.stride(1) == dim
