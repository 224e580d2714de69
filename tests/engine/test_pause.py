"""Pauses, sleep and resets of the cache beside a KV connector's transfers, and what an engine says about its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from frame.core.config.flat import from_flat
from frame.core.engine import engine as engine_module, lifecycle as lifecycle_module
from frame.core.engine.engine import Engine
from frame.core.interfaces.client import BrokenEngineError, EngineInfo
from frame.core.interfaces.engine import EngineOutput
from frame.core.interfaces.step import StepPlan, StepResult
from frame.core.plugin_host.offers import Offer
from frame.interfaces import CacheView, ConnectorScheduler, ConnectorWorker, Provider, RequestView, TransferReport
from frame.offline.in_process import make_engine
from frame.settings import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.transfers import news
from frame.transfers.merging import ResultMerge
from tests.engine.fake_connector import FakeConnector
from tests.engine.simulation import Simulation, expected, make_layout, make_request, run_step

INFO = EngineInfo(
    max_model_len=64, vocab_size=12, num_blocks=100, block_size=4, platform="fake", attention=["fake"], dtype="float32"
)


class Handle:
    """An executed step."""

    def __init__(self, executor: Direct, plan: StepPlan, result: StepResult) -> None:
        self.executor, self.plan, self.found = executor, plan, result

    def ready(self) -> bool:
        return True

    def results(self) -> list[StepResult]:
        self.executor.worker.answered(self.plan)
        return [self.found]


class Direct:
    """Calls a fake worker, whose cache is empty after sleep."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.steps: list[tuple[StepPlan, StepResult]] = []
        self.asked: list[str] = []

    def execute(self, plan: StepPlan) -> None:
        self.steps.append((plan, run_step(self.worker, plan)))

    def sample(self, masks: bytes = b"") -> Handle:
        return Handle(self, *self.steps.pop())

    def call(self, method: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        self.asked.append(method)
        if method == "sleep":
            self.worker.allocate(self.worker.layout)
        return [None]

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class Rig:
    """An engine over a fake worker whose connector loads blocks two steps after it was asked to."""

    def __init__(self, *, later: bool = True, hold: bool = False) -> None:
        layout = make_layout(100)
        self.connector = FakeConnector(layout=layout, later=later, hold=hold)
        sim = Simulation(layout=layout, connector=self.connector)
        self.executor = Direct(sim.worker)
        self.engine = Engine(
            merge=ResultMerge(1),
            scheduler=sim.scheduler,
            executor=self.executor,
            connector=self.connector,
            info=INFO,
        )
        self.outputs: dict[str, list[int]] = {}

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).extend(output.token_ids)

    def run(self, *requests: Any) -> None:
        for request in requests:
            self.engine.add(request)
        while self.engine.has_unfinished():
            self.take(self.engine.step())

    def until_loading(self, request: Any) -> None:
        self.engine.add(request)
        while not self.engine.scheduler.num_transfers:
            self.take(self.engine.step())

    def check(self, *requests: Any) -> None:
        for request in requests:
            assert self.outputs[request.request_id] == expected(request, 64)[0]


@pytest.fixture
def rig() -> Rig:
    """An engine whose connector keeps the blocks of a request that ended."""
    rig = Rig()
    rig.run(make_request("first", PROMPT, max_tokens=4))
    assert rig.engine.call("reset_prefix_cache")
    return rig


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1]


def test_sleep_waits_for_a_load_and_leaves_none_of_its_blocks_to_be_found(rig: Rig) -> None:
    requests = [make_request(name, PROMPT, max_tokens=6) for name in ("second", "third")]
    rig.until_loading(requests[0])
    rig.engine.call("sleep")
    assert rig.engine.scheduler.num_transfers == 0
    rig.engine.call("wake_up")
    rig.connector.store.clear()  # so that only the cache could have blocks
    rig.run(requests[1])
    rig.check(*requests)


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_pause_that_clears_the_cache_waits_for_a_load(rig: Rig, mode: str) -> None:
    rig.run(make_request("other", [3] * 9, max_tokens=2))
    request = make_request("second", PROMPT, max_tokens=6)
    rig.until_loading(request)
    assert rig.engine.call("pause", {"mode": mode, "clear_cache": True}) == 0
    assert rig.engine.scheduler._kv.pool.num_published == 0
    rig.engine.call("resume")
    rig.run()
    rig.check(request)


