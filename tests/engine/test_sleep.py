"""Sleep and waking that raise in the middle leave an engine that serves, or that sleeps and can be woken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine
from frame.core.plugin_host.offers import Offer
from frame.core.worker import worker as worker_module
from frame.interfaces import CacheView, ConnectorWorker, Provider, TransferReport
from frame.offline.in_process import make_engine
from frame.plugins.platforms.cpu import HostMemory
from frame.settings import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, greedy, prompts, running
from frame.testing.thread_executor import with_threads
from tests.engine.test_pause import worker_of

SAYS = "the test has it fail"


class Registered(ConnectorWorker):
    """Raises in a call of `register` that is in `fails`, and refuses steps without memory."""

    calls: ClassVar[list[bool]] = []  # whether caches were given
    fails: ClassVar[set[int]] = set()  # numbers of calls

    def register(self, caches: Mapping[str, CacheView]) -> None:
        self.there = False
        self.calls.append(bool(caches))
        if len(self.calls) in self.fails:
            raise RuntimeError(SAYS)
        self.there = all(view.bytes.untyped_storage().nbytes() for view in caches.values()) and bool(caches)

    def begin_step(self, message: bytes) -> None:
        assert self.there, "a step without memory"

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        return TransferReport()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    wide = {"hidden_size": 512, "intermediate_size": 1024}  # some of its weights are packed
    model = str(make_checkpoint(tmp_path_factory.mktemp("sleep"), "qwen3", **wide))
    config = from_flat({**SMALL, "model": model, "kv_connector": "registered"})
    registry = Registry.load()
    tags = {"worker": f"{__name__}:Registered"}
    provider = Provider("registered", "tests.engine.test_pause:NoHelp", api=">=0.2.dev1,<0.3", tags=tags)
    registry.offers.append(Offer("connector", provider, "strangers", "1.0"))
    engine = make_engine(config, registry)
    yield engine
    engine.close()


def served(engine: Engine) -> list[list[int]]:
    return greedy(engine, prompts(400)[:1], 6)


def fail(*arguments: Any) -> None:
    raise RuntimeError(SAYS)


def places(worker: Any) -> dict[str, tuple[Any, str]]:
    """What sleep and waking call, by where it is."""
    return {
        "balance": (worker.runner.balance, "settle"),
        "hide": (worker._start.holder, "hide"),
        "unpack": (worker.model, "unpack_weights"),
        "memory": (worker.platform.memory(), "sleep"),
        "drop": (worker._start.holder, "drop"),
        "wake": (worker.platform.memory(), "wake"),
        "read": (worker_module, "load_weights"),
        "graphs": (worker, "_drop_stale_graphs"),
    }


def try_to(engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch, place: str, calls: Sequence[int]) -> None:
    """Calls `sleep` or `wake_up`, which raises at a place and in these calls of `register`, from now on."""
    worker = worker_of(engine)
    with monkeypatch.context() as broken:
        if place:
            broken.setattr(*places(worker)[place], fail)
        Registered.fails.update(len(Registered.calls) + number for number in calls)
        with pytest.raises(RuntimeError, match=f"^{SAYS}$"):
            engine.call(method, {"keep": []} if method == "sleep" else {})
    Registered.fails.clear()


def is_whole(engine: Engine, want: object) -> None:
    if engine.call("is_sleeping"):
        engine.call("wake_up")
    assert Registered.calls[-1]
    assert served(engine) == want
    engine.call("sleep", {"keep": []})
    engine.call("wake_up")


@pytest.mark.parametrize(
    ("place", "calls"),
    [
        ("balance", ()),
        ("hide", ()),
        ("unpack", ()),
        ("", (1,)),
        ("", (1, 2)),
        ("", (1, 2, 3)),
        ("memory", ()),
        ("memory", (2,)),
        ("memory", (2, 3)),
        ("drop", ()),
    ],
)
def test_an_engine_serves_after_a_sleep_that_raised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str, calls: Sequence[int]
) -> None:
    want = served(engine)
    try_to(engine, "sleep", monkeypatch, place, calls)
    is_whole(engine, want)


@pytest.mark.parametrize(("place", "calls"), [("wake", ()), ("read", ()), ("", (1,)), ("graphs", ())])
def test_an_engine_wakes_after_a_waking_that_raised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str, calls: Sequence[int]
) -> None:
    want = served(engine)
    engine.call("sleep", {"keep": []})
    try_to(engine, "wake_up", monkeypatch, place, calls)
    assert engine.call("is_sleeping")
    is_whole(engine, want)


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
@pytest.mark.parametrize("keep", [[], ["weights"]])
def test_one_rank_that_raises_leaves_no_other_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, keep: list[str]
) -> None:
    settings = {**SMALL, "model": str(make_checkpoint(tmp_path, "llama")), "num_threads": 1}
    settings |= {"executor": "threads", "tensor_parallel_size": 2}
    with running(from_flat(settings), with_threads(Registry.load())) as engine:
        want = served(engine)
        memories: list[Any] = []
        engine.executor.call("run", {"function": lambda worker: memories.append(worker.platform.memory())})
        if method == "wake_up":
            engine.call("sleep", {"keep": keep})
        with monkeypatch.context() as broken:
            broken.setattr(memories[1], method.removesuffix("_up"), fail)
            with pytest.raises(RuntimeError, match=SAYS):
                engine.call(method, {"keep": keep} if method == "sleep" else {})
        if engine.call("is_sleeping"):
            engine.call("wake_up")
        assert served(engine) == want


def test_captured_steps_are_dropped_by_the_waking_behind_one_that_could_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, dropped = worker_of(engine), list[bool]()
    engine.call("sleep", {"keep": []})
    worker._addresses = ()  # what they read lay elsewhere
    with monkeypatch.context() as broken:
        broken.setattr(worker.runner.device.graphs, "drop", fail)
        with pytest.raises(RuntimeError, match=SAYS):
            engine.call("wake_up")
    monkeypatch.setattr(worker.runner.device.graphs, "drop", lambda: dropped.append(True))
    engine.call("wake_up")
    assert dropped == [True]


def test_memory_that_cannot_all_be_freed_stays() -> None:
    memory, weights, mapped = HostMemory(), torch.ones(8), torch.frombuffer(bytearray(8), dtype=torch.uint8)
    memory.claim("weights", [weights])
    memory.claim("kv_cache", [mapped])
    with pytest.raises(RuntimeError, match="cannot free kv_cache"):
        memory.sleep(())
    assert weights.tolist() == [1.0] * 8


def test_memory_that_could_not_all_be_had_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, tensors = HostMemory(), [torch.ones(8), torch.ones(4)]
    memory.claim("kv_cache", tensors)
    memory.sleep(())
    resize = torch.UntypedStorage.resize_

    def resizes(storage: torch.UntypedStorage, size: int) -> None:
        if size == 16:
            raise MemoryError
        resize(storage, size)

    with monkeypatch.context() as broken:
        broken.setattr(torch.UntypedStorage, "resize_", resizes)
        with pytest.raises(MemoryError):
            memory.wake(("kv_cache",))
    memory.wake(("kv_cache",))
    assert [tensor.tolist() for tensor in tensors] == [[0.0] * 8, [0.0] * 4]
