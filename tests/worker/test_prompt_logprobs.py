"""Prompt log-probabilities: any chunking gives the same rows, each once, equal to a plain log-softmax."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from frame.core.ops import Ops
from frame.core.worker.device import Device
from frame.core.worker.sample import prompt_logprobs
from frame.core.worker.sample.prompt_logprobs import PromptLogprobs
from frame.interfaces import LogprobRows, StepPlan
from frame.plugins.platforms.cpu import HostStreams
from tests.worker.sampling import new_request

VOCAB, HIDDEN, SLOTS, LENGTH = 17, 8, 4, 40
GENERATOR = torch.Generator().manual_seed(3)
HEAD = torch.randn(HIDDEN, VOCAB, generator=GENERATOR)
STATES = torch.randn(SLOTS, LENGTH, HIDDEN, generator=GENERATOR)
TABLE = torch.randint(0, VOCAB, (SLOTS, LENGTH), generator=GENERATOR, dtype=torch.int32)


def plan_of(rows):
    """A step of (slot, computed, scheduled) rows."""
    slots, computed, scheduled = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    none = np.zeros(len(rows), np.int32)
    return StepPlan(
        step=0,
        removed_slots=none[:0],
        added=[],
        appends=[],
        slots=slots,
        num_scheduled=scheduled,
        num_computed=computed,
        samples=none > 0,
        num_drafts=none,
    )


def collect(collector, rows):
    hidden = torch.cat([STATES[slot, start : start + count] for slot, start, count in rows])
    chunks = collector.collect(plan_of(rows), hidden, TABLE, lambda part: part @ HEAD)
    return {} if chunks is None else chunks.rows()


def expected(slot, first, last, k):
    """Rows for positions first .. last - 1, which score the tokens behind them."""
    values = (STATES[slot] @ HEAD).log_softmax(-1)[first:last]
    own = TABLE[slot, first + 1 : last + 1].long()[:, None]
    best = values.topk(k, -1)
    return LogprobRows(
        token_ids=torch.cat([own, best.indices], -1).int().numpy(),
        logprobs=torch.cat([values.gather(-1, own), best.values], -1).numpy(),
        ranks=((values > values.gather(-1, own)).sum(-1) + 1).int().numpy(),
    )


def same(found, wanted):
    np.testing.assert_array_equal(found.token_ids, wanted.token_ids)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.ranks, wanted.ranks)


def joined(parts):
    return LogprobRows(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in ("token_ids", "logprobs", "ranks")}
    )


def make_collector():
    return PromptLogprobs(Device(Ops(), HostStreams(), torch.device("cpu")), "raw_logprobs")


def request_of(slot, prompt_len, k, output=0):
    tokens = TABLE[slot, : prompt_len + output].tolist()
    return new_request(slot, tokens[:prompt_len], tokens[prompt_len:], prompt_logprobs=k, request_id=f"r{slot}")


@given(st.integers(2, 30), st.lists(st.integers(1, 9), min_size=1, max_size=30), st.sampled_from([0, 2, VOCAB, -1]))
@settings(deadline=None, max_examples=60)
def test_any_chunking_gives_every_position_once(prompt_len, chunks, k):
    collector = make_collector()
    collector.add(request_of(1, prompt_len, k))
    parts, start = [], 0
    while start < prompt_len:
        count = min(chunks[start % len(chunks)], prompt_len - start)
        parts += [rows for row, rows in collect(collector, [(0, 5, 2), (1, start, count)]).items() if row == 1]
        start += count
    same(joined(parts), expected(1, 0, prompt_len - 1, VOCAB if k < 0 else k))
    assert collect(collector, [(1, prompt_len, 1)]) == {}


def test_a_chunk_that_ends_at_the_last_scored_position_completes():
    collector = make_collector()
    collector.add(request_of(0, 10, 1))
    same(collect(collector, [(0, 0, 9)])[0], expected(0, 0, 9, 1))
    assert collect(collector, [(0, 9, 1)]) == {}


def test_a_prompt_of_one_token_has_no_rows():
    collector = make_collector()
    collector.add(request_of(0, 1, 1))
    assert collect(collector, [(0, 0, 1)]) == {}


def test_long_chunks_are_scored_in_parts(monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MAX_ROWS", 4)
    collector = make_collector()
    collector.add(request_of(2, 30, 3))
    same(collect(collector, [(2, 0, 30)])[0], expected(2, 0, 29, 3))


def test_a_repeated_prefill_brings_its_rows_again_unless_it_has_output():
    collector = make_collector()
    collector.add(request_of(0, 12, 1))
    same(collect(collector, [(0, 0, 5)])[0], expected(0, 0, 5, 1))
    collector.remove(0)
    collector.add(request_of(0, 12, 1))
    same(collect(collector, [(0, 0, 8)])[0], expected(0, 0, 8, 1))
    same(collect(collector, [(0, 8, 4)])[0], expected(0, 8, 11, 1))
    collector.remove(0)
    collector.add(request_of(0, 12, 1, output=2))
    assert collect(collector, [(0, 0, 14)]) == {}


@pytest.mark.parametrize("k", [0, 3])
def test_slots_that_did_not_ask_get_nothing(k):
    collector = make_collector()
    collector.add(request_of(0, 12, None))
    collector.add(request_of(3, 12, k))
    assert list(collect(collector, [(0, 0, 4), (3, 0, 4)])) == [1]
    collector.remove(3)
    collector.add(request_of(3, 12, None))
    assert collect(collector, [(3, 0, 12)]) == {}
