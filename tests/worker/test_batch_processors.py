"""Batch-style processors: the update that they see, and that slots and dense rows never get mixed up."""

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from frame.interfaces import SamplingParams
from frame.testing import make_setup
from frame.vllm_names.dense_rows import BatchProcessorAdapter, DenseRows
from frame.vllm_names.processors import (
    AdapterLogitsProcessor,
    BatchLogitsProcessor,
    BatchUpdate,
    MoveDirectionality,
)
from tests.worker.sampling import VOCAB, add, draw, make_sampler, new_request, some_logits

ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP
CPU = torch.device("cpu")
A, B, C, D, E, F = range(10, 16)


def dense_of(*slots):
    dense = DenseRows()
    for slot in slots:
        dense.add(slot, SamplingParams(), [], [])
    dense.update(slots)
    return dense


def added_slots(update, slot_of):
    return [(row, slot_of[id(output_ids)]) for row, _, _, output_ids in update.added]


def test_golden_case_a():
    dense = dense_of(A, B, C, D)
    params, prompt, output = SamplingParams(), [1, 2], []
    dense.remove(A)
    dense.remove(C)
    dense.add(E, params, prompt, output)
    update = dense.update([B, E, D])
    assert [row for row, *_ in update.added] == [0]
    assert update.added[0][1:] == (params, prompt, output)
    assert update.added[0][3] is output
    assert list(update.removed) == [2]
    assert list(update.moved) == [(3, 2, ONE_WAY), (0, 1, SWAP)]
    assert update.batch_size == 3
    assert dense.rows == [B, E, D]


def test_golden_case_b():
    dense = dense_of(A, B, C, D)
    dense.remove(C)
    dense.add(E, SamplingParams(), [], [])
    dense.add(F, SamplingParams(), [], [])
    update = dense.update([B, A, E, D, F])
    assert [row for row, *_ in update.added] == [2, 4]
    assert list(update.removed) == []
    assert list(update.moved) == [(0, 1, SWAP)]
    assert update.batch_size == 5
    assert dense.rows == [B, A, E, D, F]


def test_nothing_changed_is_none():
    dense = dense_of(A, B)
    assert dense.update([A, B]) is None
    dense.add(C, SamplingParams(), [], [])
    dense.remove(C)
    assert dense.update([A, B]) is None
    dense.remove(A)
    dense.remove(B)
    update = dense.update([])
    assert (list(update.removed), list(update.moved), update.batch_size) == ([1, 0], [], 0)


class Recorder(BatchLogitsProcessor):
    """Keeps what row holds which request, by applying updates as the contract says, and adds the request's mark."""

    def __init__(self, config, device, is_pin_memory):
        self.rows = {}
        self.updates = []

    def is_argmax_invariant(self):
        return False

    def update_state(self, update):
        self.updates.append(update)
        if update is None:
            return
        assert set(update.removed).isdisjoint(row for row, *_ in update.added)
        assert list(update.removed) == sorted(update.removed, reverse=True)
        for row in update.removed:
            del self.rows[row]
        for row, params, prompt_ids, output_ids in update.added:
            self.rows[row] = (params.extra_args["mark"], prompt_ids, output_ids)
        for source, target, direction in update.moved:
            moving = self.rows.pop(source)
            if direction is SWAP:
                self.rows[source] = self.rows.pop(target)
            self.rows[target] = moving
        assert sorted(self.rows) == list(range(update.batch_size))

    def apply(self, logits):
        assert len(logits) == len(self.rows)
        for row, (mark, _, _) in self.rows.items():
            logits[row] += mark
        return logits


SLOTS = st.integers(0, 6)


@given(
    st.lists(st.tuples(st.sets(SLOTS), st.lists(SLOTS, unique=True), st.randoms(use_true_random=False)), max_size=25)
)
@settings(deadline=None, max_examples=80)
def test_updates_lead_any_history_to_the_right_rows(history):
    recorder = Recorder(None, CPU, False)
    adapter = BatchProcessorAdapter(recorder, make_setup("processor"))
    live = {}
    for step, (gone, new, draw_order) in enumerate(history):
        for slot in gone:
            live.pop(slot, None)
            adapter.remove(slot)
        for slot in new:
            live[slot] = 100 * step + slot
            adapter.add(slot, SamplingParams(extra_args={"mark": live[slot]}), [step], [])
        present = draw_order.sample(sorted(live), draw_order.randint(0, len(live)))
        changed = adapter.apply(torch.zeros(len(present), 4), present)
        assert changed[:, 0].tolist() == [live[slot] for slot in present]


