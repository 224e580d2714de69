"""The contract of executors: every worker gets every step, answers keep their order, no process survives."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from frame.core.interfaces.executor import Executor

from .connector_suite import empty_plan
from .engines import SMALL, drain, greedy, prompts, request, running, tokens_of
from .fake_cache import make_layout
from .fake_executor import FakeWorkers
from .fake_worker import FakeWorker
from .plugin_suite import PluginSuite
from .tiny import write_tiny


class ExecutorSuite(PluginSuite):
    """The contract of `frame.interfaces.Executor`.

        class TestMine(ExecutorSuite):
            plugin = "mine"                  # or target = "package.module:Class"
            uses_factory = False             # when it makes its workers otherwise than through `workers`

    Drives the executor over fake workers first, then lets it serve a tiny model.
    """

    kind = "executor"
    uses_factory: ClassVar[bool] = True

    def executor(self, workers: FakeWorkers) -> Executor:
        """A new executor over fake workers; skips when it does not take its workers from the factory."""
        if not self.uses_factory:
            pytest.skip("uses_factory is False")
        made = self.make(workers=workers)
        assert isinstance(made, Executor), f"{type(made).__name__} does not derive from Executor"
        return made

    def start(self, executor: Executor) -> None:
        """Both phases of the start, with the layout of the fake workers."""
        executor.load()
        executor.allocate(make_layout())

    def test_each_phase_of_the_start_reaches_every_worker_once(self) -> None:
        workers = FakeWorkers()
        executor = self.executor(workers)
        facts = executor.load()
        num_workers = len(executor.setup.placements)
        assert len(facts) == num_workers, f"load gave facts of {len(facts)} workers, there are {num_workers}"
        assert facts[0] == FakeWorker().load(), f"load must give each worker's facts, gave {facts[0]!r}"
        layout = msgspec.structs.replace(make_layout(), numerics="as the engine says")
        ready = executor.allocate(layout)
        assert len(ready) == num_workers, f"allocate answered for {len(ready)} workers, there are {num_workers}"
        assert len(workers.made) == num_workers, f"{len(workers.made)} workers were made for {num_workers} placements"
        for worker in workers.made:
            phases = [call for call in worker.calls if call in ("load", "allocate")]
            assert phases == ["load", "allocate"], f"worker {worker.rank} was called {phases}"
            assert worker.layout == layout, f"worker {worker.rank} allocates another layout than the engine's"
        assert executor.max_in_flight >= 1, f"max_in_flight is {executor.max_in_flight}"
        executor.check()
        executor.close()

    def test_steps_reach_every_worker_and_answers_keep_their_order(self) -> None:
        workers = FakeWorkers()
        executor = self.executor(workers)
        self.start(executor)
        handles = []
        for step in range(executor.max_in_flight):
            executor.execute(empty_plan(step))
            handles.append(executor.sample(b""))
        assert [handle.results()[0].step for handle in handles] == list(range(executor.max_in_flight))
        for handle in handles:
            assert handle.ready() is True, "a handle whose result was taken is ready"
            handle.results()
        for worker in workers.made:
            steps = [call for call in worker.calls if call in ("execute", "sample")]
            assert steps == ["execute", "sample"] * executor.max_in_flight, f"worker {worker.rank} was called {steps}"
        executor.close()

    def test_a_step_that_raises_says_so_and_the_next_one_works(self) -> None:
        executor = self.executor(FakeWorkers(lambda rank: FakeWorker(broken_steps=[0], rank=rank)))
        self.start(executor)
        with pytest.raises(Exception, match="step 0 was told to break"):
            self.one_step(executor, 0)
        assert self.one_step(executor, 1).step == 1
        executor.close()

    def test_a_start_that_fails_gives_the_root_cause(self) -> None:
        workers = FakeWorkers(lambda rank: FakeWorker(start_error="there is no such device"))
        executor = self.executor(workers)
        with pytest.raises(Exception, match="there is no such device"):
            self.start(executor)
        executor.close()
        assert all(worker.closed for worker in workers.made), "close after a failed start must close the workers"

    def test_calls_by_name_answer_by_rank(self) -> None:
        workers = FakeWorkers()
        executor = self.executor(workers)
        self.start(executor)
        answers = executor.call("describe")
        assert [answer["rank"] for answer in answers] == list(range(len(answers))), f"call gave {answers}"
        assert executor.call("echo", {"number": 3})[0] == {"number": 3}
        with pytest.raises(Exception, match="fly"):
            executor.call("fly")
        executor.close()

    def test_closing_twice_closes_every_worker(self) -> None:
        workers = FakeWorkers()
        executor = self.executor(workers)
        self.start(executor)
        executor.close()
        executor.close()
        assert all(worker.closed for worker in workers.made), "a worker was left open"

    def test_it_serves_and_leaves_no_process(self, tmp_path: Path) -> None:
        write_tiny(tmp_path, "LlamaForCausalLM")
        given = prompts(512)
        before = children()
        answers: list[Sequence[Any]] = []
        for settings in ({}, {"async_scheduling": False}):
            config = self.config(**{**SMALL, "model": str(tmp_path), "executor": self.name, **settings})
            with running(config, self.registry()) as engine:
                answers.append(greedy(engine, given))
                outputs = drain(engine, [request("a", given[0], logprobs=2, prompt_logprobs=1)])["a"]
                assert tokens_of(outputs) == answers[0][0], "asking for log-probabilities changed the tokens"
                engine.check()
        assert answers[0] == answers[1], "synchronous and asynchronous scheduling differ"
        deadline = time.monotonic() + 10
        while children() - before:
            assert time.monotonic() < deadline, f"processes {sorted(children() - before)} are left after close"
            time.sleep(0.05)

    @staticmethod
    def one_step(executor: Executor, step: int) -> Any:
        """Executes and samples an empty step."""
        executor.execute(empty_plan(step))
        return executor.sample().results()[0]


def children() -> set[int]:
    """Processes that this one started and that have not ended (Linux; elsewhere none are seen)."""
    own = os.getpid()
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == own and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found
