"""Steps that run as captured pieces equal those that do not. Here graphs are tapes of torch's operators."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from frame.core.interfaces.model import ForwardStep
from frame.interfaces import ExpertSpec, RouterSpec
from frame.layers import Router
from frame.plugins.platforms.cuda.graphs.piecewise import SIZES, PiecewiseGraphs, read_bytes, sizes_for
from tests.layers.test_weights import make_build
from tests.plugins.platforms.tape import TapeCapturer

WIDTH, LAYERS = 8, 3


class Toy(nn.Module):
    """Layers of a product, attention that needs Python (a running mean scaled by the step's plan), and a product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.attended: list[float] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, step: ForwardStep) -> Tensor:
        (scale,) = step.plans
        self.attended.append(scale)
        total = (key * value).cumsum(0)
        assert not total.isnan().any(), "attention ran before what it reads"
        return (query + total * scale).view(len(query), 2, WIDTH // 2)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        for before, after in zip(self.before, self.after, strict=True):
            query, key, value = before(x).chunk(3, -1)
            x = x + after(step.attend(self.attend, query, key, value, step).flatten(1)).tanh()
        return x.clone()


class Pass:
    """A forward pass of the toy over a buffer that does not move."""

    def __init__(self, toy: Toy, buffer: Tensor, size: int, scale: float) -> None:
        self.toy, self.buffer, self.size, self.scale = toy, buffer, size, scale

    def step(self) -> ForwardStep:
        return ForwardStep(plans=[self.scale], batches=[])

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        hidden: Tensor = self.toy(self.buffer[: self.size], step or self.step())
        return hidden


@pytest.fixture
def toy() -> Iterator[Toy]:
    with torch.inference_mode():
        yield Toy()


def pieces_of(capturer: TapeCapturer, limit: int = 64) -> PiecewiseGraphs:
    pieces = PiecewiseGraphs(capturer)
    pieces.sizes = [size for size in SIZES if size <= limit]
    return pieces


def test_a_captured_step_equals_an_eager_one_on_new_inputs_and_plans(toy: Toy) -> None:
    capturer = TapeCapturer()
    pieces = pieces_of(capturer)
    buffer = torch.empty(64, WIDTH)
    for turn in range(5):
        for size in (16, 32):
            buffer.copy_(torch.randn(64, WIDTH))
            want = Pass(toy, buffer, size, 0.1 * turn)()
            toy.attended.clear()
            found = pieces.run(size, Pass(toy, buffer, size, 0.1 * turn))
            torch.testing.assert_close(found, want)
            assert toy.attended == [0.1 * turn] * LAYERS
    assert capturer.ended == 2 * (LAYERS + 1)  # each size once


def test_a_size_is_captured_when_it_is_met_first(toy: Toy) -> None:
    capturer = TapeCapturer()
    pieces = pieces_of(capturer)
    given = torch.randn(32, WIDTH)
    for number, size in enumerate((16, 32)):
        torch.testing.assert_close(pieces.run(size, Pass(toy, given, size, 1.0)), Pass(toy, given, size, 1.0)())
        assert capturer.ended == (number + 1) * (LAYERS + 1)


def test_what_lacks_is_said_from_the_largest_on_until_all_is_there(toy: Toy) -> None:
    capturer = TapeCapturer()
    pieces = pieces_of(capturer)
    given = torch.randn(64, WIDTH)
    assert pieces.sizes == [16, 32, 64]
    assert pieces.lacking() == 64
    for size, left in ((64, 32), (16, 32), (32, 0)):
        pieces.run(size, Pass(toy, given, size, 1.0))
        assert pieces.lacking() == left
    pieces.drop()
    assert pieces.lacking() == 64
    assert PiecewiseGraphs(capturer).lacking() == 0


def test_graphs_that_are_dropped_are_made_again(toy: Toy) -> None:
    capturer = TapeCapturer()
    pieces = pieces_of(capturer)
    for _ in range(2):
        moved = torch.randn(16, WIDTH)
        for _ in range(3):
            torch.testing.assert_close(pieces.run(16, Pass(toy, moved, 16, 1.0)), Pass(toy, moved, 16, 1.0)())
        pieces.drop()
    assert (capturer.ended, capturer.forgotten) == (2 * (LAYERS + 1), 2)


@pytest.mark.parametrize("fails_after", range(LAYERS + 1))
def test_without_memory_a_step_is_eager_and_nothing_is_captured_any_more(
    fails_after: int, toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = pieces_of(TapeCapturer(fails_after))
    given = torch.randn(16, WIDTH)
    want = Pass(toy, given, 16, 1.0)()
    with caplog.at_level(logging.INFO, "frame.platforms.cuda"):
        for _ in range(3):
            torch.testing.assert_close(pieces.run(16, Pass(toy, given, 16, 1.0)), want)
    assert ["no longer captured: OutOfMemoryError: no memory" in line for line in caplog.messages] == [True]
    assert (pieces.padded(10), pieces.lacking()) == (0, 0)


REFUSED = RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("fails_after", range(LAYERS + 1))
def test_a_first_capture_that_fails_is_made_the_second_time(
    fails_after: int, toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    """By then the step has run once as it is."""
    capturer = TapeCapturer(fails_after, REFUSED, failures=1)
    pieces = pieces_of(capturer)
    given = torch.randn(16, WIDTH)
    want = Pass(toy, given, 16, 1.0)()
    with caplog.at_level(logging.INFO, "frame.platforms.cuda"):
        torch.testing.assert_close(pieces.run(16, Pass(toy, given, 16, 1.0)), want)
        assert (pieces.padded(10), pieces.lacking(), capturer.ended) == (16, 64, fails_after)
        assert capturer.forgotten == 1, "the next is to share no memory with what failed"
        for _ in range(2):
            torch.testing.assert_close(pieces.run(16, Pass(toy, given, 16, 1.0)), want)
    assert capturer.ended == fails_after + LAYERS + 1
    assert not caplog.messages


def test_a_first_capture_that_fails_leaves_those_of_other_sizes(toy: Toy) -> None:
    capturer = TapeCapturer(LAYERS + 1, REFUSED, failures=1)
    pieces = pieces_of(capturer)
    given = torch.randn(32, WIDTH)
    for size in (16, 32, 16, 32, 32, 16):
        torch.testing.assert_close(pieces.run(size, Pass(toy, given, size, 1.0)), Pass(toy, given, size, 1.0)())
    assert capturer.ended == 2 * (LAYERS + 1)


def test_a_second_capture_of_a_size_that_fails_is_the_last(toy: Toy, caplog: pytest.LogCaptureFixture) -> None:
    capturer = TapeCapturer(LAYERS + 1, REFUSED)
    pieces = pieces_of(capturer)
    given = torch.randn(64, WIDTH)
    with caplog.at_level(logging.WARNING, "frame.platforms.cuda"):
        for number, size in enumerate((16, 32, 64, 32, 16)):
            torch.testing.assert_close(pieces.run(size, Pass(toy, given, size, 1.0)), Pass(toy, given, size, 1.0)())
            assert bool(pieces.sizes) == (number < 3)
    assert ["no longer captured: RuntimeError: operation not" in line for line in caplog.messages] == [True]
    assert (pieces.padded(10), pieces.lacking(), capturer.ended) == (0, 0, LAYERS + 1)


def test_a_driver_that_refuses_four_sizes_is_asked_no_more(toy: Toy) -> None:
    pieces = pieces_of(TapeCapturer(0, REFUSED), 512)
    given = torch.randn(96, WIDTH)
    for size in (16, 32, 64, 96):
        assert pieces.sizes
        torch.testing.assert_close(pieces.run(size, Pass(toy, given, size, 1.0)), Pass(toy, given, size, 1.0)())
    assert not pieces.sizes


def test_sizes_hold_the_tokens_and_end_at_the_limit() -> None:
    pieces = pieces_of(TapeCapturer(), 512)
    for tokens in range(1, 513):
        assert pieces.padded(tokens) == min(size for size in SIZES if size >= tokens)
    assert {pieces.padded(tokens) for tokens in (513, 600, 8192, 100_000)} == {0}


@pytest.mark.parametrize(
    ("billions", "layers", "tokens"), [(0.6, 28, 8192), (8.0, 32, 512), (70.0, 80, 192), (1000.0, 60, 0)]
)
def test_larger_models_are_captured_for_fewer_tokens(billions: float, layers: int, tokens: int) -> None:
    weights_bytes = int(billions * 2e9)
    assert max(sizes_for(weights_bytes, layers, 16384), default=0) == tokens
    assert max(sizes_for(weights_bytes // 2, layers, 16384, sums=True), default=0) >= min(8192, 3 * tokens)
    assert max(sizes_for(weights_bytes, layers, 100), default=0) == min(tokens, 100), "a full step has its own size"
    assert not [size for most in (0, 1) for size in sizes_for(weights_bytes, layers, most)], "one token is a decode"


def test_of_routed_experts_those_count_that_a_token_reads() -> None:
    build = make_build()
    model = nn.Module()
    model.router = Router(build, "gate", 8, RouterSpec(16, 4))
    model.experts = build.experts("experts", ExpertSpec(16, 8, 32, 4))
    assert read_bytes(model) == (16 * 8 + 16 * 3 * 8 * 32 * 4 // 16) * build.dtype.itemsize
