"""The recurrences over packed rows: each request alone, in pieces, in chunks, and against plain loops in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from frame.ops import Ops, ScanWeights, StateRows, gated_delta_chunked, ssd_scan_chunked

HEADS, GROUPS, SIZE, STATE = 4, 2, 8, 6
#: (inputs of a token, shape of a state, op) of each kind; inputs are made by name.
Op = Callable[..., Tensor]


def rows_of(lengths: Sequence[int], begins: Sequence[bool], blocks: Sequence[int]) -> StateRows:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return StateRows(starts, torch.tensor(blocks, dtype=torch.int32), torch.tensor(begins), max(lengths))


def scan_weights(*shape: int) -> ScanWeights:
    return ScanWeights(-torch.rand(*shape) - 0.1, torch.randn(shape[0]), torch.randn(shape[0]), (0.05, 1.5))


class Case:
    """One op with fixed weights, called with its inputs for T tokens, a state and rows."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(3)
        self.name = name
        if name.startswith("ssd"):
            weights, op = scan_weights(HEADS), ssd_scan_chunked if "chunked" in name else Ops.ssd_scan
            self.shapes = [(HEADS, SIZE), (HEADS,), (GROUPS, STATE), (GROUPS, STATE)]
            self.state, self.run = (HEADS, SIZE, STATE), lambda *t: op(*t[:4], weights, *t[4:], **self.options)
        elif name == "selective":
            weights = scan_weights(HEADS, STATE)
            self.shapes = [(HEADS,), (HEADS,), (STATE,), (STATE,)]
            self.state, self.run = (HEADS, STATE), lambda *t: Ops.selective_scan(*t[:4], weights, *t[4:])
        elif name == "conv":
            weight, bias = torch.randn(SIZE, 4), torch.randn(SIZE)
            self.shapes, self.state = [(SIZE,)], (SIZE, 3)
            self.run = lambda x, state, rows: Ops.causal_conv(x, weight, bias, state, rows)
        else:
            op = gated_delta_chunked if "chunked" in name else Ops.gated_delta
            decay = (HEADS, STATE) if "features" in name else (HEADS,)
            self.shapes = [(GROUPS, STATE), (GROUPS, STATE), (HEADS, SIZE), decay, (HEADS,)]
            self.state, self.run = (HEADS, STATE, SIZE), lambda *t: op(*t, **self.options)
        self.options = {"size": 4} if "chunked" in name else {}

    def inputs(self, num_tokens: int) -> list[Tensor]:
        made = [torch.randn(num_tokens, *shape) for shape in self.shapes]
        if self.name.startswith("delta"):
            made[3], made[4] = -torch.rand_like(made[3]), torch.rand_like(made[4])
        return made


NAMES = (
    "conv",
    "ssd",
    "ssd-chunked",
    "selective",
    "delta",
    "delta-chunked",
    "delta-features",
    "delta-features-chunked",
)


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_in_pieces_equal_each_request_alone(name):
    case, draw = Case(name), random.Random(5)
    lengths = [draw.randint(1, 40) for _ in range(6)]
    whole = [case.inputs(length) for length in lengths]
    expected = []
    for length, inputs in zip(lengths, whole, strict=True):
        dirty = torch.full((2, *case.state), float("nan"))
        dirty[0] = 0
        expected.append(case.run(*inputs, dirty, rows_of([length], [True], [1])))
    state = torch.full((9, *case.state), float("nan"))  # freed blocks hold another's state
    state[0] = 0
    done, found = [0] * 6, [[] for _ in range(6)]
    while any(count < length for count, length in zip(done, lengths, strict=True)):
        order = [i for i in draw.sample(range(6), 6) if done[i] < lengths[i]]
        takes = [min(draw.choice((1, 1, 3, 17)), lengths[i] - done[i]) for i in order]
        pieces = [[one[done[i] : done[i] + take] for one in whole[i]] for i, take in zip(order, takes, strict=True)]
        padding = 2
        packed = [torch.cat([*parts, torch.randn(padding, *parts[0].shape[1:])]) for parts in zip(*pieces, strict=True)]
        rows = rows_of([*takes, 0, 0], [*(done[i] == 0 for i in order), True, True], [*(i + 2 for i in order), 0, 0])
        out = case.run(*packed, state, rows)
        assert out.isfinite().all(), "padding gets finite numbers"
        for i, take, part in zip(order, takes, out.split([*takes, padding])[:-1], strict=True):
            found[i].append(part)
            done[i] += take
        assert not state[0].any(), "the null block stays as it is"
    for parts, want in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), want, atol=2e-5, rtol=1e-4)


def test_ssd_equals_a_loop_in_float64():
    case = Case("ssd")
    x, dt, b, c = (one.double() for one in case.inputs(20))
    weights = scan_weights(HEADS)
    state = torch.zeros(2, *case.state)
    found = Ops.ssd_scan(*(one.float() for one in (x, dt, b, c)), weights, state, rows_of([20], [True], [1]))
    steps = functional.softplus(dt + weights.step_bias).clamp(0.05, 1.5)
    for head in range(HEADS):
        kept, group = torch.zeros(SIZE, STATE, dtype=torch.float64), head // (HEADS // GROUPS)
        for t in range(20):
            kept = kept * torch.exp(steps[t, head] * weights.decay[head].double())
            kept += steps[t, head] * torch.outer(x[t, head], b[t, group])
            want = kept @ c[t, group] + x[t, head] * weights.skip[head]
            torch.testing.assert_close(found[t, head].double(), want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state[1, head].double(), kept, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("features", [False, True])
def test_delta_rule_equals_a_loop_in_float64(features):
    case = Case("delta-features" if features else "delta")
    inputs = case.inputs(20)
    state = torch.zeros(2, *case.state)
    found = Ops.gated_delta(*inputs, state, rows_of([20], [True], [1]))
    query, key, value, decay, beta = (one.double() for one in inputs)
    for head in range(HEADS):
        kept, group = torch.zeros(STATE, SIZE, dtype=torch.float64), head // (HEADS // GROUPS)
        for t in range(20):
            k, q = (one[t, group] / (one[t, group].square().sum() + 1e-6).sqrt() for one in (key, query))
            kept = kept * decay[t, head].exp()[..., None]
            kept = kept + torch.outer(k, beta[t, head] * (value[t, head] - kept.T @ k))
            torch.testing.assert_close(found[t, head].double(), kept.T @ q * STATE**-0.5, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["ssd-chunked", "delta-chunked", "delta-features-chunked"])
def test_chunks_equal_the_recurrence_where_states_fade_fast(name):
    """Decays of e^-30 a token: quotients of them would overflow."""
    chunked, plain = Case(name), Case(name.removesuffix("-chunked"))
    inputs = chunked.inputs(150)
    inputs[1 if "ssd" in name else 3] *= 30
    chunked.options = {}  # chunks of 64 tokens
    rows = rows_of([140, 1, 9], [True, False, False], [1, 2, 3])
    states = [torch.randn(4, *chunked.state, generator=torch.manual_seed(1)) for _ in range(2)]
    found, want = (case.run(*inputs, kept, rows) for case, kept in zip((chunked, plain), states, strict=True))
    torch.testing.assert_close(found, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[0][1:], states[1][1:], atol=2e-5, rtol=1e-4)
