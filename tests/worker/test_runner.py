"""What a step that fails between its parts leaves to the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from frame import LLM
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import NewRequest, StepPlan, TransferReport
from frame.core.interfaces.wire import encode
from frame.core.worker.start import model_loading
from frame.core.worker.step.runner import Runner
from frame.interfaces import LayerHooks
from frame.testing.checkpoints import make_checkpoint
from frame.transfers.untold import LOST, UntoldReports

NONE = np.zeros(0, np.int32)


class Reports:
    """A connector whose steps report one request each."""

    hooks = LayerHooks()

    def __init__(self, pending: Any = None) -> None:
        self.step, self.pending = 0, pending

    def begin_step(self, message: bytes) -> None:
        self.step += 1

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        name = str(self.step)
        return TransferReport(received=[name], sent=[name], counters={"steps": 1.0}, gauges={"step": float(self.step)})

    def pending_loads(self) -> Any:
        return self.pending() if callable(self.pending) else self.pending

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = make_checkpoint(tmp_path_factory.mktemp("runner"), "llama")
    engine = LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=40, max_num_seqs=4)
    yield engine.llm_engine
    engine.close()


@pytest.fixture
def runner(engine: Any) -> Runner:
    (found,) = engine.collective_rpc(lambda worker: worker.runner)
    return found


def plan(step: int, *added: NewRequest) -> StepPlan:
    """A step that computes the prompts of these requests."""
    slots = np.array([new.slot for new in added], np.int32)
    return StepPlan(
        step=step,
        removed_slots=NONE,
        added=list(added),
        appends=[],
        slots=slots,
        num_scheduled=np.array([len(new.token_ids) for new in added], np.int32),
        num_computed=np.zeros(len(added), np.int32),
        samples=np.ones(len(added), np.bool_),
        num_drafts=np.zeros(len(added), np.int32),
        finished_ids=[],
    )


def new(slot: int, tokens: Sequence[int], blocks: Sequence[int]) -> NewRequest:
    return NewRequest(
        slot=slot,
        request_id=f"{slot}",
        token_ids=np.array(tokens, np.int32),
        prompt_len=len(tokens),
        num_computed=0,
        block_ids=[np.array(blocks, np.int32)],
        params=SamplingParams(temperature=0.0),
        seed=0,
    )


def fail(*arguments: Any) -> None:
    raise RuntimeError("a processor failed")


def test_what_a_connector_reported_in_a_step_that_failed_is_told_with_a_later_one_that_names_it(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "connector", Reports())
    runner.execute(plan(0, new(0, [5, 6], [1])))
    with monkeypatch.context() as broken:
        broken.setattr(runner, "_draw", fail)
        with pytest.raises(RuntimeError, match="a processor failed"):
            runner.sample()
    runner.execute(plan(1, new(0, [5, 6], [1])))  # and this one is never sampled: its masks failed
    runner.execute(plan(2, new(0, [5, 6], [1])))  # which another worker fails behind
    assert runner.sample().result().transfer.received == ["3"]
    later = plan(3)
    later.extras = {LOST: encode([(0, []), (1, ["x"]), (2, [])])}
    runner.execute(later)
    report = runner.sample().result().transfer
    assert report.received == report.sent == ["1", "2", "3", "4"]
    assert (report.counters, report.gauges) == ({"steps": 4.0}, {"step": 4.0})
    again = plan(4)
    again.extras = {LOST: encode([(0, []), (1, ["x"]), (2, [])])}  # it was on its way before the answer came
    runner.execute(again)
    assert runner.sample().result().transfer.received == ["5"]
    for step in range(5, 400):
        runner.execute(plan(step))
        runner.sample()
    assert len(runner._untold._reports) <= 256


def test_all_that_follows_slots_is_told_of_them_though_one_raises(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    broken = SimpleNamespace(add=fail, remove=fail)
    sound = SimpleNamespace(add=lambda request: told.append(request.request_id), remove=told.append)
    monkeypatch.setattr(runner, "_by_slot", (broken, sound))
    step = plan(0, new(1, [5, 6], [1]), new(2, [5, 6], [4]))
    step.removed_slots = np.array([2, 3], np.int32)
    with pytest.raises(RuntimeError, match="a processor failed"):
        runner.execute(step)
    assert told == [2, 3, "1", "2"]
    told.clear()
    monkeypatch.setattr(runner.tables, "add", fail)
    with pytest.raises(RuntimeError, match="a processor failed"):
        runner.execute(step)
    assert told == [2, 3, "1", "2"]


def test_a_step_on_its_way_finds_the_tables_of_a_failed_one_and_a_later_one_its_own(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tables of who had the slots before, it would write into blocks that may be another's by now.

    And two runs for one place of a table are written in any order.
    """
    runs: list[tuple[int, int, int]] = []
    write = runner.device.ops.write_rows

    def noted(table: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, values: Tensor) -> None:
        runs.extend(zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True))
        write(table, slots, starts, lengths, values)

    monkeypatch.setattr(runner.device.ops, "write_rows", noted)
    with monkeypatch.context() as broken:
        broken.setattr(runner.sampler, "add", fail)
        with pytest.raises(RuntimeError, match="a processor failed"):
            runner.execute(plan(0, new(1, [5, 6, 7, 8], [1, 2, 3]), new(2, [5, 6], [4, 5])))
    runner.execute(plan(1))
    assert runner.tables.blocks[0][2, :2].tolist() == [4, 5]
    runs.clear()
    with monkeypatch.context() as broken:
        broken.setattr(runner.sampler, "add", fail)
        with pytest.raises(RuntimeError, match="a processor failed"):
            runner.execute(plan(2, new(1, [5, 6, 7, 8], [1, 2, 3]), new(2, [5, 6], [4, 5])))
    runner.execute(plan(3, new(1, [9, 9], [6])))
    assert sorted(runs) == [(1, 0, 1), (1, 0, 2), (2, 0, 2), (2, 0, 2)]
    assert runner.tables.token_ids[1, :2].tolist() == [9, 9]
    assert runner.tables.blocks[0][1, :1].tolist() == [6]
    assert runner.tables.blocks[0][2, :2].tolist() == [4, 5]


