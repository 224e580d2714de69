"""Small inputs for every op, so that a platform's own versions can be compared with the references.

A case is a function that makes the arguments on the CPU, the same every time. Ops that change an argument in place are
compared by their arguments afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from frame.core.interfaces.experts import SILU, Gating, RouterSpec
from frame.core.ops.adapters import AdapterWeights, ExpertAdapters, SlotGroups, group_slots
from frame.core.ops.layers import route
from frame.core.ops.quantized import CodedWeights
from frame.core.ops.states import ScanWeights, StateRows
from frame.core.ops.step import StepBuffers, StepSizes

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
#: The routers of model families: Qwen's, OLMoE's, DeepSeek-V2's and V3's, one with a correction, Llama 4's, ERNIE's,
#: Phi-3.5-MoE's.
ROUTERS = (
    RouterSpec(8, 2),
    RouterSpec(10, 3, renormalize=False),
    RouterSpec(20, 4, renormalize=False, scale=16.0, num_groups=4, top_groups=2),
    RouterSpec(32, 6, "sigmoid", scale=2.5, corrected=True, num_groups=8, top_groups=3, group_score="top2"),
    RouterSpec(12, 3, corrected=True),
    RouterSpec(8, 1, "sigmoid", renormalize=False),
    RouterSpec(12, 3, corrected=True, least_sum=0.4),
    RouterSpec(16, 2, "sparsemixer", renormalize=False, jitter=0.2),
)
#: What is computed between experts' products: Llama's, Gemma's, gpt-oss's, Nemotron's without a gate, and others.
GATINGS = (
    Gating(),
    Gating("gelu_tanh"),
    Gating("gelu", limit=0.9),
    Gating(alpha=1.702, shift=1.0, limit=1.2),
    Gating("relu2", gated=False),
    Gating("relu", gated=False, limit=0.7),
)


class Draw:
    """Random tensors, the same every time; floats in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(0)

    def floats(self, *shape: int) -> Tensor:
        """Normal numbers of the case's dtype."""
        return torch.randn(*shape, generator=self._generator).to(self.dtype)

    def float32(self, *shape: int) -> Tensor:
        """Normal float32 numbers, whatever the case's dtype: what the sampler works in."""
        return torch.randn(*shape, generator=self._generator) * 3

    def ints(self, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Whole numbers from 0 to below `high`."""
        return torch.randint(0, high, shape, generator=self._generator).to(dtype)

    def permutation(self, count: int) -> Tensor:
        """The whole numbers below `count` in any order."""
        return torch.randperm(count, generator=self._generator)


def _rotary(draw: Draw, interleaved: bool, rotary_dim: int) -> Arguments:
    cos_sin = torch.randn(64, rotary_dim, generator=torch.Generator().manual_seed(1))
    query, key = draw.floats(7, 4, 32), draw.floats(7, 2, 32)
    return (query, key, draw.ints(64, 7, dtype=torch.int64), cos_sin), {"interleaved": interleaved}


def _rotary_on_axes(draw: Draw, interleaved: bool) -> Arguments:
    (query, key, _, cos_sin), named = _rotary(draw, interleaved, 24)
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 2, 2], dtype=torch.int32)
    return (query, key, (draw.ints(64, 3, 7, dtype=torch.int64), axes), cos_sin), named


def _latent_rotary(draw: Draw, turned: int, offset: float = 0.0, **named: Any) -> Arguments:
    """Latents of 24 numbers and 16 more, of which `turned` turn, beside those of a query in one product's result."""
    query, latent = draw.floats(7, 3, 36), draw.floats(7, 60)[:, 20:]
    table = torch.randn(64, turned, generator=torch.Generator().manual_seed(1))
    return (query, latent, (draw.floats(24), 1e-6, offset), draw.ints(64, 7, dtype=torch.int64), table), named


def _norm_rotary(draw: Draw, interleaved: bool) -> Arguments:
    (query, key, positions, cos_sin), named = _rotary(draw, interleaved, 32)
    return (query, key, (draw.floats(32), draw.floats(32)), 1e-6, 1.0, positions, cos_sin), named


def _norm_linear(draw: Draw, rows: int, offset: float, bias: Tensor | None = None) -> Arguments:
    x, residual = draw.floats(rows, 32), draw.floats(rows, 32)
    return (x, residual, (draw.floats(32), 1e-6, offset), draw.floats(24, 32), bias), {}


def _write_kv(draw: Draw) -> Arguments:
    slots = torch.tensor([5, 9, -1, 30, 0], dtype=torch.int64)
    return (draw.floats(5, 2, 16), draw.floats(5, 2, 16), draw.floats(2, 8, 4, 2, 16), slots), {}


def _paged_attention(draw: Draw) -> Arguments:
    cache = draw.floats(2, 12, 4, 2, 16)
    query_start = torch.tensor([0, 1, 6, 9], dtype=torch.int32)
    seq_lens = torch.tensor([13, 5, 11], dtype=torch.int32)
    table = torch.tensor([[3, 7, 1, 4], [2, 5, 0, 0], [8, 6, 10, 0]], dtype=torch.int32)
    return (draw.floats(9, 4, 16), cache, query_start, seq_lens, table), {"scale": 0.25, "window": 6, "soft_cap": 5.0}


def _draw(draw: Draw, filtered: bool) -> Arguments:
    logits = draw.float32(6, 300)
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.5, 1.0, 0.7])
    streams = torch.tensor([1, -(2**62), 77, 2**61, 5, 9], dtype=torch.int64)
    positions = draw.ints(1000, 6, dtype=torch.int64)
    if not filtered:
        return (logits, temperature, streams, positions), {}
    top_k = torch.tensor([0, 5, 1, 300, 40, 0], dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.2, 1.0])
    return (logits, temperature, streams, positions, top_k, top_p, torch.tensor([0.0, 0.05, 0, 0.1, 0, 0.3])), {}


