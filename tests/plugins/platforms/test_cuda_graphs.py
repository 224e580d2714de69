"""Which decode steps are captured when, and which capture serves a step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from frame.core.interfaces.model import ForwardStep
from frame.core.interfaces.platform_steps import StepShape
from frame.core.interfaces.step import PrefixRows, StepPlan
from frame.plugins.platforms.cuda.agreement import Agreement, CapturePeers
from frame.plugins.platforms.cuda.graphs import cuda_graphs
from frame.plugins.platforms.cuda.graphs.cuda_graphs import LEAST_BYTES, CudaGraphs
from frame.plugins.platforms.cuda.graphs.piecewise import SIZES as SIZES_OF_PROMPTS, PiecewiseGraphs
from frame.plugins.platforms.cuda.graphs.shapes import CudaShapes, name_of
from frame.plugins.platforms.options import CudaOptions
from frame.testing.platform_graphs import step_of
from tests.plugins.platforms.capturer import FakeCapturer
from tests.plugins.platforms.tape import TapeCapturer

SIZES = [1, 2, 4, 8, 16, 32]


class Small(nn.Linear):
    """What `prepare` asks of a model."""

    whole_prompts = segments = False


class Ones:
    """A forward pass without attention."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def step(self) -> ForwardStep:
        return ForwardStep(plans=[], batches=[])

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        return torch.ones(self.tokens, 2)


class Peers(CapturePeers):
    """Others of one stage; `agree` tells of a number what the largest is that a worker has given."""

    def __init__(self, agree: Callable[[int], int]) -> None:
        self.stage = self.all = Agreement()
        self.all.most = agree  # type: ignore[method-assign]


class Device:
    """Runs dummy steps as a runner does; `captured` are the graphs that were asked for, in order.

    `prompts` are the tokens up to which steps with prompts are captured, by `tape`. `most_padding` rows take as long as
    a capture; 0: they take no time.
    """

    def __init__(
        self,
        *sizes: int | None,
        limit: int = 64,
        deterministic: bool = False,
        prompts: int = 0,
        tape: TapeCapturer | None = None,
        most_padding: int = 0,
        max_model_len: int = 0,
        agree: Callable[[int], int] = lambda number: number,
        **options: object,
    ) -> None:
        self.capturer, self.tape = FakeCapturer(*sizes), tape or TapeCapturer()
        given = CudaOptions(**{"graph_sizes": SIZES, "graph_sizes_at_start": 4, **options})
        self.graphs = CudaGraphs(
            self.capturer,
            given,
            limit,
            pieces=PiecewiseGraphs(self.tape),
            max_tokens=prompts,
            max_model_len=max_model_len,
            deterministic=deterministic,
            peers=Peers(agree),
        )
        self.capturer.row_seconds = 1 / (most_padding + 0.5) if most_padding else 0
        self.shapes = CudaShapes(self.graphs)
        self.graphs.prepare(Small(2, 2), self.shapes)
        self.captured: list[str] = []

    def run_dummy(self, shape: StepShape) -> None:
        self.captured.append(name_of(shape))
        hidden = self.graphs.run(shape, "forward", Ones(shape.padded_tokens))
        assert torch.equal(hidden, torch.ones(shape.padded_tokens, 2))

    def capture(self) -> bool:
        return self.graphs.capture(self.run_dummy)

    def start(self) -> Device:
        while self.capture():
            pass
        return self

    def finish(self) -> list[str]:
        """What is captured between steps, all of it."""
        before = len(self.captured)
        while self.graphs.wanted():
            self.capture()
        return self.captured[before:]

    def serve(self, rows: int, **kind: object) -> str | None:
        """The capture that a decode step of so many rows runs on."""
        shape = self.shapes.choose(decodes(rows, **kind))
        captured = self.graphs.captures(shape, "forward")
        assert shape.padded_rows == shape.padded_tokens >= rows
        assert captured or shape.padded_rows == rows
        self.graphs.run(shape, "forward", lambda: torch.zeros(shape.padded_tokens, 2))
        return name_of(shape) if captured else None

    def prefill(self, tokens: int) -> str | None:
        """The capture that a prompt of so many tokens runs on."""
        shape = self.shapes.choose(step_of([tokens]))
        captured = self.graphs.captures(shape, "forward")
        hidden = self.graphs.run(shape, "forward", Ones(shape.padded_tokens))
        assert torch.equal(hidden, torch.ones(shape.padded_tokens, 2))
        return name_of(shape) if captured else None


