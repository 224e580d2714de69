"""Steps that fail before the worker side hears of them, while later ones are on their way: nothing wrong is saved."""

from __future__ import annotations

import pytest

from frame.testing import ConnectorSuite
from frame.testing.engines import request


def suite_of(name, folder, **options):
    made = type("Suite", (ConnectorSuite,), {"plugin": name, "options": options})()
    made.folder = folder
    return made


@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize("budget", [3, 4, 7])
def test_blocks_behind_a_lost_step_are_not_saved(tmp_path, lost, budget):
    """A worker gets the messages of a prompt's steps but for one, as where the tables of that step raised."""
    suite = suite_of("disk", tmp_path)
    engine = suite.engine(max_num_batched_tokens=budget)
    side, messages = engine.workers.made[0].transfer, []
    begin = side.begin_step

    def records(message):
        messages.append(message)
        begin(message)

    side.begin_step = records
    engine.run(request("a", suite.prompt(30)))
    assert len(list(tmp_path.rglob("*.kv"))) == 30 // 4
    assert engine.connector.reset()
    other = suite.engine().workers.made[0].transfer
    for number, message in enumerate(messages):
        if number != lost:
            other.begin_step(message)
            other.end_step([])
    assert len(list(tmp_path.rglob("*.kv"))) == lost * budget // 4
