from __future__ import annotations

import pytest

from frame.core.engine.request import Request
from frame.core.engine.schedule.waiting import WaitingQueue
from frame.plugins.schedulers.fcfs import FirstComeFirstServedPolicy
from frame.plugins.schedulers.priority import PriorityPolicy
from frame.testing import make_setup
from tests.engine.simulation import make_request


def request(name: str, sequence: int, **fields: object) -> Request:
    return Request(make_request(name, [1], **fields), sequence=sequence, max_len=9, num_groups=1, root=b"")


def test_first_come_first_served_breaks_ties_by_order_of_entry():
    queue = WaitingQueue(FirstComeFirstServedPolicy(make_setup("scheduler")))
    for sequence, (name, arrival) in enumerate([("b", 2.0), ("a", 1.0), ("c", 2.0)]):
        queue.add(request(name, sequence, arrival=arrival, priority=-sequence))
    assert [one.request_id for one in queue] == ["a", "b", "c"]


def test_lower_priority_values_come_first():
    queue = WaitingQueue(PriorityPolicy(make_setup("scheduler")))
    for sequence, (name, priority) in enumerate([("late", 5), ("early", -1), ("middle", 0)]):
        queue.add(request(name, sequence, arrival=float(sequence), priority=priority))
    assert [one.request_id for one in queue] == ["early", "middle", "late"]


def test_requests_can_leave_from_anywhere_and_only_once():
    queue = WaitingQueue(FirstComeFirstServedPolicy(make_setup("scheduler")))
    several = [request(str(i), i) for i in range(5)]
    for one in several:
        queue.add(one)
    queue.remove(several[2])
    assert [one.request_id for one in queue] == ["0", "1", "3", "4"]
    assert len(queue) == 4
    with pytest.raises(ValueError, match="'2' is not in the waiting queue"):
        queue.remove(several[2])