@pytest.fixture(autouse=True)
def a_second_for_each_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(cuda_graphs, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


def decodes(rows: int, *, deterministic: bool = False, shared: bool = False, longest: int = 1) -> StepPlan:
    plan = step_of([1] * rows)
    plan.num_computed[-1] = longest - 1
    plan.deterministic = deterministic
    plan.prefixes = [PrefixRows(rows=np.arange(rows, dtype=np.int32), num_tokens=64)] if shared else []
    return plan


def names(sizes: Sequence[int], kind: str = "decode") -> list[str]:
    return [f"{kind}-{size}" for size in sizes]


def test_the_largest_and_small_ones_are_there_before_the_first_request() -> None:
    device = Device().start()
    assert device.captured == names([64, 4, 2, 1])
    assert device.graphs.wanted()
    assert device.finish() == names([32, 16, 8])
    assert not device.graphs.wanted()
    assert not device.capture()


@pytest.mark.parametrize(
    ("limit", "at_start", "first", "later"),
    [
        (64, 64, [64, 32, 16, 8, 4, 2, 1], []),
        (64, 0, [64], [32, 16, 8, 4, 2, 1]),
        (1, 4, [1], []),
        (5, 4, [5, 4, 2, 1], []),
    ],
)
def test_limits(limit: int, at_start: int, first: list[int], later: list[int]) -> None:
    device = Device(limit=limit, graph_sizes_at_start=at_start).start()
    assert device.captured == names(first)
    assert device.finish() == names(later)


def test_batches_above_512_are_not_captured() -> None:
    device = Device(limit=4000, graph_sizes=[256, 1024]).start()
    assert device.captured == names([512])
    assert (device.serve(512), device.serve(513)) == ("decode-512", None)


def test_until_a_size_is_captured_the_next_larger_one_serves_and_it_is_the_next() -> None:
    device = Device(most_padding=1).start()
    assert [device.serve(rows) for rows in (1, 3, 4, 64, 65)] == ["decode-1", "decode-4", "decode-4", "decode-64", None]
    assert [device.serve(rows) for rows in (5, 20, 5)] == ["decode-64"] * 3
    device.capture()
    assert device.serve(5) == "decode-8"
    assert device.finish() == names([32, 16])
    assert [device.serve(rows) for rows in (9, 17, 33)] == ["decode-16", "decode-32", "decode-64"]


def test_other_kinds_run_eagerly_until_the_first_of_them_is_captured() -> None:
    device = Device().start()
    device.finish()
    for kind in ("deterministic", "shared"):
        assert device.serve(3, **{kind: True}) is None
        assert device.graphs.wanted()
        assert device.finish() == names([4], kind)
        assert [device.serve(rows, **{kind: True}) for rows in (2, 3, 4, 5)] == [*names([4, 4, 4], kind), None]
        assert sorted(device.finish()) == sorted(names([2, 8], kind))
    assert device.serve(3) == "decode-4"


def test_in_a_deterministic_engine_every_step_is() -> None:
    device = Device(deterministic=True).start()
    assert device.captured == names([64, 4, 2, 1], "deterministic")
    assert device.serve(3) == "deterministic-4"


def test_prompts_and_chunks_run_eagerly() -> None:
    device = Device().start()
    for rows in ([2], [1, 1, 3], [64]):
        shape = device.shapes.choose(step_of(rows))
        assert (shape.padded_tokens, shape.padded_rows) == (sum(rows), len(rows))
        assert not device.graphs.captures(shape, "forward")
    assert torch.equal(device.graphs.run(shape, "forward", lambda: torch.ones(3)), torch.ones(3))


def test_data_ranks_decode_together_at_the_size_of_the_largest_batch() -> None:
    device = Device().start()
    few, many = (device.shapes.choose(decodes(rows)) for rows in (1, 3))
    joined = device.shapes.join([few, many])
    assert joined == device.shapes.join([many]) == device.shapes.choose(decodes(4))
    assert device.graphs.captures(joined, "forward")
    prompt, shared = device.shapes.choose(step_of([2, 1])), device.shapes.choose(decodes(3, shared=True))
    for other in (prompt, shared, device.shapes.choose(decodes(100))):
        assert device.shapes.join([few, other]) is None, "each runs at its own"
    apart = replace(many, tokens_per_rank=(4, 2))
    assert not device.graphs.captures(apart, "forward"), "it was captured for equal numbers of tokens"


def test_what_is_warmed_are_the_powers_of_two_of_both_numerics_and_of_many_rows_sizes_between() -> None:
    shapes = Device(graph_sizes=[1, 2, 3, 4, 24], limit=32).shapes.every()
    found = [(shape.padded_rows, shape.deterministic) for shape in shapes]
    assert found == [(size, numerics) for numerics in (False, True) for size in (32, 4, 2, 1)]
    assert all(shape.deterministic for shape in Device(deterministic=True).shapes.every())
    many = Device(graph_sizes=[16, 24, 32, 40, 48, 56, 64, 72, 80, 96], limit=96, deterministic=True).shapes.every()
    assert [shape.padded_rows for shape in many] == [96, 80, 64, 48, 40, 32, 16]


MIB = 1 << 20


def test_memory_is_reserved_for_all_by_what_the_largest_two_take() -> None:
    device = Device(50 * MIB, 5 * MIB)
    assert device.graphs.reserve(device.run_dummy) == (50 + (7 * 2 - 1) * 5) * MIB
    assert device.captured == names([64, 32])
    assert device.capturer.num_forgotten == 1
    assert device.serve(64) is None, "a capture on trial must not serve"
    device.start()
    assert device.captured == names([64, 32]) + names([64, 4, 2, 1])


def test_a_capture_that_seems_to_take_nothing_is_counted_as_a_piece_of_the_drivers() -> None:
    for draws in (0, 1):
        device = Device(0, capture_draws=draws)
        assert device.graphs.reserve(device.run_dummy) == 13 * (1 + draws) * LEAST_BYTES
    one = Device(7 * MIB, limit=1, deterministic=True)
    assert one.graphs.reserve(one.run_dummy) == 7 * MIB


def test_memory_that_is_given_is_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    """When it is taken, one line says so, and what was captured until then serves."""
    device = Device(6 * MIB, 3 * MIB, graph_memory_bytes=10 * MIB)
    assert device.graphs.reserve(device.run_dummy) == 10 * MIB
    assert not device.captured
    with caplog.at_level(logging.WARNING, "frame"):
        device.start()
        assert device.captured == names([64, 4, 2])
        assert [device.serve(rows) for rows in (1, 2, 5)] == ["decode-2", "decode-2", "decode-64"]
        assert device.serve(2, deterministic=True) is None
        assert not device.graphs.wanted()
        assert not device.capture()
    (line,) = caplog.messages
    assert line.startswith("12 MiB of the 10 MiB of graph_memory_bytes are taken: 3 captured steps stay, others are")


def test_a_device_without_memory_left_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(1, 1, None)
    with caplog.at_level(logging.WARNING, "frame"):
        device.start()
    assert (device.serve(3), device.serve(1)) == ("decode-4", "decode-4")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the device has no memory left: 2 captured steps stay")
    device = Device(None)
    device.start()
    assert device.serve(1) is None


@pytest.mark.parametrize("given", [None, 0])
def test_without_memory_nothing_is_captured(given: int | None) -> None:
    device = Device(None, graph_memory_bytes=given)
    assert device.graphs.reserve(device.run_dummy) == 0
    device.captured.clear()
    assert not device.start().captured
    assert not device.graphs.wanted()
    assert device.serve(1) is None


def test_what_fails_otherwise_is_raised_and_not_tried_again() -> None:
    device = Device()
    with pytest.raises(RuntimeError, match="not permitted"):
        device.graphs.capture(lambda shape: (_ for _ in ()).throw(RuntimeError("operation not permitted")))
    device.start()
    assert device.captured == names([4, 2, 1])


def test_what_fails_between_steps_ends_capture_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    device = Device().start()
    left = device.graphs.wanted()
    assert left
    failing = RuntimeError("operation not permitted")
    assert not device.graphs.capture(lambda shape: (_ for _ in ()).throw(failing))
    assert not device.graphs.wanted()
    assert sum("not permitted" in line for line in caplog.messages) == 1


def test_dropped_graphs_are_made_again() -> None:
    device = Device().start()
    device.finish()
    device.graphs.drop()
    assert device.capturer.num_forgotten == 1
    assert device.serve(3) is None
    device.captured.clear()
    assert device.finish()[0] == "decode-4"
    assert sorted(device.captured) == sorted(names([*SIZES, 64]))
    assert device.serve(3) == "decode-4"


def test_steps_with_prompts_are_captured_when_all_else_is_the_largest_first() -> None:
    device = Device(prompts=64).start()
    assert device.captured == names([64, 4, 2, 1])
    assert device.finish() == names([32, 16, 8]) + names([64, 32, 16], "pieces")
    assert device.tape.ended == 3
    assert [device.prefill(tokens) for tokens in (5, 17, 64, 65)] == [*names([16, 32, 64], "pieces"), None]
    assert device.tape.ended == 3, "the first prompt of a size is a replay"
    assert not device.capture()


def test_they_are_not_captured_between_steps_that_are_served() -> None:
    device = Device(prompts=64).start()
    for _ in range(3):
        device.capture()
    before = list(device.captured)
    assert before[-3:] == names([32, 16, 8])
    for _ in range(5):
        device.serve(3)
        assert device.graphs.wanted()
        assert not device.capture()
    assert device.captured == before
    device.capture()
    assert device.prefill(5) == "pieces-16", "which captures it"
    device.capture()
    assert device.captured == [*before, "pieces-64"]
    assert device.finish() == names([32], "pieces")


def test_between_served_steps_a_size_is_captured_once_padding_has_cost_as_much() -> None:
    device = Device(graph_sizes=[1, 2, 4, 16, 30], most_padding=100).start()
    for _ in range(2):
        assert device.serve(29) == "decode-64"
        device.capture()
    assert device.captured == names([64, 4, 2, 1]), "twice 34 rows too many, where a capture takes as long as 100 rows"
    assert device.serve(29) == "decode-64"
    device.capture()
    assert device.captured[4:] == names([30])
    assert device.serve(29) == "decode-30"
    for _ in range(7):
        assert device.serve(9) == "decode-30"
        device.capture()
    assert device.captured[4:] == names([30]), "seven times 14 rows too many, counted since the last capture"
    device.serve(9)
    device.capture()
    assert device.captured[4:] == names([30, 16])


def test_padding_is_counted_by_kind_and_not_where_the_best_size_serves() -> None:
    device = Device(graph_sizes=[1, 2, 4, 16, 30], most_padding=100).start()
    for _ in range(40):
        for rows in (63, 31, 3):  # of sizes that are there
            device.serve(rows)
            device.capture()
    assert device.captured == names([64, 4, 2, 1])
    device.serve(50, shared=True)
    device.capture()
    assert device.captured[4:] == names([64], "shared"), "a batch that no graph serves waits for no sum"
    for _ in range(2):
        device.serve(29)
        device.serve(29, shared=True)
        device.capture()
    assert device.captured[5:] == []


def test_steps_of_a_warm_up_ask_for_no_graph() -> None:
    device = Device(limit=32, max_model_len=20_000)
    assert device.serve(1) is None
    assert device.start().captured == [*names([32]), *names([4, 2, 1], "short-decode")]


def test_few_short_rows_have_graphs_of_their_own() -> None:
    device = Device(limit=32, max_model_len=20_000).start()
    assert device.captured == [*names([32]), *names([4, 2, 1], "short-decode")]
    assert [device.serve(rows) for rows in (1, 2, 3, 9)] == [*names([1, 2, 4], "short-decode"), "decode-32"]
    assert (device.serve(1, longest=8192), device.serve(1, longest=8193)) == ("short-decode-1", "decode-32")
    assert (device.serve(3, longest=1024), device.serve(3, longest=1025)) == ("short-decode-4", "decode-32")
    later = device.finish()
    assert sorted(later) == sorted([*names([1, 2, 4, 8, 16]), "short-decode-8"])
    assert [device.serve(rows, longest=20_000) for rows in (1, 3, 5)] == names([1, 4, 8])
    assert device.serve(7, longest=1024) == "short-decode-8"
    assert device.serve(3, shared=True) is None
    assert [name for name in device.finish() if "short" in name] == []


def test_a_graph_for_any_length_is_there_although_the_largest_size_is_a_small_one() -> None:
    device = Device(limit=2, max_model_len=20_000).start()
    assert device.captured == [*names([2]), *names([2, 1], "short-decode")]
    assert (device.serve(1, longest=9000), device.serve(2, longest=5)) == ("decode-2", "short-decode-2")


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ({"max_model_len": 20_000}, {1: 8192, 2: 4096, 4: 1024, 8: 1024}),
        ({"max_model_len": 8192}, {2: 4096, 4: 1024, 8: 1024}),
        ({"max_model_len": 1024}, {}),
        ({"max_model_len": 20_000, "graph_sizes": [1, 3, 8]}, {1: 8192, 8: 1024}),
        ({"max_model_len": 20_000, "deterministic": True}, {}),
    ],
)
def test_lengths_that_rows_may_have_anyway_and_deterministic_steps_need_none(
    given: dict[str, Any], short: dict[int, int]
) -> None:
    device = Device(**given)
    assert {shape.padded_rows: shape.max_seq_len for shape in device.graphs.short} == short
    assert all(shape in device.shapes.every() for shape in device.graphs.short)
    plain = Device(**{**given, "max_model_len": 0})
    assert device.graphs.reserve(device.run_dummy) - plain.graphs.reserve(plain.run_dummy) == (
        len(short) * 2 * LEAST_BYTES
    )