def test_the_batch_size_is_that_of_the_end():
    recorder = Recorder(None, CPU, False)
    adapter = BatchProcessorAdapter(recorder, make_setup("processor"))
    for slot in range(3):
        adapter.add(slot, SamplingParams(extra_args={"mark": 1}), [], [])
    adapter.apply(torch.zeros(3, 4), [0, 1, 2])
    adapter.apply(torch.zeros(3, 4), [0, 1, 2])
    adapter.remove(1)
    adapter.apply(torch.zeros(2, 4), [0, 2])
    first, same, last = recorder.updates
    assert first.batch_size == 3
    assert same is None
    assert last == BatchUpdate(2, [1], [], [(2, 1, ONE_WAY)])


class Target(AdapterLogitsProcessor):
    """Forces the token that a request names, as the example of the field does; token 0 counts."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        target = (params.extra_args or {}).get("target_token")
        if target is None:
            return None

        def force(output_ids, logits):
            kept = logits[target].item()
            logits[:] = -torch.inf
            logits[target] = kept
            return logits

        return force


def styles():
    """The three ways to run the same processor."""
    yield Target.adapted(make_setup("processor"))
    yield BatchProcessorAdapter(Target(None, CPU, False), make_setup("processor"))


def test_requests_that_opt_in_are_forced_and_others_untouched():
    logits = some_logits(4)
    plain = logits.argmax(-1).tolist()
    for processor in styles():
        sampler = make_sampler(processors=[processor])
        targets = [{"target_token": 0}, None, {"target_token": 9}, {}]
        add(sampler, *(new_request(slot, temperature=0.0, extra_args=extra) for slot, extra in enumerate(targets)))
        assert draw(sampler, logits, [0, 1, 2, 3], [3] * 4) == [0, plain[1], 9, plain[3]]
        assert draw(sampler, logits[[3, 2, 0]], [3, 2, 0], [4] * 3) == [plain[3], 9, 0]


def test_a_replacement_that_does_not_opt_in_inherits_nothing():
    for processor in styles():
        sampler = make_sampler(processors=[processor])
        add(sampler, new_request(0, temperature=0.0, extra_args={"target_token": 7}))
        logits = some_logits(1)
        assert draw(sampler, logits, [0], [3]) == [7]
        add(sampler, new_request(0, temperature=0.0))
        assert draw(sampler, logits, [0], [3]) == logits.argmax(-1).tolist()


def test_a_swap_with_one_empty_side_moves_the_other():
    adapter = Target(None, CPU, False)
    opted, plain = SamplingParams(extra_args={"target_token": 3}), SamplingParams()
    adapter.update_state(BatchUpdate(2, [], [(0, opted, None, []), (1, plain, None, [])], []))
    adapter.update_state(BatchUpdate(2, [], [], [(1, 0, SWAP)]))
    logits = adapter.apply(torch.zeros(2, 5))
    assert logits[0].tolist() == [0] * 5
    assert logits[1].isfinite().tolist() == [False, False, False, True, False]


def test_output_ids_grow_under_a_processor():
    seen = []

    class Watcher(Recorder):
        def apply(self, logits):
            seen.append([list(output) for _, _, output in self.rows.values()])
            return logits

    sampler = make_sampler(processors=[BatchProcessorAdapter(Watcher(None, CPU, False), make_setup("processor"))])
    add(sampler, new_request(0, output=(8,), temperature=0.0, extra_args={"mark": 0}))
    slots = np.array([0], np.int32)
    assert sampler.needs_host_tokens(slots)
    for length in (4, 5):
        token = draw(sampler, some_logits(1), [0], [length])
        sampler.deliver(slots, np.array(token, np.int32))
    draw(sampler, some_logits(1), [0], [6])
    best = int(some_logits(1).argmax())
    assert seen == [[[8]], [[8, best]], [[8, best, best]]]
    assert best < VOCAB
