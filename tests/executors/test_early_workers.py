"""Workers of several ranks load libraries beside their engine, and none stays where they are not needed after all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.interfaces.executor import DeadWorkerError
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.links import early_workers, processors as processors_of
from frame.links.early_workers import EarlyWorkers, begin_workers
from frame.offline.engine import LLMEngine
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, prompts, request, running, tokens_of
from frame.testing.executor_suite import children
from tests.server.running import alive, until

MANY = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("early"), "llama")


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    monkeypatch.setattr(early_workers, "num_processors", lambda: MANY)


def config(folder, **settings):
    values = {"model": str(folder), "skip_tokenizer_init": True, "tensor_parallel_size": 2, "num_threads": 1}
    return from_flat({**values, **SMALL, **settings})


def begun(tree):
    return begin_workers(tree, Registry.load())


def has_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_an_engine_takes_the_processes_that_began_before_it(folder, monkeypatch):
    taken, take = [], EarlyWorkers.take

    def and_note(self):
        taken.append((len(self._left), take(self)))
        return taken[-1][1]

    monkeypatch.setattr(EarlyWorkers, "take", and_note)
    before = children()
    engine = LLMEngine.from_config(config(folder))
    try:
        assert [left for left, _ in taken] == [2, 1]
        pids = {linked.child.process.pid for _, linked in taken}
        assert children() - before == pids
        found = drain(engine.core, [request("a", prompts(400)[0], 9)])
    finally:
        engine.core.close()
    assert not children() - before
    with running(config(folder, tensor_parallel_size=1), Registry.load()) as alone:
        assert tokens_of(found["a"]) == tokens_of(drain(alone, [request("a", prompts(400)[0], 9)])["a"])


def test_libraries_are_loaded_before_anything_is_known_of_the_worker(folder):
    with begun(config(folder)) as workers:
        pids = [linked.child.process.pid for linked in workers._left]
        assert len(pids) == 2
        until(lambda: all(map(has_torch, pids)))
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3: the attention heads"),
        ({"model": "/nowhere"}, "/nowhere"),
        ({"attention_backend": "fa9"}, "no attention backend 'fa9'"),
    ],
)
def test_what_is_impossible_is_said_as_ever_and_leaves_no_process(folder, settings, said):
    before = children()
    with pytest.raises((ConfigError, PluginError), match=said):
        LLMEngine.from_config(config(folder, **settings))
    assert not children() - before


def test_one_that_is_killed_before_it_is_told_anything_is_named(folder, monkeypatch):
    before, take = children(), EarlyWorkers.take

    def take_killed(self):
        linked = take(self)
        if not self._left:
            linked.child.process.kill()
            linked.child.process.wait()
        return linked

    monkeypatch.setattr(EarlyWorkers, "take", take_killed)
    with pytest.raises(DeadWorkerError, match="worker 1 of 2: the worker process died with exit status -9"):
        LLMEngine.from_config(config(folder))
    assert not children() - before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_they_do_not_outlive_a_program_that_is_killed(folder, number):
    code = f"""
import time
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.links import early_workers
from tests.executors.test_early_workers import MANY, config
early_workers.num_processors = lambda: MANY
workers = early_workers.begin_workers(config({str(folder)!r}), Registry.load())
print(*(linked.child.process.pid for linked in workers._left), flush=True)
time.sleep(60)
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2
    program.send_signal(number)
    program.wait()
    program.stdout.close()
    until(lambda: not any(map(alive, pids)))


def test_one_that_is_not_needed_ends_while_it_loads(monkeypatch):
    """The engine may be killed when it has just begun; one that has its recipe by then loads on."""
    code = """
import sys, time
from frame.core.worker import worker_process
worker_process.Libraries.of = lambda outline: time.sleep(600)
worker_process.serve_worker(int(sys.argv[-3]), int(sys.argv[-1]))
"""
    monkeypatch.setattr(early_workers, "python_command", lambda *arguments: [sys.executable, "-c", code, *arguments])
    with EarlyWorkers(2) as workers:
        wanted, unwanted = workers._left
        wanted.child.tell(b"{}")
        unwanted.child.process.stdin.close()
        assert unwanted.child.process.wait(60) == 0
        time.sleep(0.5)
        assert alive(wanted.child.process.pid)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 2),
        ({"tensor_parallel_size": 1}, 0),
        ({"tensor_parallel_size": 1, "executor": "process"}, 1),
        ({"executor": "external"}, 0),
        ({"executor": "unheard-of"}, 0),
        ({"nnodes": 2, "master_addr": "127.0.0.1"}, 0),
    ],
)
def test_only_executors_of_this_machine_have_them(folder, settings, count):
    with begun(config(folder, **settings)) as workers:
        assert len(workers._left) == count


@pytest.mark.parametrize(
    ("settings", "processors"),
    [({}, 3), ({"data_parallel_size": 2}, 6), ({"pipeline_parallel_size": 2}, 5)],
)
def test_a_machine_with_fewer_processors_than_processes_starts_none(folder, settings, processors, monkeypatch):
    tree = config(folder, **settings)
    for most, some in ((processors, True), (processors - 1, False)):
        monkeypatch.setattr(early_workers, "num_processors", lambda most=most: most)
        with begun(tree) as workers:
            assert bool(workers._left) is some


def test_a_quota_of_processor_time_counts_as_processors(folder, monkeypatch):
    monkeypatch.setattr(early_workers, "num_processors", processors_of.num_processors)
    monkeypatch.setattr(processors_of.os, "sched_getaffinity", lambda pid: range(64))
    for limits, some in (([], True), ([2.5], True), ([1.5], False)):
        monkeypatch.setattr(processors_of, "_limits", lambda root, limits=limits: iter(limits))
        with begun(config(folder)) as workers:
            assert bool(workers._left) is some


@pytest.mark.matrix
def test_other_plugins_than_at_first_are_loaded_again(folder):
    """As when the engine has chosen otherwise meanwhile."""
    tree, before = config(folder), children()
    with EarlyWorkers(2, tree, []) as workers:
        from frame.offline.in_process import make_engine

        engine = make_engine(tree, Registry.load(), begun=workers)
        try:
            assert drain(engine, [request("a", prompts(400)[0], 3)])["a"]
        finally:
            engine.close()
    assert not children() - before


def test_nothing_stays_open(folder):
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with begun(config(folder)):
            time.sleep(0.1)
    assert sorted(os.listdir("/proc/self/fd")) == before
