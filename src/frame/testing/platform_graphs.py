"""The contract of a platform's shapes and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from frame.core.interfaces.model import ForwardStep
from frame.core.interfaces.platform import Platform
from frame.core.interfaces.platform_steps import Length, Part, StepShape
from frame.core.interfaces.step import StepPlan

from .platform_checks import PlatformChecks


class GraphChecks(PlatformChecks):
    """Shapes have room for the steps that they are chosen for; graphs give what the work that they replace gives."""

    @pytest.mark.parametrize("rows", [[1], [1, 1, 1], [7], [5, 1, 1, 20]], ids=str)
    def test_shapes_hold_the_step(self, platform: Platform, rows: list[int]) -> None:
        plan = step_of(rows)
        shape = platform.steps().shapes.choose(plan)
        assert shape.padded_tokens >= sum(rows), f"{shape} has no room for {sum(rows)} tokens"
        assert shape.padded_rows >= len(rows), f"{shape} has no room for {len(rows)} rows"
        assert shape.padded_samples == 0 or shape.padded_samples >= len(rows), f"{shape} has no room for its samples"
        assert shape.max_query_len >= max(rows), f"{shape} says that no row has more than {shape.max_query_len} tokens"
        assert shape.max_seq_len == 0 or shape.max_seq_len >= max(rows), f"{shape} cuts the longest row"
        plan.deterministic = True
        assert platform.steps().shapes.choose(plan).deterministic, "a deterministic plan has a shape that is not"

    def test_lengths_are_padded_upwards(self, platform: Platform) -> None:
        shapes = platform.steps().shapes
        for what in get_args(Length):
            for count in (1, 2, 3, 100, 1000):
                padded = shapes.pad(what, count)
                assert padded >= count, f"pad({what!r}, {count}) gave {padded}, which is less"

    def test_graphs_run_what_they_are_given(self, platform: Platform) -> None:
        steps = platform.steps()
        shape = steps.shapes.choose(step_of([3]))
        want = torch.ones(shape.padded_tokens, 4, device=platform.device)
        assert torch.equal(steps.graphs.run(shape, "forward", _Given(want + 1)), want + 1)
        ran: list[str] = []
        for part in get_args(Part):
            if part != "forward":
                assert steps.graphs.run(shape, part, partial(_say, ran, part)) == part, (
                    f"run must give what {part} gave"
                )
            assert isinstance(steps.graphs.captures(shape, part), bool)
        assert ran == ["writes", "draw", "drafts"], f"each part must run once, and ran: {ran}"
        assert isinstance(steps.graphs.capture(lambda shape: None), bool)

    def test_graphs_come_to_an_end_and_can_be_dropped(self, platform: Platform) -> None:
        steps = platform.steps()
        graphs = steps.graphs

        def run_dummy(shape: StepShape) -> None:
            graphs.run(shape, "forward", _Given(torch.zeros(shape.padded_tokens, 4, device=platform.device)))

        reserved = graphs.reserve(run_dummy)
        assert isinstance(reserved, int), f"reserve must give bytes, gave {reserved!r}"
        assert reserved >= 0
        while graphs.capture(run_dummy):
            pass
        for _ in range(1000):
            if not graphs.wanted():
                break
            graphs.capture(run_dummy)
        assert not graphs.wanted(), "1000 captures did not end wanted(): an idle engine would never rest"
        graphs.drop()
        shape = steps.shapes.choose(step_of([1, 1, 1]))
        want = torch.ones(shape.padded_tokens, 4, device=platform.device)
        found = graphs.run(shape, "forward", _Given(want + 1))
        assert torch.equal(found, want + 1), "a dropped capture was replayed"


def _say(said: list[str], part: str) -> str:
    said.append(part)
    return part


class _Given:
    """Implements `Forward` with a function that returns a given result."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def step(self) -> ForwardStep:
        return ForwardStep(plans=[], batches=[])

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        del step
        return self._hidden


def step_of(rows: Sequence[int]) -> StepPlan:
    """A plan of rows with that many tokens each, all of them new."""
    count = len(rows)
    return StepPlan(
        step=1,
        removed_slots=np.zeros(0, np.int32),
        added=[],
        appends=[],
        slots=np.arange(count, dtype=np.int32),
        num_scheduled=np.array(rows, np.int32),
        num_computed=np.zeros(count, np.int32),
        samples=np.ones(count, bool),
        num_drafts=np.zeros(count, np.int32),
    )