def test_a_reset_waits_for_a_load(rig: Rig) -> None:
    request = make_request("second", PROMPT, max_tokens=6)
    rig.until_loading(request)
    assert rig.engine.call("reset_prefix_cache") is True
    rig.run()
    rig.check(request)


@pytest.mark.parametrize(
    ("method", "arguments"), [("sleep", {}), ("reset_prefix_cache", {}), ("pause", {"clear_cache": True})]
)
def test_a_load_that_does_not_end_is_a_refusal(
    rig: Rig, method: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "TRANSFER_SECONDS", 0.05)
    request = make_request("second", PROMPT, max_tokens=6)
    rig.until_loading(request)
    worker = rig.executor.worker.transfer
    loads, worker.waiting = worker.waiting, []
    with pytest.raises(RuntimeError, match=r"reads or writes blocks of 1 requests after 0\.05 seconds; try again"):
        rig.engine.call(method, arguments)
    assert "sleep" not in rig.executor.asked
    worker.waiting = loads
    rig.engine.call("resume")
    rig.run()
    rig.check(request)


def test_step_seconds_are_those_of_steps_that_computed_tokens(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rig.engine.stats()
    assert before.step_seconds == 0
    rig.until_loading(make_request("second", PROMPT, max_tokens=6))
    waiting = rig.engine.stats()
    assert (waiting.steps, waiting.busy_seconds) == (before.steps, before.busy_seconds)
    rig.run()
    after = rig.engine.stats()
    assert after.steps > before.steps
    assert after.busy_seconds > before.busy_seconds
    assert after.step_seconds == 0


def test_an_engine_that_only_waits_for_a_transfer_does_not_spin(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two steps in flight only asks the connector again, so the engine sleeps between them."""
    rig.until_loading(make_request("second", PROMPT, max_tokens=4))
    rig.executor.worker.transfer.waiting = []  # the load never ends
    slept: list[float] = []
    monkeypatch.setattr(engine_module.news, "wait", slept.append)
    for _ in range(20):
        rig.engine.step()
    assert rig.engine.scheduler.num_transfers == 1
    assert len(slept) >= 18


def test_the_step_behind_the_one_that_tells_the_end_of_a_load_computes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, seen = make_request("second", PROMPT, max_tokens=4), list[str]()
    execute, end_load = rig.executor.execute, rig.engine.scheduler.lifecycle.loaded

    def launch(plan: StepPlan) -> None:
        seen.append("rows" if len(plan.slots) else "none")
        execute(plan)

    monkeypatch.setattr(rig.executor, "execute", launch)
    monkeypatch.setattr(rig.engine.scheduler.lifecycle, "loaded", lambda one: (seen.append("loaded"), end_load(one)))
    monkeypatch.setattr(engine_module.news, "wait", lambda seconds: seen.append("sleep"))
    monkeypatch.setattr(rig.engine.scheduler, "use_pause", lambda: seen.append("pause"))
    rig.run(request)
    rig.check(request)
    end = seen.index("loaded")
    assert seen[:end] == ["none", "sleep", "pause", "none", "sleep", "pause", "none"]
    assert seen[end + 1] == "rows"
    assert "sleep" not in seen[end : len(seen) - seen[::-1].index("rows")]


@pytest.mark.parametrize("answered", [True, False], ids=["at once", "later"])
def test_a_question_that_a_connector_answers_at_once_costs_no_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    request, seen = make_request("second", PROMPT, max_tokens=4), list[str]()
    execute, asked = rig.executor.execute, rig.connector.matched_tokens

    def launch(plan: StepPlan) -> None:
        seen.append("load" if plan.extras else "step")
        rig.connector.shy = 0
        execute(plan)

    def match(view: RequestView, num_computed: int) -> tuple[int | None, bool]:
        seen.append("asked")
        return asked(view, num_computed)

    def answer(seconds: float) -> None:
        seen.append("wait")
        if answered:
            rig.connector.shy = 0

    monkeypatch.setattr(rig.executor, "execute", launch)
    monkeypatch.setattr(rig.connector, "matched_tokens", match)
    monkeypatch.setattr(engine_module.news, "wait", answer)
    rig.connector.shy = 100
    rig.run(request)
    rig.check(request)
    behind = [] if answered else ["step", "wait", "asked"]
    assert seen[: seen.index("load")] == ["asked", "wait", "asked", *behind]


def test_a_word_from_before_a_question_ends_no_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, old = engine_module.news.wait, list[bool]()
    monkeypatch.setattr(engine_module.news, "wait", lambda seconds: (old.append(news._told.is_set()), wait(seconds)))
    rig.connector.shy = 2
    news.tell()
    rig.run(make_request("second", PROMPT, max_tokens=4))
    assert old
    assert not any(old)


def test_an_engine_that_only_holds_blocks_asks_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(later=False, hold=True)
    rig.executor.worker.transfer.end_step = lambda finished: TransferReport()  # nobody takes the blocks
    monkeypatch.setattr(engine_module.news, "wait", lambda seconds: None)
    rig.engine.add(make_request("first", PROMPT, max_tokens=4))
    while rig.engine.scheduler.lifecycle.requests:
        rig.engine.step()
    assert rig.engine.patience == 0
    waited = []
    for _ in range(12):
        rig.engine.step()
        waited.append(rig.engine.patience)
    assert waited == sorted(waited)
    assert waited[-1] == engine_module.HOLD_SECONDS
    rig.engine.add(make_request("second", PROMPT[::-1], max_tokens=2))
    rig.engine.step()
    assert rig.engine.patience == 0, "a request does not wait"
    rig.connector.expired = ["first", "second"]
    while rig.engine.has_unfinished():
        rig.engine.step()
        if not rig.engine.scheduler.lifecycle.requests:
            rig.connector.expired = ["second"]
    assert rig.engine.patience == 0


@pytest.mark.parametrize("failures", [3, 1000])
def test_steps_that_only_a_connector_needs_end_the_engine_when_they_fail_for_good(
    failures: int, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("second", PROMPT, max_tokens=4)
    rig.until_loading(request)
    left, execute = iter(range(failures)), rig.executor.execute
    rig.executor.worker.strict = False

    def fails(plan: StepPlan) -> None:
        if next(left, None) is not None:
            raise OSError("the disk is gone")
        execute(plan)

    monkeypatch.setattr(rig.executor, "execute", fails)
    monkeypatch.setattr(engine_module, "EMPTY_FAILURE_SECONDS", 0.0)
    if failures == 3:
        rig.run()
        rig.check(request)
    else:
        with pytest.raises(BrokenEngineError, match="steps without requests fail one after the other: the disk is"):
            rig.run()


def lose_first_message(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker side raises where it reads the message of a load, and never says that the load ended."""
    transfer, failed = rig.executor.worker.transfer, iter([True])
    sound = transfer.begin_step
    rig.executor.worker.strict = False

    def fails_once(message: bytes) -> None:
        if message and next(failed, False):
            raise OSError("no message arrived")
        sound(message)

    monkeypatch.setattr(transfer, "begin_step", fails_once)
    monkeypatch.setattr(engine_module, "EMPTY_FAILURE_SECONDS", 0.0)


def test_a_load_that_a_failed_step_may_have_begun_holds_up_no_sleep(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_first_message(rig, monkeypatch)
    request = make_request("second", PROMPT, max_tokens=4)
    rig.run(request)
    rig.check(request)
    assert rig.engine.scheduler.num_transfers == 1
    lifecycle = rig.engine.scheduler.lifecycle
    assert all(lifecycle.await_abandoned(missed=True) for _ in range(3000)), "it may still be under way"
    assert rig.engine.scheduler.num_transfers == 1
    monkeypatch.setattr(engine_module, "TRANSFER_SECONDS", 0.05)
    rig.engine.call("sleep")
    assert rig.engine.call("is_sleeping")
    assert not rig.engine.scheduler.num_transfers


def test_a_load_that_a_failed_step_may_have_begun_is_given_up_in_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle_module, "ABANDONED_SECONDS", 0.05)
    lose_first_message(rig, monkeypatch)
    rig.run(make_request("second", PROMPT, max_tokens=4))
    assert rig.engine.scheduler.num_transfers == 1
    time.sleep(0.1)
    rig.run(make_request("third", [7, 8, 9], max_tokens=4))  # also an engine that is never without tokens gives it up
    assert not rig.engine.scheduler.num_transfers


def test_a_load_that_a_failed_step_never_began_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, failed = rig.executor.execute, iter([True])
    rig.executor.worker.strict = False

    def fails_once(plan: StepPlan) -> None:
        if plan.extras and next(failed, False):
            raise OSError("no message arrived")
        sound(plan)

    monkeypatch.setattr(rig.executor, "execute", fails_once)
    monkeypatch.setattr(engine_module, "EMPTY_FAILURE_SECONDS", 0.0)
    request = make_request("second", PROMPT, max_tokens=4)
    rig.run(request)
    rig.check(request)
    assert not rig.engine.scheduler.num_transfers


class NoHelp(ConnectorScheduler):
    """Has no block."""

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        return 0, False


class Watcher(ConnectorWorker):
    """Notes the addresses of the caches that it was told of, which must be there."""

    told: ClassVar[list[dict[str, int]]] = []

    def register(self, caches: Mapping[str, CacheView]) -> None:
        assert all(view.bytes.untyped_storage().nbytes() for view in caches.values())
        self.told.append({layer: view.bytes.data_ptr() for layer, view in caches.items()})
        self.there = bool(caches)

    def begin_step(self, message: bytes) -> None:
        assert self.there, "a step without memory"

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        return TransferReport()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Engine]:
    """A real engine whose connector notes what it is told."""
    Watcher.told.clear()
    model = str(make_checkpoint(tmp_path, "llama"))
    config = from_flat({"model": model, "kv_connector": "watcher", "max_num_seqs": 2, "num_gpu_blocks_override": 20})
    registry = Registry.load()
    provider = Provider("watcher", f"{__name__}:NoHelp", api=">=0.2.dev1,<0.3", tags={"worker": f"{__name__}:Watcher"})
    registry.offers.append(Offer("connector", provider, "strangers", "1.0"))
    engine = make_engine(config, registry)
    yield engine
    engine.close()


def worker_of(engine: Engine) -> Any:
    return engine.executor.call("run", {"function": lambda worker: worker})[0]


def test_sleep_takes_the_cache_from_the_connector_and_waking_gives_it_back(watched: Engine) -> None:
    for keep in (["weights"], []):
        watched.call("sleep", {"keep": keep})
        watched.call("wake_up", {"tags": ["weights"]})
        watched.call("wake_up", {"tags": ["kv_cache"]})
    first, *rest = Watcher.told
    assert [bool(one) for one in rest] == [False, True, False, True]
    assert first.keys() == rest[-1].keys()
    addresses = {name: view.data_ptr() for name, view in worker_of(watched).started.memory.layer_bytes().items()}
    assert rest[-1] == addresses
    watched.add(make_request("a", [5, 6, 7], max_tokens=2))
    while watched.has_unfinished():
        watched.step()


@pytest.mark.parametrize("hook", ["end_access", "register"])
def test_a_connector_may_refuse_before_or_when_its_memory_goes(
    hook: str, watched: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connectors without `end_access` do so in `register`; with it they are not told of a sleep that does not come."""
    was = Watcher.register

    def refuse(watcher: Watcher, caches: Mapping[str, CacheView] | None = None) -> None:
        if caches:
            was(watcher, caches)
        else:
            raise RuntimeError("something reads on")

    monkeypatch.setattr(Watcher, hook, refuse)
    with pytest.raises(RuntimeError, match="something reads on"):
        watched.call("sleep")
    assert not watched.call("is_sleeping")
    first, *rest = Watcher.told
    assert rest == ([] if hook == "end_access" else [first])
    watched.add(make_request("a", [5, 6, 7], max_tokens=2))
    while watched.has_unfinished():
        watched.step()
    monkeypatch.undo()
    watched.call("sleep")
    assert watched.call("is_sleeping")


def test_a_connector_keeps_the_cache_where_the_platform_cannot_sleep(
    watched: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(watched)

    def refuse(keep: tuple[str, ...]) -> None:
        raise NotImplementedError("sleep is not available on this platform")

    monkeypatch.setattr(worker.platform.memory(), "sleep", refuse)
    with pytest.raises(NotImplementedError):
        watched.call("sleep")
    assert Watcher.told[0] == Watcher.told[-1]
