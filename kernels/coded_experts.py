"""Products of routed experts whose weights are codes, in Triton; the reference is `Ops.coded_experts`.

As `experts`, whose blocks and sums these are, but a program loads codes and scales of its tile and makes numbers of
them in registers: 4-bit floats and whole numbers of 4 or 8 bits, or 8-bit floats. Scales of few columns multiply
the weights, those of a whole step or row what it sums up to. With few pairs each is a block by itself, and nothing is
sorted. Many rows may be rounded to the type of 8-bit codes, so that these are multiplied as they are. Knows no router
and no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import coded_vectors
from .chain import await_previous, chained
from .coded_tiles import add_step, ahead, numbers_of, scale_sums, zeros_of
from .expert_choice import MOST_TOKENS, Choice, Part, choose, choose_blocks, plain
from .expert_launch import Launch, Shape, Tile, coded_launch
from .expert_tiles import finish, place
from .experts import Parts, chip_of, combine
from .gating import SILU, Biases, Gating, constants
from .hopper import hopper_kernel, is_hopper
from .quantized import FEW_ROWS, round_rows
from .routing import Blocks, align

#: Columns of x that share a scale where weights have scales of blocks.
_X_GROUP = 128
#: Rows of a tile of one pair.
_ALONE = 16
#: Rows of a tile above which no second sums are kept for what has one scale in a step: they would take all registers.
_FEW_SUMS = 32
#: Columns from which a step of nibbles is long enough to have the columns of one scale.
_LONG_STEP = 64
#: The least columns of a scale that are served, of nibbles and of bytes.
_LEAST_GROUPS = (8, 32)
#: The least columns of a product of 8-bit numbers.
_LEAST_ROUNDED = 32
#: The fewest tokens that are rounded; a power of two, which a warm-up meets.
MANY_TOKENS = 2 * FEW_ROWS
#: Rows that experts must have on average for a Hopper chip to be quicker with weights that are dequantised before, if
#: the kernel does half as many operations as `experts_hopper` in a time. That is reckoned, not measured.
DEQUANTIZED_ROWS = 512


class Weights(Protocol):
    """As `frame.ops.CodedWeights`."""

    @property
    def codes(self) -> Tensor:
        """[E, N, C], or int32 [E, N, C / 8]."""

    @property
    def scales(self) -> Tensor:
        """[E, ⌈N / r⌉, ⌈C / c⌉]."""

    @property
    def block(self) -> tuple[int, int]:
        """(r, c)."""

    @property
    def zeros(self) -> Tensor | None:
        """What is subtracted from codes, in the shape of `scales`."""

    @property
    def numbers(self) -> Tensor | None:
        """Factors of rows [E, N, 1]."""

    @property
    def table(self) -> Tensor | None:
        """What nibbles are codes of."""

    @property
    def columns(self) -> slice | None:
        """Those of C that are the weight's; None: all."""

    @property
    def is_float4(self) -> bool:
        """Whether `table` is that of 4-bit floats."""


