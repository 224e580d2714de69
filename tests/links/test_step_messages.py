"""What workers are told of a step is what the scheduler planned, and bytes that are no plan are refused."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from frame.core.interfaces.adapters import AdapterLoad
from frame.core.interfaces.pooling_params import PoolingParams
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import BlockAppend, BlockCopy, NewRequest, PrefixRows, StepPlan
from frame.core.interfaces.wire import decode, decoder_apart, encode, encoder_apart
from frame.core.worker.channel_worker import ToWorker
from frame.links.step_messages import Execute, Sample
from frame.testing.connector_suite import empty_plan

INT32 = np.iinfo(np.int32)


def numbers(length: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.int32, length, elements=st.integers(INT32.min, INT32.max))


def lengths(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most)


some = lengths(600).flatmap(numbers)

requests = st.builds(
    NewRequest,
    slot=st.integers(0, 1000),
    request_id=st.text(max_size=8),
    token_ids=some,
    prompt_len=st.integers(0, 1 << 20),
    num_computed=st.integers(0, 1 << 20),
    block_ids=st.lists(some, max_size=2),
    params=st.builds(SamplingParams, temperature=st.floats(0, 2), max_tokens=st.integers(1, 100)),
    seed=st.integers(0, (1 << 63) - 1),
    eos_token_ids=st.lists(st.integers(0, 1 << 20), max_size=3),
    pooling=st.none() | st.builds(PoolingParams),
)


def appends(length: int) -> st.SearchStrategy[BlockAppend]:
    three = {name: numbers(length) for name in ("slots", "offsets", "block_ids")}
    return st.builds(BlockAppend, group=st.integers(0, 30), **three)


def copies(length: int) -> st.SearchStrategy[BlockCopy]:
    return st.builds(BlockCopy, group=st.integers(0, 30), sources=numbers(length), targets=numbers(length))


def plans_of(rows: int) -> st.SearchStrategy[StepPlan]:
    return st.builds(
        StepPlan,
        step=st.integers(0, 1 << 62),
        removed_slots=lengths(9).flatmap(numbers),
        added=st.lists(requests, max_size=2),
        appends=st.lists(lengths(9).flatmap(appends), max_size=3),
        slots=numbers(rows),
        num_scheduled=numbers(rows),
        num_computed=numbers(rows),
        samples=arrays(np.bool_, rows),
        num_drafts=numbers(rows),
        finished_ids=st.lists(st.text(max_size=8), max_size=3),
        deterministic=st.booleans(),
        prefixes=st.lists(st.builds(PrefixRows, rows=some, num_tokens=st.integers(0, 1 << 20)), max_size=3),
        capture=st.booleans(),
        copies=st.lists(st.builds(BlockCopy, group=st.integers(0, 30), sources=some, targets=some), max_size=2),
        extras=st.dictionaries(st.text(max_size=8), st.binary(max_size=99), max_size=2),
        adapters=st.lists(st.builds(AdapterLoad, slot=st.integers(1, 9), key=st.integers(1, 1 << 40)), max_size=2),
        adapted=st.booleans(),
    )


plans = lengths(70).flatmap(plans_of)


def assert_same(one: object, other: object) -> None:
    """Equal down to the types and shapes of arrays, which may be written to."""
    assert type(one) is type(other)
    if isinstance(one, msgspec.Struct):
        for name in one.__struct_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other)
        assert one.flags.writeable
    else:
        assert one == other


class Apart:
    """Memory in which a transport places large arrays."""

    def __init__(self) -> None:
        self.memory = bytearray()

    def place(self, data: memoryview) -> int:
        self.memory += data
        return len(self.memory) - len(data)

    def find(self, start: int, length: int) -> memoryview:
        return memoryview(bytes(self.memory))[start : start + length]


def test_the_strategy_fills_every_field_of_a_plan() -> None:
    """So that a field that `Execute` forgets makes the next test fail."""
    named = "step removed_slots added appends slots num_scheduled num_computed samples num_drafts finished_ids"
    named += " deterministic prefixes capture extras copies adapters adapted"
    assert {*named.split()} == set(StepPlan.__struct_fields__)


@settings(max_examples=150, deadline=None)
@given(plans)
def test_every_plan_arrives_as_it_was(plan: StepPlan) -> None:
    apart = Apart()
    assert_same(plan, decode(encode(Execute.of(plan)), ToWorker).plan())
    body = encoder_apart(apart.place)(Execute.of(plan))
    assert_same(plan, decoder_apart(ToWorker, apart.find)(memoryview(body)).plan())


@settings(max_examples=300, deadline=None)
@given(plans, st.data())
def test_bytes_that_are_no_plan_are_refused_and_nothing_is_read_beyond_them(
    plan: StepPlan, data: st.DataObject
) -> None:
    message = Execute.of(plan)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(message.numbers) - 1, 60)))
        message.numbers[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message.numbers)))
    message.numbers = message.numbers[:cut] if data.draw(st.booleans()) else message.numbers + bytes(cut % 7)
    found = None
    with contextlib.suppress(ValueError):
        found = message.plan()
    if found is None:
        with pytest.raises(ValueError, match="bytes are not the numbers of a plan"):
            message.plan()
        return
    assert len({len(getattr(found, name)) for name in ("slots", "num_scheduled", "num_computed", "samples")}) == 1
    assert set(found.samples.view(np.uint8)) <= {0, 1}


@pytest.mark.parametrize("count", [0, 23])
def test_fewer_bytes_than_a_head_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} bytes are not the numbers of a plan of 0 rows"):
        Execute(bytearray(count)).plan()


def rows(**others: np.ndarray) -> StepPlan:
    plan = empty_plan(7)
    three = np.arange(3, dtype=np.int32)
    values = dict.fromkeys(("slots", "num_scheduled", "num_computed", "num_drafts"), three)
    for name, value in {**values, "samples": np.ones(3, bool), **others}.items():
        setattr(plan, name, value)
    return plan


@pytest.mark.parametrize("name", ["num_scheduled", "num_computed", "num_drafts", "samples"])
def test_arrays_that_do_not_fit_together_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the plan of step 7 has arrays of different lengths for the same rows"):
        Execute.of(rows(**{name: np.zeros(4, bool if name == "samples" else np.int32)}))


def test_appends_whose_arrays_do_not_fit_together_are_refused() -> None:
    plan, two = rows(), np.zeros(2, np.int32)
    plan.appends = [BlockAppend(group=0, slots=two, offsets=two, block_ids=two[:1])]
    with pytest.raises(ValueError, match="the plan of step 7 has arrays of different lengths for the same rows"):
        Execute.of(plan)


@pytest.mark.parametrize("values", [np.array([1, 1 << 40, 3]), np.array([1, 2.5, 3])])
def test_numbers_that_are_not_of_32_bits_are_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="the plan of step 7 has values that are not int32"):
        Execute.of(rows(num_computed=values))


def test_wider_types_and_strides_arrive_as_int32() -> None:
    table = np.arange(6, dtype=np.int32).reshape(3, 2)
    plan = rows(slots=table[:, 0], num_computed=np.arange(3), samples=np.array([1, 0, 1]))
    found = Execute.of(plan).plan()
    assert (found.slots.tolist(), found.num_computed.tolist()) == ([0, 2, 4], [0, 1, 2])
    assert found.num_computed.dtype == np.int32
    assert found.samples.tolist() == [True, False, True]


def test_a_plan_does_not_change_with_the_arrays_that_it_was_made_of() -> None:
    plan = rows()
    message = Execute.of(plan)
    plan.slots[:] = 9
    assert message.plan().slots.tolist() == [0, 1, 2]


def test_empty_fields_take_no_bytes() -> None:
    assert len(encode(Execute.of(empty_plan(0)))) == 48
    assert len(encode(Sample.of(b""))) == 13


@pytest.mark.parametrize("masks", [b"", b"some"])
def test_masks_arrive(masks: bytes) -> None:
    assert bytes(decode(encode(Sample.of(masks)), ToWorker).masks.data) == masks
