"""Steps that fail before the worker side hears of them, while later ones are on their way: nothing wrong is saved."""

from __future__ import annotations

import pytest

from frame.testing import ConnectorSuite
from frame.testing.connector_engines import truncate
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from tests.connectors.test_offload import lose_steps


def suite_of(name, path, **options):
    made = type("Suite", (ConnectorSuite,), {"plugin": name, "options": options})()
    made.folder = path
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


@pytest.mark.parametrize("where", ["begin_step", "end_step", "sample"])
def test_what_one_rank_reported_of_a_step_that_failed_on_the_other_is_told_again(tmp_path, where):
    """The first rank has said that its saves ended; nobody would give the blocks back."""
    suite = suite_of("offload", tmp_path, size=0.001)
    engine = suite.engine(make_layout(ranks=2), ranks=2)
    first, second = engine.workers.made
    engine.add(request("a", suite.prompt(30), 1))
    while not engine.held:
        engine.step()
    told = []
    end = first.transfer.end_step

    def ends(finished):
        report = end(finished)
        told.extend(report.notes)
        return report

    first.transfer.end_step = ends
    of = second if where == "sample" else second.transfer
    does = getattr(of, where)

    def fails(*arguments):
        if told and not failed:
            failed.append(where)
            raise RuntimeError("a step fails on one rank")
        return does(*arguments)

    failed = []
    setattr(of, where, fails)
    engine.run()
    assert failed
    engine.check()
    engine.close()


@pytest.mark.parametrize("name", ["disk", "multi"])
def test_a_load_whose_step_was_lost_gives_its_blocks_back(tmp_path, name):
    """The connector's worker side never hears of the load, so it never says that it ended."""
    disk = {"folder": str(tmp_path / "disk")}
    options = {"connectors": [{"kv_connector": "disk", "options": disk}]} if name == "multi" else disk
    suite, layout = suite_of(name, tmp_path, **options), make_layout(ranks=2)
    suite.fill(suite.prompt(40), layout=layout, ranks=2)
    engine = suite.engine(layout, ranks=2)
    for worker in engine.workers.made:
        lose_steps(worker, [0])
    engine.run(request("again", suite.prompt(40)))
    engine.check()
    assert not engine.engine.scheduler.lifecycle.abandoned
    engine.run(request("later", suite.prompt(40)[:30] + [1] * 10))
    engine.check()
    engine.close()


def cut_message(side):
    """Has a connector's worker side get half of the first message that has something to load."""
    begin, cut = side.begin_step, []

    def begins(message):
        if message and not cut:
            cut.append(message)
            message = message[: len(message) // 2]
        begin(message)

    side.begin_step = begins


@pytest.mark.parametrize("name", ["disk", "multi", "offload"])
def test_a_load_whose_message_could_not_be_read_gives_its_blocks_back(tmp_path, name):
    """The connector's worker side heard of the step, and raised: it is asked which loads go on."""
    disk = {"folder": str(tmp_path / "disk")}
    options = {
        "disk": disk,
        "multi": {"connectors": [{"kv_connector": "disk", "options": disk}]},
        "offload": {"size": 0.001},
    }[name]
    suite, layout = suite_of(name, tmp_path, **options), make_layout(ranks=2)
    engine = suite.engine(layout, ranks=2)
    engine.run(request("first", suite.prompt(40)))
    assert engine.engine.scheduler.reset_prefix_cache()
    cut_message(engine.sides[1])
    engine.run(request("again", suite.prompt(40)))
    engine.check()
    lifecycle = engine.engine.scheduler.lifecycle
    engine.run(request("other", [1, 2], 40), until=lambda: not lifecycle.abandoned)
    assert not lifecycle.abandoned
    engine.run(request("later", suite.prompt(40)[:30] + [1] * 10))
    engine.check()
    engine.close()


def test_tokens_of_a_block_that_does_not_come_are_not_told_as_cached(tmp_path):
    suite = suite_of("disk", tmp_path, folder=str(tmp_path / "disk"))
    prompt, layout = suite.prompt(40), make_layout()
    suite.fill(prompt, layout=layout)
    engine = suite.engine(layout)
    for path in tmp_path.rglob("*.kv"):
        truncate(path)
    engine.run(request("again", prompt))
    assert engine.num_cached("again") == 0
    engine.check()
    engine.close()