def test_data_ranks_take_the_graph_for_short_rows_where_all_have_such() -> None:
    device = Device(limit=32, max_model_len=20_000).start()
    one, long = device.shapes.choose(decodes(1)), device.shapes.choose(decodes(1, longest=9000))
    eager = replace(one, max_seq_len=500)
    assert device.shapes.join([one, eager]) == one
    assert device.shapes.join([one, long]) == long
    assert long.max_seq_len == 0


def test_what_rows_of_padding_take_is_measured_once_and_agreed_on() -> None:
    heard = list[int]()

    def agree(number: int) -> int:
        heard.append(number)
        return number

    device = Device(most_padding=100, agree=agree)
    heard.clear()
    device.start()
    assert heard.count(100) == 1
    device.graphs.drop()
    device.start()
    assert heard.count(100) == 1, "a replay reads the rows of the last step: not while there are requests"


def test_what_rows_of_padding_take_is_not_measured_once_there_were_requests() -> None:
    """The start had no memory for graphs; after a sleep there is some."""
    device = Device(None, most_padding=100).start()
    assert device.serve(3) is None
    device.graphs.drop()
    device.capturer.sizes = [0]

    def measured(replay: Callable[[], None]) -> float:
        raise AssertionError("a replay reads the rows of the last step")

    device.capturer.seconds = measured  # type: ignore[method-assign]
    device.start()
    assert device.serve(3) == "decode-4"


