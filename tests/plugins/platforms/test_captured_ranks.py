"""Workers of an engine capture a step together or not at all. Ranks are threads, graphs replay what was launched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from frame.core.interfaces.collectives import Groups, ProcessGroup
from frame.core.interfaces.mesh import Mesh
from frame.core.interfaces.model import ForwardStep
from frame.core.interfaces.platform_steps import StepShape
from frame.plugins.platforms.cuda.agreement import Agreement, CapturePeers
from frame.plugins.platforms.cuda.graphs.capture import CapturedGraph
from frame.plugins.platforms.cuda.graphs.cuda_graphs import CudaGraphs
from frame.plugins.platforms.cuda.graphs.piecewise import PiecewiseGraphs
from frame.plugins.platforms.cuda.graphs.shapes import CudaShapes, prompt_shape
from frame.plugins.platforms.options import CudaOptions
from frame.testing import run_mesh
from tests.plugins.platforms.tape import TapeCapturer

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
REFUSED = RuntimeError("operation not permitted when stream is capturing")
#: Layers of a step with prompts, each with one sum.
LAYERS = 3


class SummingCapturer:
    """As a device captures: sums are not made then, but in the eager run before and by each replay.

    Capture number `fails_at` fails with `error`.
    """

    def __init__(self, fails_at: int = 0, error: Exception = NO_MEMORY) -> None:
        self.fails_at, self.error, self.num_captured = fails_at, error, 0

    def capture(self, forward: Callable[[], Tensor]) -> CapturedGraph:
        result = forward()
        self.num_captured += 1
        if self.num_captured == self.fails_at:
            raise self.error
        return CapturedGraph(lambda: result.copy_(forward()), result, 1 << 20)

    def seconds(self, replay: Callable[[], Any]) -> float:
        replay()
        return 1.0

    def forget(self) -> None:
        return


class Summed:
    """A forward pass whose layers are summed over the stage, each between two pieces."""

    def __init__(self, group: ProcessGroup, tokens: int) -> None:
        self.group, self.tokens = group, tokens

    def step(self) -> ForwardStep:
        return ForwardStep(plans=[], batches=[])

    def sum(self, x: Tensor, step: ForwardStep) -> Tensor:
        return self.group.all_reduce(x)

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        step = step or self.step()
        x = torch.ones(self.tokens, 2)
        for layer in range(LAYERS):
            x = step.attend(self.sum, x + layer, step).clone()
        return x


class Rank:
    """One worker's graphs; `fails` says which capturer fails on which rank."""

    def __init__(self, groups: Groups, capturer: SummingCapturer, tape: TapeCapturer | None = None, **options: Any):
        self.groups = groups
        self.peers = CapturePeers()
        whole = groups.tensor if groups.pipeline.size == 1 else groups.pipeline
        ranks = range(whole.size)
        self.peers.all = Agreement(whole.host, ranks, whole.rank)
        self.peers.stage = self.peers.all if groups.pipeline.size == 1 else Agreement()
        given = CudaOptions(**{"graph_sizes": [1, 2, 4, 8], "graph_sizes_at_start": 4, **options})
        self.pieces = PiecewiseGraphs(tape or TapeCapturer(), self.peers)
        self.graphs = CudaGraphs(capturer, given, 8, pieces=self.pieces, max_tokens=64, peers=self.peers)
        self.pieces.sizes = [16, 32]
        self.shapes = CudaShapes(self.graphs)

    def run(self, shape: StepShape) -> Tensor:
        hidden = self.graphs.run(shape, "forward", Summed(self.groups.tensor, shape.padded_tokens))
        for kind in ("greedy", "random") if shape.padded_tokens == shape.padded_rows else ():
            self.graphs.run(shape, "draw", lambda: self.groups.tensor.all_reduce(hidden), kind)
        return hidden

    def start(self) -> None:
        while self.graphs.capture(self.run):
            pass

    def state(self) -> Any:
        graphs, pieces = self.graphs, self.pieces
        draws = sorted((str(shape), sorted(kinds)) for shape, kinds in graphs._draws.items())
        return sorted(map(str, graphs._captured)), draws, graphs.wanted(), pieces.sizes, sorted(pieces._graphs)


def summed(size: int) -> Tensor:
    """What the forward pass gives over so many ranks."""
    x = torch.ones(1, 2)
    for layer in range(LAYERS):
        x = size * (x + layer)
    return x