def test_weights_that_sleep_dropped_are_read_in_place(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy of them beside the cache might find no room."""
    (before,) = engine.collective_rpc(lambda worker: [one.clone() for one in worker.model.parameters()])
    monkeypatch.setattr(model_loading, "build_model", fail)
    engine.core.call("sleep", {"keep": []})
    (asleep,) = engine.collective_rpc(
        lambda worker: sum(one.untyped_storage().nbytes() for one in worker.model.parameters())
    )
    assert asleep == 0
    engine.core.call("wake_up")
    (after,) = engine.collective_rpc(lambda worker: list(worker.model.parameters()))
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_loads_of_a_step_that_failed_before_the_connector_heard_of_it_are_told_as_ended_once(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "connector", Reports())
    with monkeypatch.context() as broken:
        broken.setattr(runner, "_apply_changes", fail)
        with pytest.raises(RuntimeError, match="a processor failed"):
            runner.execute(plan(1000))
    for step, received in ((1001, ["a", "1"]), (1002, ["2"])):
        one = plan(step)
        one.extras = {LOST: encode([(1000, ["a"])])}
        runner.execute(one)
        assert runner.sample().result().transfer.received == received


@pytest.mark.parametrize(
    ("pending", "ended"),
    [
        (None, []),
        ((), ["b", "c"]),
        (("c",), ["b"]),
        (("b", "c"), []),
        (fail, []),  # it cannot tell
        (7, []),
        ("b", []),  # for the names of all loads
        ([["b"]], []),
        (lambda: (fail() for _ in range(1)), []),
    ],
)
def test_loads_that_do_not_go_on_though_the_connector_heard_of_their_step_are_told_once(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, pending: Any, ended: list[str]
) -> None:
    """One of them was told with a report that the engine has: its id may be another request's by now."""
    monkeypatch.setattr(runner, "connector", Reports(pending))
    monkeypatch.setattr(runner, "_untold", UntoldReports())
    with monkeypatch.context() as broken:
        broken.setattr(runner.connector, "begin_step", fail)
        with pytest.raises(RuntimeError, match="a processor failed"):
            runner.execute(plan(2000))
    runner.execute(plan(2001))
    assert runner.sample().result().transfer.received == ["1"]
    for step, received in ((2002, [*ended, "2"]), (2003, ["3"])):
        one = plan(step)
        one.extras = {LOST: encode([(2000, ["1", "b", "c"])])}
        runner.execute(one)
        assert runner.sample().result().transfer.received == received