@triton.jit(do_not_specialize=["pairs", "first_id"])
def _coded(
    x, stride_x, x_scales, x_groups, weight, bias, out, blocks, pairs, experts, first_id, size, depth, units, inputs,
    scale_rows, groups,
    SHARED: tl.constexpr, ALONE: tl.constexpr, CHAINED: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr,
    EVEN: tl.constexpr, LEAD: tl.constexpr, KIND: tl.constexpr, WORD: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr, EARLY: tl.constexpr, ROWS_PER: tl.constexpr, ZEROS: tl.constexpr, NUMBERS: tl.constexpr,
    EXPONENTS: tl.constexpr, ROUNDED: tl.constexpr, X_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIASED: tl.constexpr, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """One program: the rows of a block of one expert, and BLOCK_N columns of its result."""
    await_previous(CHAINED)
    codes, scales, zeros, numbers = weight
    slots, block_experts, num_blocks = blocks
    num_tiles = tl.cdiv(size, BLOCK_N)
    lane = tl.arange(0, BLOCK_M)
    if ALONE:  # `slots` are the ids of pairs
        pair = tl.program_id(0) // num_tiles
        tile = tl.program_id(0) % num_tiles
        chosen = tl.load(slots + pair) - first_id
        if (chosen < 0) | (chosen >= experts):
            return
        expert = chosen.to(tl.int64)
        some = pair.to(tl.int64)
        slot = tl.where(lane == 0, some, pairs.to(tl.int64))
    else:
        total = tl.load(num_blocks)
        if tl.program_id(0) >= total * num_tiles:
            return
        block, tile = place(tl.program_id(0), total, num_tiles)
        slot = tl.load(slots + block * BLOCK_M + lane).to(tl.int64)
        some = tl.load(slots + block * BLOCK_M).to(tl.int64)
        expert = tl.load(block_experts + block).to(tl.int64)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < size
    # padding reads the block's first row, and columns beyond the matrix its first one: neither is stored
    row = tl.where(slot < pairs, slot, some) // SHARED
    inside = tl.where(there, column, 0)
    start = expert * (2 if GATED else 1) * size
    line = start + inside
    scale_at = (expert * scale_rows + inside // ROWS_PER) * groups
    up_scale_at = (expert * scale_rows + (inside + size) // ROWS_PER) * groups
    # `units` are what a row has of WORD words, or of bytes: of a product with a constant it is known what divides it
    STEP: tl.constexpr = BLOCK_K if KIND == "bytes" else BLOCK_K // 8
    at = codes + line[:, None] * (units * WORD) + tl.arange(0, STEP)[None, :]
    up_at = at + tl.cast(size, tl.int64) * (units * WORD)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * stride_x + (k - LEAD)[None, :]
    dtype: tl.constexpr = codes.dtype.element_ty if ROUNDED else x.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    own = ahead(scales, scale_at, there, 0, depth, GROUP, SPAN, BLOCK_K)
    zero = zeros_of(zeros, scale_at, there, 0, depth, KIND, ZEROS, GROUP, SPAN, BLOCK_K)
    up_own, up_zero = own, zero
    if GATED:
        up_own = ahead(scales, up_scale_at, there, 0, depth, GROUP, SPAN, BLOCK_K)
        up_zero = zeros_of(zeros, up_scale_at, there, 0, depth, KIND, ZEROS, GROUP, SPAN, BLOCK_K)
    for first in range(0, depth, BLOCK_K):
        following = first + BLOCK_K
        from_x = first + k - LEAD
        a = tl.load(x_at) if EVEN else tl.load(x_at, mask=((from_x >= 0) & (from_x < inputs))[None, :], other=0.0)
        x_own = tl.load(x_scales + row * x_groups + first // X_GROUP) if X_GROUP else row
        next_own = ahead(scales, scale_at, there, following, depth, GROUP, SPAN, BLOCK_K)
        next_zero = zeros_of(zeros, scale_at, there, following, depth, KIND, ZEROS, GROUP, SPAN, BLOCK_K)
        w = numbers_of(
            at, own, zero, there, first, depth, KIND, SPAN, EARLY, EXPONENTS, EVEN, BLOCK_N, BLOCK_K, dtype
        )  # fmt: skip
        acc = add_step(a, w, acc, own, x_own, EARLY, GROUP, ROUNDED, X_GROUP, EXPONENTS, SWAP)
        own, zero = next_own, next_zero
        if GATED:
            next_own = ahead(scales, up_scale_at, there, following, depth, GROUP, SPAN, BLOCK_K)
            next_zero = zeros_of(zeros, up_scale_at, there, following, depth, KIND, ZEROS, GROUP, SPAN, BLOCK_K)
            w = numbers_of(
                up_at, up_own, up_zero, there, first, depth, KIND, SPAN, EARLY, EXPONENTS, EVEN, BLOCK_N, BLOCK_K, dtype
            )  # fmt: skip
            acc_up = add_step(a, w, acc_up, up_own, x_own, EARLY, GROUP, ROUNDED, X_GROUP, EXPONENTS, SWAP)
            up_own, up_zero = next_own, next_zero
        x_at += BLOCK_K
        at += STEP
        up_at += STEP
    acc = scale_sums(
        acc, x, scales, numbers, x_scales, scale_at, line, row, there, KIND,
        GROUP, ROUNDED, X_GROUP, NUMBERS, EXPONENTS, SWAP,
    )  # fmt: skip
    if GATED:
        acc_up = scale_sums(
            acc_up, x, scales, numbers, x_scales, up_scale_at, line + size, row, there, KIND,
            GROUP, ROUNDED, X_GROUP, NUMBERS, EXPONENTS, SWAP,
        )  # fmt: skip
    finish(
        acc, acc_up, bias + start, out, slot, pairs, column, size,
        GATED, SWAP, BIASED, FUNCTION, ALPHA, SHIFT, LIMIT,
    )  # fmt: skip


def many_rows(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether a Hopper chip is quicker with dequantised weights; as `expert_launch.many_rows` decides."""
    return (1 << num_tokens.bit_length() >> 1) * top_k >= DEQUANTIZED_ROWS * num_experts


def fits(weight: Weights) -> bool:
    """Whether the kernel takes the codes of a matrix."""
    if weight.table is not None and not weight.is_float4:
        return False
    nibbles, group = weight.codes.dtype == torch.int32, weight.block[1]
    whole = weight.codes.is_contiguous() and weight.scales.is_contiguous()
    known = nibbles or weight.codes.dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    if weight.zeros is not None and not nibbles:
        return False
    return whole and known and (weight.scales.shape[2] == 1 or group & -group >= _LEAST_GROUPS[not nibbles])


def fused_experts(
    hidden: Tensor, gate_up: Weights, down: Weights, weights: Tensor, ids: Tensor, launch: Launch | None = None,
    of_all: int = 0, first: int = 0, parts: Parts | None = None, gating: Gating | None = None,
    biases: Biases = (None, None), *, rounds: bool = False, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """As `Ops.coded_experts`, of weights that `fits` takes and 16-bit `hidden` with contiguous columns.

    `launch` replaces the tile sizes that suit the batch. With `invariant` they suit every batch, and nothing is
    rounded, so that a token's bits depend on its own row alone.
    """
    if not hidden.shape[0]:
        return torch.empty_like(hidden)
    held = range(first, first + len(gate_up.codes))
    rounds = rounds and not invariant and len(hidden) >= MANY_TOKENS and gate_up.codes.dtype == torch.float8_e4m3fn
    if launch is None:
        shape = shape_of(hidden, down, ids.shape[1], of_all)
        choice = None if invariant or rounds else choice_for(hidden, gate_up, down, shape)
        if choice is not None:
            return by_choice(hidden, gate_up, down, weights, ids, choice, first, parts, gating, biases)
        apart = rounds or (gate_up.codes.dtype != torch.int32 and gate_up.scales.shape[2] > 1)
        launch = coded_launch(shape, 0 if invariant else len(hidden), chip_of(hidden.device), apart=apart)
    blocks = align(ids, held, launch.block_m) if launch.block_m else None
    inner = coded_product(
        hidden, gate_up, ids, held, blocks, launch.gate_up, shared=ids.shape[1], gating=gating or SILU, bias=biases[0],
        rounds=rounds,
    )  # fmt: skip
    products = coded_product(inner, down, ids, held, blocks, launch.down, bias=biases[1], rounds=rounds)
    return combine(products, weights, ids, held, parts=parts)


def choice_for(hidden: Tensor, gate_up: Weights, down: Weights, shape: Shape) -> Choice | None:
    """The kernels of so many tokens that are no tiles, or None where none of them serves."""
    tokens, pair = len(hidden), (gate_up, down)
    if is_hopper(hidden.device):
        takes = hopper_kernel(hidden.device, "coded_few", "fits")
        if takes is not None and all(takes(hidden, one) for one in pair):
            return choose(shape, tokens) if tokens <= MOST_TOKENS else choose_blocks(shape, tokens)
    if tokens > 3 or not all(coded_vectors.fits(hidden, one) for one in pair):
        return None
    return plain()


def by_choice(
    hidden: Tensor, gate_up: Weights, down: Weights, weights: Tensor, ids: Tensor, choice: Choice, first: int = 0,
    parts: Parts | None = None, gating: Gating | None = None, biases: Biases = (None, None),
) -> Tensor:  # fmt: skip
    """As `fused_experts`, by the kernels of a choice."""
    held = range(first, first + len(gate_up.codes))
    blocks = align(ids, held, choice.block_m) if choice.block_m else None
    inner = inner_by(choice.gate_up, hidden, gate_up, ids, held, blocks, gating or SILU, biases[0])
    return outer_by(choice.down, inner, down, weights, ids, held, blocks, biases[1], parts)


def inner_by(
    part: Part, hidden: Tensor, weight: Weights, ids: Tensor, held: range, blocks: Blocks | None, gating: Gating,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The first product of a choice, [pairs, I]."""
    if part.kernel == "vectors":
        return coded_vectors.gate_up(hidden, weight, ids, part.tile, held.start, gating, bias)
    product = _product_of(part, hidden)
    return product(hidden, weight, ids, held, blocks, part.tile, shared=ids.shape[1], gating=gating, bias=bias)


def outer_by(
    part: Part, inner: Tensor, weight: Weights, weights: Tensor, ids: Tensor, held: range, blocks: Blocks | None,
    bias: Tensor | None, parts: Parts | None = None,
) -> Tensor:  # fmt: skip
    """The second product of a choice, [T, H], summed over a token's experts."""
    if part.kernel in ("vectors", "summed"):
        if part.kernel == "vectors":
            out = coded_vectors.down(inner, weight, weights, ids, part.tile, held.start, bias)
        else:
            product = _product_of(part, inner)
            out = product(inner, weight, weights, ids, held, part.tile, early=part.early, bias=bias)
        if parts is not None:
            for rows in parts.rows:
                parts.done(out, rows)
        return out
    products = _product_of(part, inner)(inner, weight, ids, held, blocks, part.tile, bias=bias)
    return combine(products, weights, ids, held, parts=parts)


def _product_of(part: Part, x: Tensor) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] | None = coded_product
    if part.kernel != "tiles":
        kernels = {
            "few": ("coded_few", "product"),
            "summed": ("coded_few", "summed"),
            "warpgroups": ("coded_blocks", "product"),
        }
        found = hopper_kernel(x.device, *kernels[part.kernel]) if part.kernel in kernels else None
    if found is None:
        raise ValueError(f"no kernel {part.kernel!r} on {x.device}")
    return found


def shape_of(hidden: Tensor, down: Weights, top_k: int, of_all: int = 0) -> Shape:
    """What the tile sizes depend on; E of `of_all` experts are held that tokens choose from."""
    experts, hidden_size = down.codes.shape[:2]
    return Shape(max(experts, of_all), top_k, hidden_size, _inputs(down), hidden.dtype)


def _inputs(weight: Weights) -> int:
    """The columns of a matrix, K."""
    return len(range(*(weight.columns or slice(None)).indices(_stored(weight))))


def coded_product(
    x: Tensor, weight: Weights, ids: Tensor, held: range, blocks: Blocks | None, tile: Tile, *, shared: int = 1,
    gating: Gating | None = None, bias: Tensor | None = None, rounds: bool = False,
) -> Tensor:  # fmt: skip
    """As `experts.grouped_product`, of x [..., K]; without `blocks` each pair of `ids` is a block by itself."""
    gated = gating is not None and gating.gated
    size, inputs = weight.codes.shape[1] // (2 if gated else 1), _inputs(weight)
    most, block_m = (ids.numel(), _ALONE) if blocks is None else blocks.slots.shape
    how = _reading(weight, tile.block_k, block_m)
    # behind others, columns of the weight do not share scales with those of x; and steps may be short for a product
    rounds = rounds and not how["LEAD"] and how["BLOCK_K"] >= _LEAST_ROUNDED
    out = torch.empty((ids.numel(), size), dtype=x.dtype, device=x.device)
    x_group, x_scales = _X_GROUP if rounds and how["GROUP"] else 0, x
    if rounds:
        x, x_scales = round_rows(x, weight.codes.dtype, x_group or inputs)
    source = (ids, ids, ids) if blocks is None else (blocks.slots, blocks.experts, blocks.used)
    extra = [weight.codes if one is None else one for one in (weight.zeros, weight.numbers)]
    depth, groups = _stored(weight), weight.scales.shape[2]
    chain = chained(x.device) if blocks is None else {"CHAINED": False}
    _coded[(most * triton.cdiv(size, tile.block_n),)](
        x, x.stride(0), x_scales, triton.cdiv(inputs, x_group) if x_group else 1,
        (weight.codes, weight.scales, *extra), out if bias is None else bias, out, source,
        ids.numel(), len(held), held.start, size, depth, weight.codes.shape[2] // how["WORD"], inputs,
        weight.scales.shape[1], groups,
        SHARED=shared, ALONE=blocks is None, GATED=gated, SWAP=tile.swap,
        EVEN=depth % how["BLOCK_K"] == 0 and depth == inputs, ROUNDED=rounds, X_GROUP=x_group, BLOCK_M=block_m,
        BLOCK_N=tile.block_n, BIASED=bias is not None, **how, **constants(gating), **chain,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _reading(weight: Weights, block_k: int, block_m: int) -> dict[str, Any]:
    """What the kernel is compiled for of a weight, in steps of `block_k` columns, or of fewer that share a scale."""
    nibbles, depth = weight.codes.dtype == torch.int32, _stored(weight)
    group = weight.block[1] if weight.scales.shape[2] > 1 or weight.is_float4 else 0
    shared = group & -group or block_k
    if not nibbles or shared >= _LONG_STEP:
        block_k = min(block_k, shared)
    span = min(shared, block_k)
    early = nibbles and group > 0 and (weight.is_float4 or span < block_k or block_m > _FEW_SUMS)
    kind = "bytes" if not nibbles else "float4" if weight.is_float4 else "nibbles"
    word = (4 if depth % 32 == 0 else 1) if nibbles else (16 if depth % 16 == 0 else 1)
    return {
        "KIND": kind, "WORD": word, "GROUP": group, "SPAN": span, "EARLY": early, "ROWS_PER": weight.block[0],
        "ZEROS": weight.zeros is not None, "NUMBERS": weight.numbers is not None,
        "EXPONENTS": weight.scales.dtype == torch.uint8, "BLOCK_K": block_k,
        "LEAD": (weight.columns or slice(None)).indices(depth)[0],
    }  # fmt: skip


def _stored(weight: Weights) -> int:
    """The columns that there are codes for."""
    return weight.codes.shape[2] * (8 if weight.codes.dtype == torch.int32 else 1)
