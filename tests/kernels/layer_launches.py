"""What layers other than attention launch, by sizes and type; for `ahead`, which gives the tensors no memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from frame.interfaces import Gating, RouterSpec
from frame.kernels import (
    activation,
    adapters,
    all_reduce,
    block_copies,
    coded_experts,
    coded_fragments,
    coded_ring,
    coded_rows,
    coded_warpgroups,
    expert_adapters,
    expert_choice,
    expert_exchange,
    experts,
    experts_hopper,
    few_adapters,
    join,
    joined_adapters,
    latent_rotary,
    linear,
    linear_hopper,
    linear_rows,
    merge,
    nibble_rows,
    nibbles_hopper,
    norm,
    norm_linear,
    peer_copies,
    quantized,
    rotary,
    rounded_hopper,
    routing,
)
from frame.kernels.codebook import dequantize, dequantize_table
from frame.kernels.coded_fragments import Fragments
from frame.kernels.coded_ring import Ring
from frame.kernels.coded_warpgroups import Warpgroups
from frame.kernels.expert_launch import Shape, read_table
from frame.kernels.experts_hopper import GroupedTile
from frame.kernels.linear_hopper import HopperTile
from frame.kernels.linear_invariant import linear_invariant, linear_silu_mul_invariant, tiled_product
from frame.kernels.linear_rows import RowsTile
from frame.kernels.nibble_tiles import NibbleTile
from frame.kernels.nibbles import Nibbles
from frame.kernels.rounded_hopper import TILE, RoundedTile
from frame.ops import AdapterWeights, CodedWeights, ExpertAdapters, SlotGroups
from frame.plugins.gguf.blocks import TABLES
from frame.plugins.gguf.superblocks import SUPER, sizes_of
from frame.plugins.platforms.cuda.ops import CudaOps
from frame.testing.op_cases import GATINGS, ROUTERS

from .ahead import DEVICE, H200

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def one_row(outputs: int, inputs: int, dtype: torch.dtype = BF16, *, bias: bool = False) -> None:
    """The product of one row."""
    given = _empty(outputs, dtype=dtype) if bias else None
    linear.linear(_empty(1, inputs, dtype=dtype), _empty(outputs, inputs, dtype=dtype), given)


def gated_row(size: int, inputs: int, dtype: torch.dtype = BF16, *, bias: bool = False) -> None:
    """The gated product of one row."""
    given = _empty(2 * size, dtype=dtype) if bias else None
    linear.linear_silu_mul(_empty(1, inputs, dtype=dtype), _empty(2 * size, inputs, dtype=dtype), given)


def normed_row(
    outputs: int, inputs: int, dtype: torch.dtype = BF16, *, offset: float = 0.0, bias: bool = False
) -> None:
    """One row's norm with its product, plain and gated."""
    row, weight = _empty(1, inputs, dtype=dtype), _empty(2 * outputs, inputs, dtype=dtype)
    given = (row, row, (_empty(inputs, dtype=dtype), 1e-6, offset), weight)
    norm_linear.norm_linear(*given, _empty(2 * outputs, dtype=dtype) if bias else None)
    norm_linear.norm_linear_silu_mul(*given, _empty(2 * outputs, dtype=dtype) if bias else None)


def some_rows(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype = BF16,
    *,
    gated: bool = False,
    bias: bool = False,
    tile: RowsTile | None = None,
) -> None:
    """A product of up to sixteen rows on Hopper; `outputs` are the weight's."""
    x, weight = _empty(rows, inputs, dtype=dtype), _empty(outputs, inputs, dtype=dtype)
    linear_rows.product(x, weight, _empty(outputs, dtype=dtype) if bias else None, tile, gated=gated)