@pytest.mark.parametrize("fails_at", range(1, 10))
@pytest.mark.parametrize("where", ["reserve", "start"])
def test_what_one_rank_has_no_memory_for_none_replays(
    where: str, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the others would wait for its sums; number 2, 3, 5, 6, 8, 9 are draws."""

    def work(groups: Groups) -> Any:
        one = Rank(groups, SummingCapturer(fails_at if groups.tensor.rank == 1 else 0))
        if where == "reserve":
            one.graphs.reserve(one.run)
        one.start()
        while one.graphs.wanted():
            one.graphs.capture(one.run)
        assert torch.equal(one.run(StepShape(3, 3)), summed(2).expand(3, 2))
        return one.state()

    with caplog.at_level(logging.WARNING, "frame.platforms.cuda"):
        first, second = run_mesh(Mesh(tensor=2), work, seconds=20)
    assert first == second
    assert any("worker 1: OutOfMemoryError" in line for line in caplog.messages) or where == "reserve"


def test_what_one_rank_cannot_capture_at_the_start_is_an_error_of_all_that_names_it() -> None:
    def work(groups: Groups) -> str:
        one = Rank(groups, SummingCapturer(4 if groups.tensor.rank == 1 else 0, REFUSED))
        with pytest.raises(RuntimeError) as caught:
            one.start()
        return str(caught.value)

    assert run_mesh(Mesh(tensor=2), work, seconds=20) == [f"worker 1: RuntimeError: {REFUSED}", str(REFUSED)]


def test_draws_that_one_rank_cannot_capture_none_captures(caplog: pytest.LogCaptureFixture) -> None:
    def work(groups: Groups) -> Any:
        one = Rank(groups, SummingCapturer(3 if groups.tensor.rank == 1 else 0, REFUSED))
        one.start()
        return one.state()

    with caplog.at_level(logging.WARNING, "frame.platforms.cuda"):
        first, second = run_mesh(Mesh(tensor=2), work, seconds=20)
    assert first == second
    captured, draws, *_ = first
    assert (len(captured), draws) == (4, [])
    line = f"draws are not captured: PeerFailed: worker 1: RuntimeError: {REFUSED}"
    assert sum(line in one for one in caplog.messages) == 1


@pytest.mark.parametrize("error", [NO_MEMORY, REFUSED], ids=["memory", "refused"])
@pytest.mark.parametrize("fails_after", range(LAYERS + 1))
def test_a_piece_that_one_rank_cannot_capture_none_replays(
    fails_after: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is then launched anew on all: each makes as many sums as the others."""

    def work(groups: Groups) -> Any:
        fails = fails_after if groups.tensor.rank == 1 else 1 << 30
        one = Rank(groups, SummingCapturer(), TapeCapturer(fails, error, failures=1))
        one.graphs._began = True
        for size in (16, 32, 16, 32):
            found = one.run(prompt_shape(size))
            assert torch.equal(found, summed(2).expand(size, 2))
        return one.state()

    with caplog.at_level(logging.WARNING, "frame.platforms.cuda"):
        first, second = run_mesh(Mesh(tensor=2), work, seconds=20)
    assert first == second
    *_, sizes, captured = first
    assert (sizes, captured) == (([], []) if error is NO_MEMORY else ([16, 32], [16, 32]))
    if error is NO_MEMORY:
        assert any("no longer captured: PeerOutOfMemory: worker 1: OutOf" in line for line in caplog.messages)


@pytest.mark.parametrize("error", [NO_MEMORY, REFUSED], ids=["memory", "refused"])
def test_stages_pad_steps_with_prompts_alike_when_one_can_capture_no_more(error: Exception) -> None:
    """What fails in a step that is served stages learn of by the next capture that all make; until then they pad."""

    def work(groups: Groups) -> Any:
        fails = 0 if groups.pipeline.rank == 0 else 1 << 30
        one = Rank(groups, SummingCapturer(), TapeCapturer(fails, error, failures=1))
        one.start()
        one.run(prompt_shape(16))
        padded = one.graphs.padded(10)
        assert torch.equal(one.run(prompt_shape(16)), summed(1).expand(16, 2))
        one.graphs.capture(one.run)  # after a step that was served
        for _ in range(3):
            one.graphs.capture(one.run)
        return padded, one.state()

    first, second = run_mesh(Mesh(pipeline=2), work, seconds=20)
    assert first == second
    padded, (*_, sizes, captured) = first
    assert padded == 16
    assert (sizes, captured) == (([], []) if error is NO_MEMORY else ([16, 32], [16, 32]))
