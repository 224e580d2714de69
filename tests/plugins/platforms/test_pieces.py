"""Steps that run as recorded pieces equal those that do not. Here recordings are tapes of torch's operators."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from frame.core.interfaces.model import ForwardStep
from frame.plugins.platforms.cuda_pieces import SIZES, Pieces, sizes_for
from tests.plugins.platforms.tape import TapeRecorder

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
        return ForwardStep(plans=[self.scale])

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        hidden: Tensor = self.toy(self.buffer[: self.size], step or self.step())
        return hidden


@pytest.fixture
def toy() -> Iterator[Toy]:
    with torch.inference_mode():
        yield Toy()


def pieces_of(recorder: TapeRecorder, limit: int = 64) -> Pieces:
    pieces = Pieces(recorder)
    pieces.sizes = [size for size in SIZES if size <= limit]
    return pieces


def test_a_recorded_step_equals_an_eager_one_on_new_inputs_and_plans(toy: Toy) -> None:
    recorder = TapeRecorder()
    pieces = pieces_of(recorder)
    buffer = torch.empty(64, WIDTH)
    for turn in range(5):
        for size in (16, 32):
            buffer.copy_(torch.randn(64, WIDTH))
            want = Pass(toy, buffer, size, 0.1 * turn)()
            toy.attended.clear()
            found = pieces.run(size, Pass(toy, buffer, size, 0.1 * turn))
            torch.testing.assert_close(found, want)
            assert toy.attended == [0.1 * turn] * LAYERS
    assert recorder.ended == 2 * (LAYERS + 1)  # each size once, when it came for the second time


def test_a_size_that_comes_once_is_not_recorded(toy: Toy) -> None:
    recorder = TapeRecorder()
    pieces_of(recorder).run(16, Pass(toy, torch.randn(16, WIDTH), 16, 1.0))
    assert recorder.ended == 0


def test_recordings_that_are_dropped_are_made_again(toy: Toy) -> None:
    recorder = TapeRecorder()
    pieces = pieces_of(recorder)
    for _ in range(2):
        moved = torch.randn(16, WIDTH)
        for _ in range(3):
            torch.testing.assert_close(pieces.run(16, Pass(toy, moved, 16, 1.0)), Pass(toy, moved, 16, 1.0)())
        pieces.drop()
    assert (recorder.ended, recorder.forgotten) == (2 * (LAYERS + 1), 2)


@pytest.mark.parametrize("fails_after", range(LAYERS + 1))
def test_a_recording_that_fails_leaves_an_eager_step(
    fails_after: int, toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = pieces_of(TapeRecorder(fails_after))
    given = torch.randn(16, WIDTH)
    want = Pass(toy, given, 16, 1.0)()
    with caplog.at_level(logging.WARNING, "frame.platforms.cuda"):
        for _ in range(3):
            torch.testing.assert_close(pieces.run(16, Pass(toy, given, 16, 1.0)), want)
    assert ["no longer recorded: OutOfMemoryError: no memory" in line for line in caplog.messages] == [True]
    assert pieces.padded(10) == 0


def test_sizes_hold_the_tokens_and_end_at_the_limit() -> None:
    pieces = pieces_of(TapeRecorder(), 512)
    for tokens in range(1, 513):
        assert pieces.padded(tokens) == min(size for size in SIZES if size >= tokens)
    assert {pieces.padded(tokens) for tokens in (513, 600, 8192, 100_000)} == {0}


@pytest.mark.parametrize(("billions", "tokens"), [(0.6, 8192), (8.0, 512), (70.0, 64), (1000.0, 0)])
def test_larger_models_are_recorded_for_fewer_tokens(billions: float, tokens: int) -> None:
    weights_bytes = int(billions * 2e9)
    assert max(sizes_for(weights_bytes, 16384), default=0) == tokens
    assert max(sizes_for(weights_bytes, 100), default=0) == min(tokens, 100), "a full step has its own size"
    assert sizes_for(weights_bytes, 0) == []