def coded(rows: int, codes: torch.dtype, block: tuple[int, int], *, rounds: bool = False, zeros: bool = False) -> None:
    """A product with a quantised weight of 6144 x 4096; of no rows, the weight itself."""
    weight = _empty(6144, 512 if codes == torch.int32 else 4096, dtype=codes)
    scales = _empty(6144 // block[0], 4096 // block[1], dtype=F32)
    zero = _empty(*scales.shape, dtype=torch.uint8) if zeros else None
    if not rows:
        quantized.dequantize(weight, scales, block, zero, BF16)
        return
    x, bias = _empty(rows, 4096), _empty(6144)
    if rounds and rows <= coded_rows.MOST_ROWS:
        codes_of_x = _empty(rows, 4096, dtype=codes), _empty(rows, 4096 // max(128, block[1]), dtype=F32)
        coded_rows.rounded_product(*codes_of_x, weight, scales, block, bias, BF16)
    elif rounds:
        quantized.rounded_product(x, weight, scales, block, bias)
        quantized.rounded_product(x, weight, scales, block, None, _empty(1, dtype=F32))
    else:
        coded_rows.few_rows(x, weight, scales, block, zero, bias)


def invariant(rows: int, outputs: int, inputs: int, dtype: torch.dtype = BF16, *, bias: bool = False) -> None:
    """The product that heeds no batch."""
    given = _empty(outputs, dtype=dtype) if bias else None
    linear_invariant(_empty(rows, inputs, dtype=dtype), _empty(outputs, inputs, dtype=dtype), given)


def tiled(rows: int, outputs: int, inputs: int, dtype: torch.dtype = BF16, *, bias: bool = False) -> None:
    """Such a product where there is no kernel for Hopper."""
    given = _empty(outputs, dtype=dtype) if bias else None
    tiled_product(_empty(rows, inputs, dtype=dtype), _empty(outputs, inputs, dtype=dtype), given)


def gated_invariant(rows: int, size: int, inputs: int, dtype: torch.dtype = BF16, *, bias: bool = False) -> None:
    """The gated product that heeds no batch."""
    given = _empty(2 * size, dtype=dtype) if bias else None
    linear_silu_mul_invariant(_empty(rows, inputs, dtype=dtype), _empty(2 * size, inputs, dtype=dtype), given)


def ordinary(product: Callable[[Tensor, Tensor], Tensor], rows: int = 8192, outputs: int = 28672) -> None:
    """An op of steps that need not be deterministic."""
    product(_empty(rows, 4096), _empty(outputs, 4096))


def hopper_tile(tile: HopperTile, *, gated: bool = False) -> None:
    """A tile of the product of many rows."""
    linear_hopper.product(_empty(8192, 4096), _empty(28672, 4096), None, tile, gated=gated)


def grouped_tile(
    tokens: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    tile: GroupedTile | None = None,
) -> None:
    """The experts of a layer with many rows each on Hopper, in one tile, or in ordinary steps."""
    num_experts, top_k, hidden, inner = shape
    inputs = _empty(tokens, hidden, dtype=dtype), _empty(num_experts, 2 * inner, hidden, dtype=dtype)
    weights, ids = _empty(tokens, top_k, dtype=F32), _empty(tokens, top_k, dtype=torch.int32)
    more = _empty(num_experts, hidden, inner, dtype=dtype), weights, ids
    if tile is None:
        CudaOps().fused_experts(*inputs, *more)
    else:
        experts_hopper.fused_experts(*inputs, *more, tile)


def routed(
    tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = BF16,
    *,
    fixed: bool = False,
) -> None:
    """The experts of a layer with the choice of them; `fixed`: the launch that heeds no batch."""
    weights, ids = routing.route(_empty(tokens, num_experts, dtype=dtype), RouterSpec(num_experts, top_k))
    product = experts.fused_experts_invariant if fixed else experts.fused_experts
    gate_up = _empty(num_experts, 2 * inner, hidden, dtype=dtype)
    down = _empty(num_experts, hidden, inner, dtype=dtype)
    product(_empty(tokens, hidden, dtype=dtype), gate_up, down, weights, ids)


def gated_experts(tokens: int, gating: Gating, dtype: torch.dtype = BF16, *, hopper: bool = False) -> None:
    """Experts with biases and a gating."""
    number, top_k, hidden, inner = EXPERTS["8 experts"]
    gate_up = _empty(number, inner * (2 if gating.gated else 1), hidden, dtype=dtype)
    biases = _empty(*gate_up.shape[:2], dtype=dtype), _empty(number, hidden, dtype=dtype)
    weights, ids = _empty(tokens, top_k, dtype=F32), _empty(tokens, top_k, dtype=torch.int32)
    product = experts_hopper.fused_experts if hopper else experts.fused_experts
    down = _empty(number, hidden, inner, dtype=dtype)
    product(_empty(tokens, hidden, dtype=dtype), gate_up, down, weights, ids, gating=gating, biases=biases)


def norms(size: int, dtype: torch.dtype = BF16, offset: float = 0.0) -> None:
    """The norm of a token, of heads, and with the residual."""
    x, weight = _empty(64, size, dtype=dtype), _empty(size, dtype=dtype)
    norm.rms_norm(x, weight, 1e-6, offset)
    norm.add_rms_norm(x, x, weight, 1e-6, offset)
    norm.rms_norm(_empty(64, 8, 128, dtype=dtype), _empty(128, dtype=dtype), 1e-6, offset)


def sums(ranks: int, size: int, dtype: torch.dtype = BF16, offset: float = 0.0) -> None:
    """Sums over ranks, alone and with the norm, of few rows and of many."""
    words = torch.empty(ranks, dtype=torch.int64, device=DEVICE)
    buffers = all_reduce.PeerBuffers(0, ranks, words, words, 256 << 10, 16 << 20)
    for rows in (1, 512):
        values = _empty(rows, dtype=F32)
        join.exchange_best(values, _empty(rows, dtype=torch.int32), values, buffers)
        x = _empty(rows, size, dtype=dtype)
        all_reduce.all_reduce(x, buffers)
        all_reduce.all_reduce_normed(x, x, (_empty(size, dtype=dtype), 1e-6, offset), buffers)


def copied_sums(size: int, dtype: torch.dtype = BF16, offset: float = 0.0) -> None:
    """Sums of two ranks whose values are copied, alone and with the norm."""
    words, x = torch.empty(2, dtype=torch.int64, device=DEVICE), _empty(512, size, dtype=dtype)
    received = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    buffers = peer_copies.CopyBuffers(received, words, words[:1], words)
    peer_copies.await_taken(buffers)
    peer_copies.tell_arrived(buffers)
    peer_copies.add_received(x, buffers, x)
    peer_copies.add_received_normed(x, x, (_empty(size, dtype=dtype), 1e-6, offset), buffers)


def exchanges(ranks: int, hidden: int, top_k: int, dtype: torch.dtype = BF16) -> None:
    """Few tokens to their experts and back."""
    words = torch.empty(ranks, dtype=torch.int64, device=DEVICE)
    buffers = expert_exchange.ExchangeBuffers(
        1, ranks, words, torch.empty(4, dtype=torch.int64, device=DEVICE), 64, top_k, hidden * dtype.itemsize // 4, 64
    )
    x, ids, weights = (
        _empty(16, hidden, dtype=dtype),
        _empty(16, top_k, dtype=torch.int32),
        _empty(16, top_k, dtype=F32),
    )
    values, _, slots = expert_exchange.dispatch(x, ids, weights, 16, buffers)
    expert_exchange.combine(values, slots, ids, 16, buffers)


def rotations(
    tokens: int,
    dim: int,
    turned: int,
    dtype: torch.dtype = BF16,
    *,
    interleaved: bool = False,
    offset: float = 0.0,
    axes: int = 0,
) -> None:
    """Rotary embedding of views of one projection, with and without the norms of heads, perhaps on several `axes`."""
    query, key, _ = _empty(tokens, 48, dim, dtype=dtype).split([32, 8, 8], 1)
    positions: Any = _empty(tokens, dtype=torch.int64)
    if axes:
        positions = positions.expand(axes, -1), _empty(turned // 2, dtype=torch.int32)
    table = _empty(4096, turned, dtype=F32)
    weights = (_empty(dim, dtype=dtype), _empty(dim, dtype=dtype))
    rotary.rotary(query, key, positions, table, interleaved)
    rotary.norm_rotary(query, key, weights, 1e-6, offset, positions, table, interleaved)


def turned_latents(
    tokens: int, heads: int, dtype: torch.dtype = BF16, *, turned: int = 64, interleaved: bool = True,
    offset: float = 0.0, scale: float = 1.0, rank: int = 512, axes: int = 0,
) -> None:  # fmt: skip
    """Latents with 64 numbers that turn or more, and those of the queries, behind a latent of queries."""
    query, latent = _empty(tokens, heads, 192, dtype=dtype), _empty(tokens, 1536 + rank + 64, dtype=dtype)[:, 1536:]
    positions: Any = _empty(tokens, dtype=torch.int64)
    if axes:
        positions = positions.expand(axes, -1), _empty(turned // 2, dtype=torch.int32)
    norm = _empty(rank, dtype=dtype), 1e-6, offset
    table = _empty(4096, turned, dtype=F32)
    latent_rotary.latent_rotary(query, latent, norm, positions, table, interleaved, scale)


def gates(dtype: torch.dtype = BF16) -> None:
    """Both gated activations."""
    activation.silu_mul(_empty(64, 2 * 14336, dtype=dtype))
    activation.gelu_tanh_mul(_empty(64, 2 * 14336, dtype=dtype))


#: The measured shape, one with few large experts, and one that fits no tile.
EXPERTS = {"128 experts": (128, 8, 2048, 768), "8 experts": (8, 2, 4096, 14336), "6 experts": (6, 2, 72, 40)}


def expert_launches() -> dict[str, Callable[[], None]]:
    """Experts for token counts of every launch, alone and in each type."""
    found: dict[str, Callable[[], None]] = {}
    for name, shape in EXPERTS.items():
        num_experts, top_k = shape[:2]
        counts = {1, *(rows * num_experts // top_k for rows in (1, 20, 40, 64))}
        if name == "128 experts":
            counts = {int(tokens) for tokens in read_table()[H200.name][Shape(*shape, BF16).name]}
        for tokens in sorted(counts):
            found[f"{name}, {tokens} tokens"] = partial(routed, tokens, *shape)
        found[f"{name}, deterministic"] = partial(routed, 64, *shape, fixed=True)
    shape = EXPERTS["8 experts"]
    for tokens in (1, 512):
        found[f"float32 experts, {tokens} tokens"] = partial(routed, tokens, *shape, F32)
    for place, gating in enumerate(GATINGS):
        for tokens in (1, 64, 512):
            found[f"experts with gating {place}, {tokens} tokens"] = partial(gated_experts, tokens, gating)
    found["float16 experts, 512 tokens"] = partial(routed, 512, *shape, F16)
    found["6 experts, one output, 300 tokens"] = partial(routed, 300, 6, 2, 1, 1)
    found["float32 experts, one output"] = partial(routed, 300, 6, 2, 1, 1, F32)
    return found


def _coded(kind: str, rows: int, depth: int, experts: int = 32) -> CodedWeights:
    """Experts of `kind` "FORMAT by GROUP", of blocks "fp8 by blocks"."""
    form, per = kind.split(" by ")
    block = (128, 128) if per == "blocks" else (1, depth if per == "rows" else int(per))
    shape = experts, -(-rows // block[0]), -(-depth // block[1])
    if form in ("fp8", "int8"):
        codes = _empty(experts, rows, depth, dtype=torch.float8_e4m3fn if form == "fp8" else torch.int8)
    else:
        codes = _empty(experts, rows, depth // 8, dtype=torch.int32)
    types = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}
    zeros = _empty(*shape, dtype=torch.uint8) if form == "zeros" else None
    numbers = _empty(experts, rows, 1, dtype=F32) if form == "nvfp4" else None
    table = _empty(16, dtype=F32) if "fp4" in form else None
    scales = _empty(*shape, dtype=types.get(form, F32))
    return CodedWeights(codes, scales, block, zeros, table, numbers, is_float4=table is not None)


def coded_layer(kind: str, tokens: int, hidden: int = 2880, inner: int = 2880, *, how: str = "") -> None:
    """gpt-oss's experts by their codes; `how`: "" by tiles from 128 tokens on, "blocks", "rounded", "deterministic"."""
    pair = _coded(kind, 2 * inner, hidden), _coded(kind, hidden, inner)
    weights, ids = _empty(tokens, 4, dtype=F32), _empty(tokens, 4, dtype=torch.int32)
    biases = _empty(32, 2 * inner), _empty(32, hidden)
    with patch.object(expert_choice, "WARPGROUP_ROWS", 64 if how == "blocks" else 0):
        coded_experts.fused_experts(
            _empty(tokens, hidden), *pair, weights, ids, gating=GATINGS[3], biases=biases,
            rounds=how == "rounded", invariant=how == "deterministic",
        )  # fmt: skip


def coded_launches() -> dict[str, Callable[[], None]]:
    """Experts by their codes: of each format for one token, decodes, mixed steps and prompts."""
    found: dict[str, Callable[[], None]] = {}
    sizes = {"mxfp4 by 32": 2880, "nvfp4 by 16": 2880, "zeros by 32": 2880, "int4 by 128": 2048, "int4 by rows": 2048,
             "int8 by rows": 2048, "fp8 by rows": 2048, "fp8 by blocks": 2048}  # fmt: skip
    for kind, size in sizes.items():
        for tokens in (1, 64, 150, 512, 2048) if kind.startswith("mxfp4") else (1, 64, 2048):
            found[f"experts of {kind}, {tokens} tokens"] = partial(coded_layer, kind, tokens, size, size)
        if kind.startswith("fp8"):
            for tokens in (150, 2048):
                name = f"experts of {kind}, {tokens} rounded tokens"
                found[name] = partial(coded_layer, kind, tokens, size, size, how="rounded")
    for tokens, size in ((64 * 3, 2880), (512, 2880), (256, 96), (512, 160)):
        name = f"experts of mxfp4 in blocks, {tokens} tokens, {size} columns"
        found[name] = partial(coded_layer, "mxfp4 by 32", tokens, size, size, how="blocks")
    found["experts of mxfp4, deterministic"] = partial(coded_layer, "mxfp4 by 32", 64, how="deterministic")
    found["experts of mxfp4, uneven sizes"] = partial(coded_layer, "mxfp4 by 32", 64, 96, 1440)
    found["experts of fp8 by rows, 16 inputs, 2048 tokens"] = partial(
        coded_layer, "fp8 by rows", 2048, 16, 16, how="rounded"
    )
    for tokens in (1, 2048):  # Triton takes an argument of 1 for a constant
        found[f"experts of int8, one output, {tokens} tokens"] = partial(coded_layer, "int8 by rows", tokens, 1, 1)
    return found


def product_launches() -> dict[str, Callable[[], None]]:
    """Products with a weight: each tile of one row, and each of those that heed no batch."""
    found: dict[str, Callable[[], None]] = {}
    for outputs, inputs in ((6144, 4096), (151936, 4096), (1024, 1024), (151936, 1024), (1000, 72)):
        name = f"{outputs} x {inputs}"
        found[f"one row, {name}"] = partial(one_row, outputs, inputs)
        found[f"one gated row, {name}"] = partial(gated_row, outputs, inputs)
    found["one row, bias"] = partial(one_row, 6144, 4096, bias=True)
    found["one gated row, bias"] = partial(gated_row, 11008, 4096, bias=True)
    found["one row, one output"] = partial(one_row, 1, 8)  # Triton takes an argument of 1 for a constant
    found["one gated row, one output"] = partial(gated_row, 1, 8, bias=True)
    for inputs in (72, 1024, 2048, 4096, 8192):
        found[f"one normed row, {inputs} inputs"] = partial(normed_row, 6144, inputs)
    found["one normed row, offset, bias"] = partial(normed_row, 6144, 4096, offset=1.0, bias=True)
    found["one normed row, one output"] = partial(normed_row, 1, 8)
    for dtype in (F16, F32):
        found[f"one row, {dtype}"] = partial(one_row, 6144, 4096, dtype)
        found[f"one normed row, {dtype}"] = partial(normed_row, 11008, 4096, dtype)
        found[f"one gated row, {dtype}"] = partial(gated_row, 11008, 4096, dtype)
        found[f"deterministic, {dtype}"] = partial(invariant, 300, 4096, 4096, dtype, bias=True)
    for rows, outputs in ((1, 4096), (100, 6144), (100, 151936), (400, 1024), (400, 6144), (400, 151936), (8192, 6144)):
        found[f"deterministic, {rows} rows, {outputs} outputs"] = partial(tiled, rows, outputs, 4096)
    found["deterministic, bias"] = partial(tiled, 8192, 6144, 4096, bias=True)
    found["deterministic, uneven depth"] = partial(tiled, 400, 6144, 4104)
    found["deterministic, no bulk copies"] = partial(invariant, 400, 6144, 4097)
    found["deterministic, float32, uneven depth"] = partial(invariant, 400, 6144, 4097, F32)
    return found


def tabled(rows: int, group: int, scales: torch.dtype = F32, *, numbered: bool = False) -> None:
    """A product with a weight of nibbles from a table."""
    given = _empty(6144, 512, dtype=torch.int32), _empty(6144, 4096 // group, dtype=scales), _empty(16, dtype=F32)
    weight = Nibbles(*given, _empty(6144, 1, dtype=F32) if numbered else None)
    nibble_rows.product(_empty(rows, 4096), weight, _empty(6144) if rows > 1 else None)


def superblocks(rows: int, kind: str) -> None:
    """A product with a weight whose scales are codes too; of no rows, the weight itself."""
    tensors = {}
    for name, (size, dtype) in sizes_of(kind, 4096).items():
        tensors[name] = _empty(6144, *size, dtype=dtype)
    table = _empty(16, dtype=F32) if kind in TABLES else None
    weight = Nibbles(tensors.pop("low"), tensors.pop("scales"), table, zero=SUPER[kind].zero, **tensors)
    if rows:
        nibble_rows.product(_empty(rows, 4096), weight, _empty(6144))
    else:
        dequantize(weight, BF16)


def nibble_launches() -> dict[str, Callable[[], None]]:
    """Products of nibbles from a table, and with scales that are codes."""
    found: dict[str, Callable[[], None]] = {}
    for rows in (1, 16, 32, 64):
        found[f"nf4, {rows} rows"] = partial(tabled, rows, 64)
        found[f"mxfp4, {rows} rows"] = partial(tabled, rows, 32, torch.uint8)
        for kind in SUPER:
            found[f"{kind}, {rows} rows"] = partial(superblocks, rows, kind)
    for kind in SUPER:
        found[f"{kind}, put together"] = partial(superblocks, 0, kind)
    return found


def fragments(rows: int, codes: torch.dtype, group: int, sizes: Fragments, *, zeros: bool = False) -> None:
    """A product in the registers of matrix instructions."""
    weight = _empty(6144, 512 if codes == torch.int32 else 4096, dtype=codes)
    scales = _empty(6144, 4096 // group, dtype=F16 if codes == torch.int32 else F32)
    zero = _empty(*scales.shape, dtype=torch.uint8) if zeros else None
    coded_fragments.product(_empty(rows, 4096), weight, scales, (1, group), zero, _empty(6144), sizes)


def warpgroups(rows: int, codes: torch.dtype, group: int, sizes: Warpgroups, *, zeros: bool = False) -> None:
    """As `fragments`, whose rows come from shared memory."""
    weight = _empty(6144, 512 if codes == torch.int32 else 4096, dtype=codes)
    scales = _empty(6144, 4096 // group, dtype=F16 if codes == torch.int32 else F32)
    zero = _empty(*scales.shape, dtype=torch.uint8) if zeros else None
    coded_warpgroups.product(_empty(rows, 4096), weight, scales, (1, group), zero, _empty(6144), sizes)


def ringed(depth: int, sizes: Ring) -> None:
    """A product of one row with codes from a ring of copies."""
    coded_ring.product(
        _empty(1, depth),
        _empty(6144, depth, dtype=torch.float8_e4m3fn),
        _empty(6144, 1, dtype=F32),
        _empty(6144),
        sizes,
    )


def rounded(rows: int, depth: int, tile: RoundedTile) -> None:
    """A product of rounded rows with codes from a ring of copies, with bias and without."""
    codes, scales = _empty(6144, depth, dtype=torch.float8_e4m3fn), _empty(6144, 1, dtype=F32)
    rounded_hopper.product(_empty(rows, depth), codes, scales, _empty(6144), tile=tile)
    rounded_hopper.product(_empty(rows, depth), codes, scales, tile=tile)


def halved(rows: int, group: int, tile: NibbleTile | None = None, *, zeros: bool = False, outputs: int = 6144) -> None:
    """A product of rows in two halves with nibbles from a ring of copies, with bias and without."""
    codes, scales = _empty(outputs, 512, dtype=torch.int32), _empty(outputs, 4096 // group, dtype=F16)
    zero = _empty(*scales.shape, dtype=torch.uint8) if zeros else None
    for bias in (_empty(outputs), None):
        nibbles_hopper.product(_empty(rows, 4096), codes, scales, (1, group), zero, bias, tile)


def fragment_launches() -> dict[str, Callable[[], None]]:
    """Products in the registers of matrix instructions, by type of codes, rows and sizes; for Hopper."""
    found: dict[str, Callable[[], None]] = {}
    for rows, sizes in ((1, Fragments(1, 1, 8, 2)), (16, Fragments(1, 2, 4, 2)), (64, Fragments(1, 4, 2, 1))):
        for name, codes, group in (("nibbles", torch.int32, 128), ("fp8", torch.float8_e4m3fn, 4096)):
            found[f"fragments of {name}, {rows} rows"] = partial(fragments, rows, codes, group, sizes)
    for rows, wide in ((16, Warpgroups(8, 1, 2)), (64, Warpgroups(8, 4, 1))):
        for name, codes, group in (("nibbles", torch.int32, 128), ("fp8", torch.float8_e4m3fn, 4096)):
            found[f"warpgroups of {name}, {rows} rows"] = partial(warpgroups, rows, codes, group, wide)
    for group in (32, 64, 4096):
        found[f"warpgroups of nibbles by {group}, zeros, 40 rows"] = partial(
            warpgroups, 40, torch.int32, group, Warpgroups(4, 1, 1), zeros=True
        )
        found[f"fragments of nibbles by {group}, zeros, 5 rows"] = partial(
            fragments, 5, torch.int32, group, Fragments(1, 1, 4, 2), zeros=True
        )
    for depth, sizes in ((4096, Ring(4, 2)), (14336, Ring(8, 1))):
        found[f"ring of fp8, {depth} inputs"] = partial(ringed, depth, sizes)
    for tokens, rank in ((64, 16), (17, 32), (8, 64)):
        found[f"few adapters, {tokens} tokens, rank {rank}"] = partial(adapted, tokens, rank, 6144, BF16, few=True)
    for rows in (2, 17, 64):
        found[f"products of rounded rows, {rows} rows"] = partial(rounded, rows, 4096, TILE)
    for rows in (9, 32, 64):
        for group in (32, 64, 128, 4096):
            name = f"products of halves with nibbles by {group}"
            found[f"{name}, {rows} rows"] = partial(halved, rows, group)
            found[f"{name}, zeros, {rows} rows"] = partial(halved, rows, group, zeros=True)
        found[f"products of halves with nibbles, {rows} rows, one output"] = partial(halved, rows, 128, outputs=1)
    for halves in (NibbleTile(2, 1, 6), NibbleTile(2, 2, 3), NibbleTile(1, 1, 8), NibbleTile(2, 1, 6, whole=True)):
        found[f"products of halves with nibbles, {halves}"] = partial(halved, 64, 128, halves, outputs=28672)
    found["products of halves with nibbles, wide, zeros"] = partial(
        halved, 64, 128, NibbleTile(2, 1, 6), zeros=True, outputs=28672
    )
    return found


def quantized_launches() -> dict[str, Callable[[], None]]:
    """Products with quantised weights, by type of codes, block and number of rows; those of floats are for Hopper."""
    found: dict[str, Callable[[], None]] = {}
    blocks = {"rows": (1, 4096), "groups": (1, 128), "small groups": (1, 32), "blocks": (128, 128)}
    for codes, kind in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8"), (torch.int32, "nibbles")):
        for name, block in blocks.items():
            if codes == torch.int32 and block[0] > 1:
                continue
            for rows in (1, 64):
                found[f"{kind} by {name}, {rows} rows"] = partial(coded, rows, codes, block)
            if codes != torch.int32:
                found[f"{kind} by {name}, 4096 rounded rows"] = partial(coded, 4096, codes, block, rounds=True)
            if kind == "fp8" and name in ("rows", "blocks"):
                found[f"{kind} by {name}, 33 rounded rows"] = partial(coded, 33, codes, block, rounds=True)
            found[f"{kind} by {name}, dequantised"] = partial(coded, 0, codes, block)
    found["nibbles with zeros, 5 rows"] = partial(coded, 5, torch.int32, (1, 128), zeros=True)
    found["int8 with zeros, 5 rows"] = partial(coded, 5, torch.int8, (1, 128), zeros=True)
    found["fp8 scales of nibbles, 8 rows"] = partial(tabled, 8, 16, torch.float8_e4m3fn, numbered=True)
    return found


def hopper_products() -> dict[str, Callable[[], None]]:
    """Products of many rows that heed no batch: by number of rows, gated, and in every tile."""
    found: dict[str, Callable[[], None]] = {}
    for rows, outputs in ((256, 4096), (512, 4096), (8192, 6144)):
        found[f"many rows, {rows} x {outputs}"] = partial(invariant, rows, outputs, 4096)
    for rows, size in ((130, 1024), (8192, 14336)):
        found[f"many gated rows, {rows} x {size}"] = partial(gated_invariant, rows, size, 4096)
    found["many rows, float16, bias"] = partial(invariant, 8192, 6144, 4104, F16, bias=True)
    found["many gated rows, float16, bias"] = partial(gated_invariant, 8192, 11008, 4104, F16, bias=True)
    found["many ordinary rows"] = lambda: ordinary(CudaOps("all").linear)
    found["many ordinary gated rows"] = lambda: ordinary(CudaOps("all").linear_silu_mul)
    found["many gated rows, one output"] = partial(gated_invariant, 300, 1, 8)  # the twin's
    for tile in linear_hopper.CANDIDATES:
        name = f"{tile.block_n} outputs, {tile.stages} stages, {tile.parts} parts, groups of {tile.group}"
        found[f"many rows, {name}"] = partial(hopper_tile, tile)
        if tile.block_n > 64:
            found[f"many gated rows, {name}"] = partial(hopper_tile, tile, gated=True)
    return found


def rows_launches() -> dict[str, Callable[[], None]]:
    """Products of some rows: of layers, of sizes that fit nothing, as steps choose, and in every tile."""
    found: dict[str, Callable[[], None]] = {}
    for outputs, inputs in ((6144, 1024), (5120, 2048), (128, 2048), (4096, 14336), (1000, 64)):
        found[f"some rows, {outputs} x {inputs}"] = partial(some_rows, 8, outputs, inputs)
        found[f"some gated rows, {outputs} x {inputs}"] = partial(some_rows, 8, outputs, inputs, gated=True)
    found["some rows, float16, bias"] = partial(some_rows, 2, 4096, 1024, F16, bias=True)
    found["some gated rows, float16, bias"] = partial(some_rows, 2, 6144, 1024, F16, gated=True, bias=True)
    found["some rows, one output"] = partial(some_rows, 5, 1, 64)  # Triton takes an argument of 1 for a constant
    found["some gated rows, one output"] = partial(some_rows, 5, 2, 64, gated=True)
    found["some ordinary rows"] = lambda: ordinary(CudaOps().linear, 5, 28672)
    found["some ordinary gated rows"] = lambda: ordinary(CudaOps().linear_silu_mul, 5, 28672)
    for tile in linear_rows.CANDIDATES:
        for kind, gated in (("", False), ("gated ", True)):
            found[f"sixteen {kind}rows, {tile.warps} warps, {tile.stages} stages"] = partial(
                some_rows, 16, 6144, 4096, gated=gated, tile=tile
            )
    return found


def hopper_experts() -> dict[str, Callable[[], None]]:
    """Experts with many rows each: as ordinary steps choose, of another type, and in every tile."""
    found: dict[str, Callable[[], None]] = {}
    shape = EXPERTS["128 experts"]
    for tokens in (1024, 8192):
        found[f"many rows of 128 experts, {tokens} tokens"] = partial(grouped_tile, tokens, shape, BF16)
    for place, gating in enumerate(GATINGS):
        found[f"many rows of experts with gating {place}"] = partial(gated_experts, 4096, gating, hopper=True)
    found["many rows of 8 experts, float16"] = partial(grouped_tile, 512, EXPERTS["8 experts"], F16)
    for tile in experts_hopper.CANDIDATES:
        name = f"{tile.block_n} outputs, {tile.stages} stages, {tile.parts} parts, groups of {tile.group}"
        name += ", gathered" * tile.gathers + ", drawn" * tile.draws
        found[f"many rows of experts, {name}"] = partial(grouped_tile, 8192, shape, BF16, tile)
    found["weights of nvfp4"] = partial(tables, "nvfp4")
    return found


def merges(ranks: int, dim: int) -> None:
    """Parts of a context, as they came from other ranks with their log-sum-exps."""
    came = _empty(ranks, 64, 8, dim + 2)
    merge.merge_parts(came[..., :dim], _empty(ranks, 64, 8, dtype=F32))


def small_launches() -> dict[str, Callable[[], None]]:
    """Norms, rotary embeddings, activations and the choice of experts."""
    found: dict[str, Callable[[], None]] = {"norms with an offset": partial(norms, 2304, offset=1.0)}
    found["sums over 2 ranks, 5120"] = partial(sums, 2, 5120)
    found["copied sums, 5120"] = partial(copied_sums, 5120)
    found["copied sums, float32, offset"] = partial(copied_sums, 4096, F32, 1.0)
    found["sums over 8 ranks, offset"] = partial(sums, 8, 8192, offset=1.0)
    found["exchange of 8 experts over 2 ranks, 2048"] = partial(exchanges, 2, 2048, 8)
    found["exchange of 6 experts over 8 ranks, 7168"] = partial(exchanges, 8, 7168, 6)
    for unit in (1, 2, 4, 8, 16):
        found[f"copied blocks, words of {unit} bytes"] = partial(copied_blocks, unit)
    for dtype in block_copies.CHECKED:
        found[f"copied blocks of {dtype}"] = partial(copied_blocks, 16, dtype)
    for dtype in (F16, F32):
        found[f"exchange over 4 ranks, {dtype}"] = partial(exchanges, 4, 2880, 4, dtype)
        found[f"sums over 4 ranks, {dtype}"] = partial(sums, 4, 4096, dtype)
    for size in (1024, 4096, 8192):
        found[f"norms of {size}"] = partial(norms, size)
    for ranks, dim in ((2, 128), (8, 80), (4, 256)):
        found[f"merged parts of {ranks} ranks, heads of {dim}"] = partial(merges, ranks, dim)
    for dtype in (BF16, F16, F32):
        found[f"activations, {dtype}"] = partial(gates, dtype)
    for dtype in (F16, F32):
        found[f"norms, {dtype}"] = partial(norms, 4096, dtype)
        found[f"rotary, {dtype}"] = partial(rotations, 64, 128, 128, dtype)
    for tokens in (64, 4096):
        for dim, turned in ((128, 128), (80, 32), (256, 256)):
            found[f"rotary, {tokens} tokens, {turned} of {dim}"] = partial(rotations, tokens, dim, turned)
    found["rotary, interleaved"] = partial(rotations, 64, 128, 128, interleaved=True)
    found["rotary, three axes"] = partial(rotations, 64, 128, 128, axes=3)
    found["rotary, offset"] = partial(rotations, 64, 256, 256, offset=1.0)
    for heads in (4, 16, 20, 128):
        found[f"latents and {heads} heads turned"] = partial(turned_latents, 64, heads)
    found["latents and 16 heads turned, halves"] = partial(turned_latents, 64, 16, interleaved=False, scale=0.5)
    found["latents and 16 heads turned, three axes"] = partial(turned_latents, 64, 16, rank=256, axes=3)
    found["latents and 16 heads turned, a part"] = partial(turned_latents, 64, 16, turned=24, offset=1.0)
    for dtype in (F16, F32):
        found[f"latents and 16 heads turned, {dtype}"] = partial(turned_latents, 64, 16, dtype)
    found["rotary, interleaved, 4096 tokens"] = partial(rotations, 4096, 64, 64, interleaved=True)
    for num_experts, top_k in ((8, 2), (160, 6), (512, 10)):
        found[f"{top_k} of {num_experts} experts"] = partial(choices, num_experts, top_k)
    found["routers of families"] = routers
    for kind in ("mxfp4", "nf4"):
        found[f"weights of {kind}"] = partial(tables, kind)
    found["weights of mxfp4, of bits"] = partial(tables, "mxfp4", is_float4=True)
    for tokens, rank, outputs in ((64, 16, 6144), (2048, 64, 4096), (1, 8, 512), (8, 256, 4096)):
        found[f"adapters, {tokens} tokens, rank {rank}"] = partial(adapted, tokens, rank, outputs, BF16)
    for tokens, rank, halves in ((1, 16, False), (64, 16, True), (64, 16, False), (2048, 64, True), (8192, 16, False)):
        name = f"adapters behind a product, {tokens} tokens, rank {rank}{', halves' * halves}"
        found[name] = partial(joined, tokens, rank, halves)
    for tokens, name in ((64, "128 experts"), (4096, "128 experts"), (8, "6 experts")):
        found[f"adapters of {name}, {tokens} tokens"] = partial(adapted_experts, tokens, name)
    found["adapters, float32"] = partial(adapted, 8, 16, 512, F32)
    return found


def copied_blocks(unit: int, dtype: torch.dtype | None = None) -> None:
    """Blocks of KV from another GPU, or to the host with a look at what they hold."""
    finite = None if dtype is None else _empty(9, dtype=torch.bool)
    block_copies.copy_pieces(_empty(1000, 4, dtype=torch.int64), 64 << 10, unit, finite=finite, dtype=dtype)


def adapted(tokens: int, rank: int, outputs: int, dtype: torch.dtype, *, few: bool = False) -> None:
    """What the adapters of a layer of three parts add, with 8 slots; `few`: by the kernels of few slots."""
    spans = _empty(-(-outputs // adapters.SPAN), 3, dtype=torch.int32)
    weights = AdapterWeights(_empty(8, 3 * rank, 4096, dtype=dtype), _empty(8, outputs, rank, dtype=dtype), spans, ())
    numbers = [_empty(size, dtype=torch.int32) for size in (tokens, tokens, 10)]
    y, x = _empty(tokens, outputs, dtype=dtype), _empty(tokens, 4096, dtype=dtype)
    if few:
        few_adapters.add_adapters(y, x, weights, SlotGroups(*numbers), 1024)
        return
    with patch.object(adapters, "FEW", {}):
        adapters.add_adapters(y, x, weights, SlotGroups(*numbers))
    of_rows = _empty(9, dtype=torch.int32)
    adapters.spread_slots(numbers[0], of_rows, of_rows[:4], of_rows[:5], tokens)


def joined(tokens: int, rank: int, halves: bool) -> None:
    """What adapters add to a product of two parts that multiplied their first matrices, too, with 8 slots."""
    spans = _empty(6144 // adapters.SPAN, 3, dtype=torch.int32)
    weights = AdapterWeights(_empty(8, 2 * rank, 4096), _empty(8, 6144, rank), spans, ())
    numbers = [_empty(size, dtype=torch.int32) for size in (tokens, tokens, 10)]
    both = _empty(tokens, 6144 + 16 * rank)
    joined_adapters.add_joined_adapters(both, weights, SlotGroups(*numbers), halves=halves)


def adapted_experts(tokens: int, name: str, dtype: torch.dtype = BF16) -> None:
    """Experts and what 4 slots of rank 16 add to both of their products."""
    number, top_k, hidden, inner = EXPERTS[name]
    rank = 16
    sizes = (2 * rank, hidden), (2 * inner, rank), (rank, inner), (hidden, rank)
    tables = ExpertAdapters(*(_empty(4, number, *size, dtype=dtype) for size in sizes))
    gate_up, down = _empty(number, 2 * inner, hidden, dtype=dtype), _empty(number, hidden, inner, dtype=dtype)
    weights, ids = _empty(tokens, top_k, dtype=F32), _empty(tokens, top_k, dtype=torch.int32)
    given = _empty(tokens, hidden, dtype=dtype), gate_up, down, weights, ids, tables
    expert_adapters.adapted_experts(*given, _empty(tokens, dtype=torch.int32))


def tables(kind: str, dtype: torch.dtype = BF16, *, is_float4: bool = False) -> None:
    """Weights of nibbles from a table: of a few experts, with a scale for each 32, 16 or 64 columns."""
    scales, group = {"mxfp4": (torch.uint8, 32), "nvfp4": (torch.float8_e4m3fn, 16), "nf4": (F32, 64)}[kind]
    numbers = _empty(4, 5760, 1, dtype=F32) if kind == "nvfp4" else None
    given = _empty(4, 5760, 360, dtype=torch.int32), _empty(4, 5760, 2880 // group, dtype=scales)
    dequantize_table(*given, _empty(16, dtype=F32), numbers, dtype, is_float4=is_float4)


def routers() -> None:
    """The choice of experts by every kind of router."""
    for spec in ROUTERS:
        bias = _empty(spec.num_experts, dtype=F32) if spec.corrected else None
        routing.route(_empty(64, spec.num_experts, dtype=BF16), spec, bias)


def choices(num_experts: int, top_k: int) -> None:
    """The choice of experts, their replicas, and the sorting of few and many tokens by expert."""
    ids, slots_of = _empty(64, top_k, dtype=torch.int32), _empty(num_experts, 9, dtype=torch.int32)
    loads, mapping = _empty(num_experts + 8, dtype=torch.int32), _empty(64, dtype=torch.int64)
    for given in (mapping, None):
        routing.place_experts(ids, slots_of, loads[:num_experts], loads, given)
    for dtype, renormalize in ((BF16, True), (BF16, False), (F32, True)):
        spec = RouterSpec(num_experts, top_k, renormalize=renormalize)
        routing.route(_empty(64, num_experts, dtype=dtype), spec)
    for tokens in (1, 64, 8192):
        routing.align(_empty(tokens, top_k, dtype=torch.int32), range(num_experts), 64)