def test_a_capture_that_fails_after_graphs_were_dropped_fails_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a sleep: the step that was asked for a capture answers requests."""
    device = Device().start()
    device.graphs.drop()

    def refused(forward: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(device.capturer, "capture", refused)
    assert device.serve(3) is None
    assert not device.capture()
    assert not device.graphs.wanted()


def test_stages_of_unequal_numbers_of_layers_pad_steps_with_prompts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage receives as many tokens as the stage before it padded to."""
    monkeypatch.setattr(cuda_graphs, "CachedLayer", nn.Identity)
    monkeypatch.setattr(cuda_graphs, "read_bytes", lambda stage: 400_000_000 * len([*stage.children()]))

    class Stage(nn.ModuleList):
        whole_prompts = segments = False

    stages = [Stage(nn.Identity() for _ in range(count)) for count in (5, 3)]

    def sizes(stage: Any, agree: Callable[[int], int]) -> list[int]:
        device = Device(prompts=8192, agree=agree)
        device.graphs.prepare(stage, device.shapes)
        return device.graphs._pieces.sizes

    given = list[int]()

    def tell(number: int) -> int:
        given.append(number)
        return number

    for stage in stages:
        sizes(stage, tell)
    first, second = (sizes(stage, lambda number: max(given)) for stage in stages)
    assert first == second
    assert 0 < len(first) < len(SIZES_OF_PROMPTS), "a bound that stages must agree on"