def _best_of_part(draw: Draw, random: bool) -> Arguments:
    (logits, *noise), _ = _draw(draw, False)
    return (logits, 900, *(noise if random else ())), {}


def _join_parts(draw: Draw) -> Arguments:
    """Three parts of rows with ties, NaN, and nothing that is finite."""
    scores = draw.float32(3, 7).round()
    scores[:, 1], scores[1:, 2], scores[:, 3], scores[2, 4] = 1.0, float("nan"), float("-inf"), float("inf")
    words = (scores.view(torch.int32), draw.ints(1000, 3, 7), draw.float32(3, 7).view(torch.int32))
    return (torch.stack([one.to(torch.int32) for one in words], 1),), {}


def _penalize(draw: Draw, *places: int) -> Arguments:
    rows = torch.tensor(places, dtype=torch.int64)
    counts = draw.ints(3, 3, 50)
    penalties = (torch.tensor([1.2, 1.0, 0.8]), torch.tensor([0.5, 0.0, -1.0]), torch.tensor([0.0, 0.3, 1.0]))
    return (draw.float32(4, 50), rows, draw.ints(2, 3, 50).bool(), counts, *penalties), {}


def _merge_parts(draw: Draw) -> Arguments:
    lses = draw.float32(3, 5, 4)
    lses[1, 2], lses[:, 4] = float("-inf"), float("-inf")
    return (draw.floats(3, 5, 4, 16), lses), {}


def _route(draw: Draw, spec: RouterSpec) -> Arguments:
    """Logits that differ by enough for every type to order them alike."""
    logits = torch.stack([draw.permutation(spec.num_experts) for _ in range(6)]).to(draw.dtype) / 8
    return (logits, spec, draw.float32(spec.num_experts) if spec.corrected else None), {}


def adapted_experts_case(
    draw: Draw, slots: Sequence[int], first: int = 0, rank: int = 8, gating: Gating | None = None
) -> Arguments:
    """The experts of `_experts`, or those of `_gated_experts`, for tokens of these six slots."""
    given, how = _experts(draw, first) if gating is None else _gated_experts(draw, gating)
    num_slots, halves = max(slots) + 1, given[1].shape[1] // 12
    sizes = (halves * rank, 16), (halves * 12, rank), (rank, 12), (16, rank)
    adapters = ExpertAdapters(*(draw.floats(num_slots, 4, *size) / 4 for size in sizes))
    return (*given, adapters, torch.tensor(slots, dtype=torch.int32)), how


