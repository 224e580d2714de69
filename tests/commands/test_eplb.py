"""`frame eplb simulate` replays traces, and says in one sentence what is wrong with them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from frame.core.cli.main import main
from frame.interfaces import ExpertBalancer, LoadRecord, LoadTraceWriter, Setup, SlotShape, TraceHeader
from frame.plugins.balancers.hierarchical import HierarchicalBalancer
from frame.plugins.commands.eplb.replay import Case, replay
from frame.settings import PluginError
from frame.testing import CommandSuite


class TestEplb(CommandSuite):
    plugin = "eplb"


@pytest.fixture
def trace(tmp_path):
    """Four windows of Zipf loads, 2 layers of 16 experts."""
    path = tmp_path / "loads.jsonl"
    writer = LoadTraceWriter(path, TraceHeader(num_layers=2, num_experts=16, num_groups=4, expert_bytes=1 << 20))
    draw = np.random.default_rng(0)
    order = [draw.permutation(16) for _ in range(2)]
    for step in range(4):
        loads = np.stack([10_000 // (one + 1) for one in order]) + draw.integers(0, 50, (2, 16))
        writer.write(LoadRecord(loads, 100, 100 * (step + 1)))
    writer.close()
    return path


def test_every_combination_is_printed_and_written(trace, tmp_path, capsys):
    result, page = tmp_path / "result.json", tmp_path / "page.html"
    words = ["--ranks", "4,8", "--redundant", "8", "--nodes", "1,2", "--output-json", str(result), "--html", str(page)]
    assert main(["eplb", "simulate", str(trace), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:13]] == [
        [policy, ranks, nodes, "24"]
        for ranks in ("4", "8")
        for nodes in ("1", "2")
        for policy in ("none", "hierarchical", "sticky")
    ]
    fixed, fresh, sticky = json.loads(result.read_text())["cases"][:3]
    assert fixed["balance"] + 0.1 < min(fresh["balance"], sticky["balance"])
    assert fixed["copies"] == [0, 0, 0, 0]
    assert fresh["copied_bytes"] == [count << 20 for count in fresh["copies"]]
    assert sum(sticky["copies"]) < sum(fresh["copies"])
    assert page.read_text().count("<svg") == 9


def test_a_window_runs_with_the_placement_made_before_it():
    loads = np.array([[80, 1, 1, 1], [1, 1, 1, 80]])
    records = [LoadRecord(loads, 1, 1), LoadRecord(loads, 1, 2), LoadRecord(loads[:, ::-1], 1, 3)]
    shape = SlotShape(num_slots=6, num_ranks=2)
    (case,) = replay(records, [Case("hierarchical", HierarchicalBalancer(Setup()), shape)], 2)
    assert len(case.copies) == 1
    assert case.balance[0] == case.balance[1] != case.balance[2]


def test_a_balancer_that_fails_is_named():
    class Failing(ExpertBalancer):
        def place(self, loads, shape, current):
            raise RuntimeError("too hot")

    records = [LoadRecord(np.ones((1, 4), dtype=np.int64), 1, 1)]
    with pytest.raises(PluginError, match="balancer 'failing' failed: RuntimeError: too hot"):
        replay(records, [Case("failing", Failing(Setup()), SlotShape(num_slots=4, num_ranks=2))], 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "5"], "--ranks 5 --nodes 1 --redundant 0: 16 slots do not divide over 5 ranks; 20 would"),
        (["--ranks", "4", "--nodes", "3"], "4 ranks do not divide over 3 nodes"),
        (["--ranks", "4,x"], "--ranks must be whole numbers from 1 on, as in 32,64, got '4,x'"),
        (["--redundant", "-1"], "--redundant must be whole numbers from 0 on"),
        (["--ranks", "4", "--policies", "magic"], "no expert balancer 'magic'; there are: hierarchical, sticky"),
        (["--ranks", "4", "--policies", ","], "give 0 combinations"),
        (["--ranks", "4", "--interval", "0"], "--interval must be at least 1"),
        (["--ranks", "4", "--option", "sticky"], "--option must be NAME.FIELD=VALUE"),
        (["--ranks", "4", "--option", "sticky.speed=1"], "plugin 'sticky' has no option 'speed'"),
        (["--ranks", "4", "--option", "sticky.windows=0"], "option windows of plugin 'sticky'"),
    ],
)
def test_wrong_cases_are_one_sentence(trace, capsys, words, said):
    assert main(["eplb", "simulate", str(trace), *words]) != 0
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error


def test_a_truncated_trace_is_one_sentence(trace, capsys):
    trace.write_bytes(trace.read_bytes()[:-20])
    assert main(["eplb", "simulate", str(trace), "--ranks", "4"]) != 0
    assert re.fullmatch(r".*loads\.jsonl is cut off in line 5; remove .*\n", capsys.readouterr().err)


def test_a_subcommand_is_needed(capsys):
    assert main(["eplb"]) != 0
    assert "frame eplb needs a SUBCOMMAND; there is: simulate" in capsys.readouterr().err
