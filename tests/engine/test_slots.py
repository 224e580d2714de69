from __future__ import annotations

import numpy as np
import pytest

from frame.core.engine.schedule.slots import Slots


def test_the_lowest_free_slot_comes_first():
    slots = Slots(3)
    assert [slots.take(), slots.take()] == [0, 1]
    assert slots.retire(0)
    assert slots.take() == 0
    assert slots.num_free == 1
    slots.take()
    with pytest.raises(IndexError):
        slots.take()


def test_a_slot_comes_back_only_when_every_step_that_names_it_is_answered():
    slots = Slots(2)
    slot = slots.take()
    rows = np.array([slot], np.int32)
    slots.launch(rows)
    slots.launch(rows)
    assert slots.unanswered(slot) == 2
    assert not slots.retire(slot)
    assert slots.num_free == 1
    assert slots.answer(rows) == []
    assert slots.answer(rows) == [slot]
    assert slots.num_free == 2