def _places(draw: Draw, padded: bool) -> Arguments:
    """Experts with one, two and three replicas; some tokens are padding."""
    ids = draw.ints(3, 7, 2)
    ids[0, 0] = -1
    slots_of = torch.tensor([[4, -1, -1], [0, 5, -1], [2, 1, 3]], dtype=torch.int32)
    mapping = torch.tensor([3, 4, -1, 5, 6, -1, 7]) if padded else None
    given = torch.tensor([1, 2, 3], dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    return (ids, slots_of, *given, mapping), {}


def _experts(draw: Draw, first: int) -> Arguments:
    """Four experts from number `first` on, beside those of other ranks."""
    ids = draw.ints(4 + 2 * first, 6, 2)
    ids[0, 0] = -1
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(2))
    given = draw.floats(6, 16), draw.floats(4, 24, 16), draw.floats(4, 16, 12), weights, ids
    return given, {"first": first} if first else {}


def _gated_experts(draw: Draw, gating: Gating) -> Arguments:
    """Four experts with biases."""
    (hidden, _, down, weights, ids), _ = _experts(draw, 0)
    inner = 24 if gating.gated else 12
    biases = draw.floats(4, inner), draw.floats(4, 16)
    return (hidden, draw.floats(4, inner, 16), down, weights, ids), {"gating": gating, "biases": biases}