def test_dropped_pieces_are_wanted_again() -> None:
    device = Device(prompts=32).start()
    device.finish()
    device.graphs.drop()
    assert device.finish()[-2:] == names([32, 16], "pieces")
    assert not device.graphs.wanted()


@pytest.mark.parametrize("given", [{"deterministic": True}, {"capture_prompts": False}, {"prompts": 0}])
def test_where_steps_with_prompts_run_as_they_are_none_is_wanted(given: dict[str, object]) -> None:
    device = Device(**{"prompts": 64, **given}).start()
    assert not [name for name in device.finish() if name.startswith("pieces")]


@pytest.mark.parametrize(("sizes", "budget"), [((0,), 0), ((MIB, MIB), 7 * MIB), ((1, None), None)])
def test_where_memory_is_short_they_are_captured_only_when_they_come(
    sizes: tuple[int | None, ...], budget: int | None
) -> None:
    device = Device(*sizes, prompts=64, graph_memory_bytes=budget).start()
    assert not [name for name in device.finish() if name.startswith("pieces")]
    assert not device.graphs.wanted()
    assert device.prefill(5) == "pieces-16"
    assert device.tape.ended == 1


REFUSED = RuntimeError("operation not permitted when stream is capturing")


def test_what_a_driver_refuses_first_is_captured_the_next_time() -> None:
    device = Device(prompts=64, tape=TapeCapturer(0, REFUSED, failures=1)).start()
    assert device.finish()[-4:] == names([64, 64, 32, 16], "pieces")
    assert not device.graphs.wanted()


@pytest.mark.parametrize(("error", "tries"), [(REFUSED, 2), (None, 1)])
def test_pieces_that_cannot_be_captured_are_not_wanted_for_ever(
    error: Exception | None, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(prompts=64, tape=TapeCapturer(1, error)).start()
    assert device.finish()[-1 - tries :] == names([64, *[32] * tries], "pieces")
    assert [line.split(":")[0] for line in caplog.messages] == ["steps with prompts are no longer captured"]
    assert device.prefill(5) is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ValueError("wrong")])
def test_a_dummy_step_with_prompts_that_fails_ends_capture_and_no_request(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(prompts=64).start()
    while device.graphs._todo:
        device.capture()
    assert not device.graphs.capture(lambda shape: (_ for _ in ()).throw(error))
    assert not device.graphs.wanted()
    assert len(caplog.messages) == 1
    assert device.prefill(5) == "pieces-16"