def _write_rows(draw: Draw) -> Arguments:
    slots, starts = torch.tensor([2, 0, 2], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
    lengths = torch.tensor([3, 1, 2], dtype=torch.int32)
    return (draw.ints(9, 4, 8), slots, starts, lengths, draw.ints(99, 6)), {}


def _padded_rows(draw: Draw, *lengths: int) -> Arguments:
    """Padding runs have slot -1 and length 0, and the values end with some that belong to no run."""
    padding = [0] * (4 - len(lengths))
    slots = torch.tensor([[2, 0, 1][: len(lengths)] + [-1 for _ in padding]], dtype=torch.int32)[0]
    starts = torch.tensor([[1, 3, 4][: len(lengths)] + padding], dtype=torch.int32)[0]
    return (draw.ints(9, 4, 8), slots, starts, torch.tensor([*lengths, *padding], dtype=torch.int32),
            draw.ints(99, 4)), {}  # fmt: skip


def _build_inputs(draw: Draw, padded_tokens: int, padded_rows: int, num_groups: int) -> Arguments:
    """The buffers are as large as the step, so that the op defines every element but the tables of padding rows."""
    rows = torch.zeros(3, padded_rows, dtype=torch.int32)
    rows[:, :3] = torch.tensor([[3, 0, 2], [8, 4, 9], [1, 7, 2]], dtype=torch.int32)
    tables = [draw.ints(50, 4, 3) for _ in range(num_groups)]
    for table in tables:
        table[0] = 0  # the slot that padding names
    buffers = StepBuffers.allocate(padded_tokens, padded_rows, [3] * num_groups, torch.device("cpu"))
    sizes = StepSizes(padded_tokens, [3] * num_groups, [4 << group for group in range(num_groups)])
    return (buffers, draw.ints(500, 4, 16), tables, rows, sizes), {}


def _advance(draw: Draw) -> Arguments:
    slots, lengths = torch.tensor([[3, 0, 1, -1, -1], [5, 3, 7, 0, 2]], dtype=torch.int32)
    return (draw.ints(9, 4, 8), slots, lengths, torch.tensor([8, -1, 4, 5, 6])), {}


def _sparse(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    rows, ids = torch.tensor([0, 0, 2], dtype=torch.int64), torch.tensor([3, 49, 3], dtype=torch.int64)
    return draw.float32(3, 50), rows, ids


def _codes(draw: Draw, bits: int, block: tuple[int, int]) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Whole numbers [40, 48] of few digits, so that a platform that rounds the other factor is close, and scales."""
    codes = draw.ints(2**bits - 1, 40, 48, dtype=torch.int32).sub_(2 ** (bits - 1) - 1).to(torch.int8)
    scales = draw.float32(-(-40 // block[0]), -(-48 // block[1])).abs().add_(0.5) / 2**bits
    return codes, scales, block


def _coded(draw: Draw, kind: str, rows: int, columns: int) -> CodedWeights:
    """Weights of four experts, of size one: codes of `kind` with scales of 16 columns or of a whole row."""
    if kind == "bytes":
        codes = draw.ints(255, 4, rows, columns, dtype=torch.int32).sub_(127).to(torch.int8)
        return CodedWeights(codes, draw.float32(4, rows, 1).abs().add_(0.5) / 512, (1, columns))
    codes, group = draw.ints(2**31 - 1, 4, rows, columns // 8), (1, 16)
    zeros = draw.ints(16, 4, rows, columns // 16, dtype=torch.uint8)
    if kind == "nibbles":
        return CodedWeights(codes, draw.float32(4, rows, columns // 16).abs().add_(0.5) / 32, group, zeros)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scales = draw.ints(3, 4, rows, columns // 16, dtype=torch.uint8).add_(123)
    return CodedWeights(codes, scales, group, None, torch.cat((table, -table)), is_float4=True)


def _coded_experts(draw: Draw, kind: str, tokens: int, gating: Gating = SILU, first: int = 0) -> Arguments:
    weights, ids = route(draw.float32(tokens, 6), RouterSpec(6, 2))
    down = _coded(draw, kind, 48, 32)
    if kind == "floats":  # one of two ranks, which share a group
        down = replace(down, columns=slice(8, 32))
    inner = 32 if down.columns is None else 24
    given = draw.floats(tokens, 48), _coded(draw, kind, inner * (2 if gating.gated else 1), 48), down, weights, ids
    biases = draw.floats(*given[1].codes.shape[:2]), draw.floats(4, 48)
    return given, {"gating": gating, "biases": biases, "of_all": 6, "first": first}


def _nibbles(draw: Draw, groups: int) -> tuple[Tensor, Tensor]:
    return draw.ints(2**31 - 1, 40, 6), draw.float32(40, groups).abs().add_(0.5) / 16


#: Rows that begin, that go on, of one token and of many, and padding.
STATE_ROWS = ((37, True, 3), (1, False, 1), (70, False, 6), (0, True, 0), (5, True, 2))
DECODE_ROWS = ((1, False, 4), (1, True, 2), (1, False, 1), (0, True, 0))


def _state_rows(given: Sequence[tuple[int, bool, int]]) -> StateRows:
    lengths, begins, blocks = zip(*given, strict=True)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return StateRows(starts, torch.tensor(blocks, dtype=torch.int32), torch.tensor(begins), max(lengths))


def _state(draw: Draw, *shape: int) -> Tensor:
    state = draw.float32(7, *shape) / 3
    state[0] = 0
    return state


def _conv(draw: Draw, given: Sequence[tuple[int, bool, int]]) -> Arguments:
    rows = _state_rows(given)
    state = _state(draw, 24, 3).to(draw.dtype)
    return (draw.floats(int(rows.query_start[-1]), 24), draw.floats(24, 4), draw.floats(24), state, rows), {}


def _ssd(draw: Draw, given: Sequence[tuple[int, bool, int]]) -> Arguments:
    rows = _state_rows(given)
    count = int(rows.query_start[-1])
    weights = ScanWeights(-draw.float32(4).abs() - 0.1, draw.float32(4), draw.float32(4), (0.01, 2.0))
    inputs = (draw.floats(count, 4, 16), draw.floats(count, 4), draw.floats(count, 2, 32), draw.floats(count, 2, 32))
    return (*inputs, weights, _state(draw, 4, 16, 32), rows), {}


def _selective(draw: Draw, given: Sequence[tuple[int, bool, int]]) -> Arguments:
    rows = _state_rows(given)
    count = int(rows.query_start[-1])
    weights = ScanWeights(-draw.float32(24, 16).abs() - 0.1, draw.float32(24), draw.float32(24))
    inputs = (draw.floats(count, 24), draw.floats(count, 24), draw.floats(count, 16), draw.floats(count, 16))
    return (*inputs, weights, _state(draw, 24, 16), rows), {}


def _delta(draw: Draw, given: Sequence[tuple[int, bool, int]], *features: int) -> Arguments:
    rows = _state_rows(given)
    count = int(rows.query_start[-1])
    query, key, value = (draw.floats(count, heads, 16) for heads in (2, 2, 4))
    decay, beta = -draw.float32(count, 4, *features).abs() / 8, draw.floats(count, 4).sigmoid()
    return (query, key, value, decay, beta, _state(draw, 4, 16, 16), rows), {}


def adapters_case(draw: Draw, slots: Sequence[int], parts: Sequence[tuple[int, int]], rank: int = 8) -> Arguments:
    """Tokens of these slots, in a layer of parts: (outputs, number of the tensor), each of which is a span."""
    num_slots, width = max(slots) + 1, 48
    ends = list(accumulate(size for size, _ in parts))
    runs = tuple((end - size, end, part) for end, (size, part) in zip(ends, parts, strict=True))
    down = draw.floats(num_slots, (max(part for _, part in parts) + 1) * rank, width)
    weights = AdapterWeights(down, draw.floats(num_slots, ends[-1], rank), torch.tensor(runs, dtype=torch.int32), runs)
    groups = SlotGroups.allocate(len(slots) + 3, num_slots, torch.device("cpu"))
    groups.slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    group_slots(groups, len(slots))
    return (draw.floats(len(slots), ends[-1]), draw.floats(len(slots), width) / 8, weights, groups), {}


def joined_adapters_case(
    draw: Draw, slots: Sequence[int], parts: Sequence[tuple[int, int]], rank: int = 8, *, halves: bool = False
) -> Arguments:
    """As `adapters_case`, of tokens that one product with the layer's weight and all `down` has multiplied."""
    (y, x, weights, groups), _ = adapters_case(draw, slots, parts, rank)
    return (torch.cat((y, x @ weights.down.flatten(0, 1).t()), 1), weights, groups), {"halves": halves}


def _group_slots(draw: Draw) -> Arguments:
    groups = SlotGroups.allocate(9, 3, torch.device("cpu"))
    groups.slots[:] = draw.ints(4, 9)
    return (groups, 9), {}


CASES: Mapping[str, Sequence[Callable[[Draw], Arguments]]] = {
    "rms_norm": [lambda d: ((d.floats(5, 32), d.floats(32), 1e-6), {}),
                 lambda d: ((d.floats(5, 3, 32), d.floats(32), 1e-6, 1.0), {})],
    "add_rms_norm": [lambda d: ((d.floats(5, 32), d.floats(5, 32), d.floats(32), 1e-6), {})],
    "layer_norm": [lambda d: ((d.floats(5, 32), d.floats(32), d.floats(32), 1e-5), {}),
                   lambda d: ((d.floats(5, 32), d.floats(32), None, 1e-5), {})],
    "silu_mul": [lambda d: ((d.floats(5, 64),), {})],
    "gelu_tanh_mul": [lambda d: ((d.floats(5, 64),), {})],
    "rotary": [lambda d: _rotary(d, False, 32), lambda d: _rotary(d, False, 16), lambda d: _rotary(d, True, 32),
               lambda d: _rotary_on_axes(d, False), lambda d: _rotary_on_axes(d, True)],
    "norm_rotary": [lambda d: _norm_rotary(d, False), lambda d: _norm_rotary(d, True)],
    "latent_rotary": [lambda d: _latent_rotary(d, 16), lambda d: _latent_rotary(d, 16, interleaved=True, scale=0.37),
                      lambda d: _latent_rotary(d, 8, 1.0), lambda d: _latent_rotary(d, 12, interleaved=True)],
    "lookup": [lambda d: ((d.ints(24, 5), d.floats(24, 32)), {})],
    "linear": [lambda d: ((d.floats(5, 32), d.floats(24, 32)), {}),
               lambda d: ((d.floats(2, 3, 32), d.floats(24, 32), d.floats(24)), {})],
    "linear_into": [lambda d: ((d.floats(5, 24), d.floats(5, 32), d.floats(24, 32)), {})],
    "linear_silu_mul": [lambda d: ((d.floats(5, 32), d.floats(24, 32)), {}),
                        lambda d: ((d.floats(1, 32), d.floats(24, 32), d.floats(24)), {})],
    "norm_linear": [lambda d: _norm_linear(d, 5, 0.0), lambda d: _norm_linear(d, 1, 1.0, d.floats(24))],
    "norm_linear_silu_mul": [lambda d: _norm_linear(d, 5, 1.0, d.floats(24)), lambda d: _norm_linear(d, 1, 0.0)],
    "dequantize": [lambda d: ((*_codes(d, 8, (1, 48)), None, d.dtype), {}),
                   lambda d: ((*_codes(d, 8, (16, 32)), None, d.dtype), {}),
                   lambda d: ((*_codes(d, 8, (1, 16)), d.ints(9, 40, 3), d.dtype), {})],
    "dequantize_packed": [lambda d: ((*_nibbles(d, 3), None, d.dtype), {}),
                          lambda d: ((*_nibbles(d, 1), d.ints(16, 40, 1, dtype=torch.uint8), d.dtype), {})],
    "dequantize_table": [lambda d: ((*_nibbles(d, 3), d.float32(16), None, d.dtype), {}),
                         lambda d: ((d.ints(2**31 - 1, 2, 40, 6), d.ints(7, 2, 40, 3, dtype=torch.uint8).add_(124),
                                     d.float32(16), d.float32(2, 40, 1), d.dtype), {})],
    "scaled_linear": [lambda d: ((d.floats(5, 48), *_codes(d, 8, (1, 48)), d.floats(40)), {}),
                      lambda d: ((d.floats(2, 3, 48), *_codes(d, 8, (16, 32))), {})],
    "packed_linear": [lambda d: ((d.floats(5, 48), *_nibbles(d, 3)), {}),
                      lambda d: ((d.floats(1, 48), *_nibbles(d, 3), d.ints(16, 40, 3, dtype=torch.uint8)), {})],
    "table_linear": [lambda d: ((d.floats(5, 48), *_nibbles(d, 3), d.float32(16)), {}),
                     lambda d: ((d.floats(1, 48), d.ints(2**31 - 1, 40, 6),
                                 d.ints(7, 40, 3, dtype=torch.uint8).add_(124), d.float32(16), d.float32(40, 1),
                                 d.floats(40)), {})],
    "map_rows": [lambda d: ((torch.tanh, d.floats(5, 33)), {})],
    "write_kv": [_write_kv],
    "paged_attention": [_paged_attention],
    "merge_parts": [_merge_parts],
    "route": [partial(_route, spec=spec) for spec in ROUTERS],
    "place_experts": [lambda d: _places(d, False), lambda d: _places(d, True)],
    "fused_experts": [
        lambda d: _experts(d, 0),
        lambda d: _experts(d, 3),
        *(partial(_gated_experts, gating=gating) for gating in GATINGS),
    ],
    "coded_experts": [partial(_coded_experts, kind=kind, tokens=tokens, gating=gating, first=tokens // 5)
                      for kind, gating in (("floats", GATINGS[3]), ("nibbles", SILU), ("bytes", GATINGS[4]))
                      for tokens in (1, 9)],
    "copy_blocks": [
        lambda d: (
            (_state(d, 5, 3), torch.tensor([1, 4], dtype=torch.int32), torch.tensor([4, 6], dtype=torch.int32)),
            {},
        )
    ],
    "causal_conv": [lambda d: _conv(d, STATE_ROWS), lambda d: _conv(d, DECODE_ROWS)],
    "ssd_scan": [lambda d: _ssd(d, STATE_ROWS), lambda d: _ssd(d, DECODE_ROWS)],
    "selective_scan": [lambda d: _selective(d, STATE_ROWS), lambda d: _selective(d, DECODE_ROWS)],
    "gated_delta": [
        lambda d: _delta(d, STATE_ROWS),
        lambda d: _delta(d, DECODE_ROWS),
        lambda d: _delta(d, STATE_ROWS, 16),
        lambda d: _delta(d, DECODE_ROWS, 16),
    ],
    "greedy": [lambda d: ((d.float32(6, 300),), {})],
    "join_drawn": [lambda d: ((d.ints(300, 6), d.float32(6)), {})],
    "draw": [lambda d: _draw(d, False), lambda d: _draw(d, True)],
    "best_of_part": [lambda d: _best_of_part(d, False), lambda d: _best_of_part(d, True)],
    "join_parts": [_join_parts],
    "keep_threshold": [lambda d: ((d.float32(4, 60), torch.tensor([0, 3, 1, 60], dtype=torch.int32),
                                   torch.tensor([0.5, 1.0, 0.9, 0.99])), {})],
    "add_bias": [lambda d: ((*_sparse(d), torch.tensor([1.5, float("-inf"), -2.0])), {})],
    "keep_only": [lambda d: ((d.float32(3, 50), torch.tensor([0, 2]), *_sparse(d)[1:]), {})],
    "apply_bitmask": [lambda d: ((d.float32(3, 50), torch.tensor([0, 2]), d.ints(2**31 - 1, 2, 2)), {}),
                      lambda d: ((d.float32(3, 50), torch.tensor([2, -1, 0, -1]), d.ints(2**31 - 1, 4, 2)), {})],
    "match_tails": [lambda d: ((torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
                                torch.tensor([[-1, 2, 3], [4, 5, 7], [-1, -1, -1]])), {})],
    "penalize": [lambda d: _penalize(d, 0, 2, 3), lambda d: _penalize(d, 2, -1, -1)],
    "count_tokens": [lambda d: ((d.ints(5, 4, 50), torch.tensor([1, 1, 3]), torch.tensor([7, 7, 0])), {}),
                     lambda d: ((d.ints(5, 4, 50), torch.tensor([1, -1, 0]), torch.tensor([7, 49, -1])), {})],
    "top_logprobs": [lambda d: ((d.float32(4, 60), d.ints(60, 4), 5, True), {}),
                     lambda d: ((d.float32(4, 60), d.ints(60, 4), 0, False), {})],
    "accept_drafts": [lambda d: ((torch.tensor([[5, 6, 7], [5, 9, 7], [4, 6, 7], [5, 6, 7]], dtype=torch.int32),
                                  torch.tensor([[5, 6]] * 4, dtype=torch.int32),
                                  torch.tensor([2, 2, 2, 1], dtype=torch.int32)), {})],
    "adapted_experts": [
        lambda d: adapted_experts_case(d, (2, 0, 1, 2, 0, 1)),
        lambda d: adapted_experts_case(d, (0, 0, 3, 0, 1, 0), 3, 3),
        *(partial(adapted_experts_case, slots=(1, 0, 1, 2, 0, 2), gating=gating) for gating in GATINGS[:3]),
    ],
    "add_adapters": [lambda d: adapters_case(d, (2, 0, 1, 2, 0), ((24, 0), (8, 1), (8, 2))),
                     lambda d: adapters_case(d, (1,) * 20, ((16, 0), (8, 1), (16, 0)), 3)],
    "add_joined_adapters": [
        lambda d: joined_adapters_case(d, (2, 0, 1, 2, 0), ((24, 0), (8, 1), (8, 2))),
        lambda d: joined_adapters_case(d, (1,) * 20, ((16, 0), (16, 0)), 3, halves=True),
    ],
    "group_slots": [_group_slots],
    "spread_slots": [lambda d: ((d.ints(3, 7), d.ints(4, 5), torch.tensor([4, 0, 2, 0], dtype=torch.int32),
                                 torch.tensor([0, 1, 3, 6, 6], dtype=torch.int32), 7), {})],
    "sum_rows": [lambda d: ((d.floats(7, 16), torch.tensor([3, 0, 4])), {})],
    "unit": [lambda d: ((d.float32(4, 16) * torch.tensor([[1.0], [0.0], [3.0], [1e-3]]),), {})],
    "write_rows": [_write_rows, lambda d: _padded_rows(d, 1, 2), lambda d: _padded_rows(d, 1, 1, 1),
                   lambda d: _padded_rows(d)],
    "write_values": [lambda d: ((d.ints(9, 8), torch.tensor([4, 0, 7], dtype=torch.int32), d.ints(99, 3)), {}),
                     lambda d: ((d.ints(9, 8), torch.tensor([4, -1, 7, -1], dtype=torch.int32), d.ints(99, 4)), {})],
    "build_inputs": [lambda d: _build_inputs(d, 10, 3, 1), lambda d: _build_inputs(d, 16, 5, 2),
                     lambda d: _build_inputs(d, 10, 8, 0)],
    "advance": [_advance],
}  # fmt: skip
