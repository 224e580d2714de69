"""Steps are captured unless a collaborator of the runner is against it, and then one line says which."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.engine import idle_capture
from frame.core.interfaces.attention import AttentionBackend, GroupBatch
from frame.core.interfaces.collectives import Groups
from frame.core.interfaces.connector import NullConnectorWorker
from frame.core.interfaces.mesh import Mesh
from frame.core.interfaces.model import LayerHooks
from frame.core.interfaces.platform_steps import (
    AnyShape,
    EagerGraphs,
    Graphs,
    Kernels,
    Steps,
    StepShape,
)
from frame.core.parallel.groups import gather_all
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start import start
from frame.core.worker.step.runner import Runner
from frame.interfaces import BackendSetup
from frame.plugins.attention import torch as torch_attention
from frame.plugins.attention.cudnn import CudnnAttention
from frame.plugins.attention.flash import FlashAttention
from frame.plugins.attention.torch import TorchAttention
from frame.plugins.attention.triton import TritonAttention
from frame.plugins.models.llama import LlamaForCausalLM
from frame.plugins.platforms.cpu import CpuPlatform, HostMemory
from frame.testing import run_mesh
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, greedy, prompts, request, running
from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from frame.testing.reference_attention import ReferenceAttention
from frame.testing.thread_executor import with_threads
from frame.testing.tiny import write_tiny
from tests.plugins.attention.batches import SPEC
from tests.plugins.attention.stand_ins import CudnnOnCpu


class CapturingGraphs(Graphs):
    """Runs every step as it is, but could do otherwise."""

    run = EagerGraphs.run


class Prompts(LayerHooks):
    """Wants to be called in steps with prompts; notes the lengths of their rows."""

    def __init__(self) -> None:
        self.before_layers: list[tuple[str, int]] = []
        self.after_layers: list[tuple[str, int]] = []

    def before(self, layer: str, batch: GroupBatch) -> None:
        self.before_layers.append((layer, batch.max_query_len))

    def after(self, layer: str, batch: GroupBatch) -> None:
        self.after_layers.append((layer, batch.max_query_len))


class Watching(Prompts):
    """Needs each layer's call."""

    decode_steps = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture")
    write_tiny(folder, "LlamaForCausalLM")
    return folder


@pytest.fixture(autouse=True)
def capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "steps", lambda self: Steps(graphs=CapturingGraphs()))
    monkeypatch.setattr(TorchAttention, "needs_python", False)


def set_need(monkeypatch: pytest.MonkeyPatch, needs: bool) -> None:
    """Whether attention without kernels in C needs Python in each step."""
    monkeypatch.setattr(TorchAttention, "needs_python", needs)
    monkeypatch.setattr(torch_attention, "_native_rows", lambda *_: None)


def chosen(folder: Path, caplog: pytest.LogCaptureFixture, **settings: object) -> tuple[type[Graphs], list[str]]:
    """The kind of graphs of an engine's runner, and the lines that say why."""
    with (
        caplog.at_level(logging.INFO, "frame"),
        running(from_flat({**SMALL, "model": str(folder), "dtype": "float32", **settings}), Registry.load()) as engine,
    ):
        kind = engine.executor.call("run", {"function": lambda worker: type(worker.runner.device.graphs)})[0]
    return kind, [line for line in caplog.messages if "captured" in line]


def test_nobody_is_against_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(folder, caplog) == (CapturingGraphs, [])


def test_attention(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    set_need(monkeypatch, True)
    line = "no step is captured: attention backend 'torch' needs Python in each step"
    assert chosen(folder, caplog, attention_backend="torch") == (EagerGraphs, [line])


def test_the_model(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "needs_python", True)
    line = "no step is captured: model LlamaForCausalLM needs Python in each step"
    assert chosen(folder, caplog) == (EagerGraphs, [line])


@pytest.mark.parametrize("hooks", [Watching, Prompts, LayerHooks], ids=lambda kind: kind.__name__)
def test_hooks_of_a_connector(
    hooks: type[LayerHooks], folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are set in `register`."""
    monkeypatch.setattr(NullConnectorWorker, "register", lambda self, caches: setattr(self, "hooks", hooks()))
    kind, lines = chosen(folder, caplog)
    assert (kind, len(lines)) == ((EagerGraphs, 1) if hooks is Watching else (CapturingGraphs, 0))
    assert all("needs Python in each layer of decode steps" in line for line in lines)


def test_all_reasons_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_need(monkeypatch, True)
    folder = make_pooling_checkpoint(tmp_path, "qwen3")
    kind, (line,) = chosen(folder, caplog)
    assert kind is EagerGraphs
    assert "a pooling engine has no decodes; attention backend 'torch'" in line


class CapturedAlike(CapturingGraphs):
    """Its workers meet before memory is reserved, and for each capture: all must come to both."""

    met: ClassVar[threading.Barrier]

    def reserve(self, run_dummy: Callable[[StepShape], None]) -> int:
        self.met.wait(20)
        return 0

    def capture(self, run_dummy: Callable[[StepShape], None]) -> bool:
        self.met.wait(20)
        return False


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "reserved"])
@pytest.mark.parametrize("needs", ["", "attention", "connector"])
def test_workers_capture_all_or_none(
    needs: str, sized: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two stages one alone has layers with a window, or a connector that needs each layer's call."""
    CapturedAlike.met = threading.Barrier(2)
    monkeypatch.setattr(CpuPlatform, "steps", lambda self: Steps(graphs=CapturedAlike()))
    set_need(monkeypatch, False)
    if needs == "attention":
        monkeypatch.setattr(TorchAttention, "needs_python", property(lambda self: bool(self.spec.window)))
    if needs == "connector":
        monkeypatch.setattr(NullConnectorWorker, "register", watches_in_last_stage)
    monkeypatch.setattr(HostMemory, "kv_bytes", lambda self, *given: 64 << 20)
    settings = {**SMALL, "model": str(make_checkpoint(tmp_path, "gemma2")), "num_threads": 1}
    settings |= {"executor": "threads", "pipeline_parallel_size": 2, "pipeline_layers": [3, 1]}
    settings |= {} if sized else {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": None}
    with (
        caplog.at_level(logging.INFO, "frame"),
        running(from_flat(settings), with_threads(Registry.load())) as engine,
    ):
        kinds = engine.executor.call("run", {"function": lambda worker: type(worker.runner.device.graphs)})
    assert kinds == [EagerGraphs if needs else CapturedAlike] * 2
    lines = [line for line in caplog.messages if "no step is captured" in line]
    whose = {"attention": "needs Python in each step (worker 0)", "connector": "decode steps (worker 1)"}
    assert len(lines) == (2 if needs else 0)
    assert all(line.endswith(whose[needs]) for line in lines)


def watches_in_last_stage(connector: NullConnectorWorker, caches: object) -> None:
    if connector.rank == 1:
        connector.hooks = Watching()


class AlwaysCapturedAlike(CapturedAlike):
    """Asks for captures without end."""

    def wanted(self) -> bool:
        return True


@pytest.mark.parametrize("part", ["_write", "_sample_rows"])
def test_a_step_that_fails_in_one_stage_is_followed_by_its_capture_on_all(
    part: str, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other stage waits in it for this one."""
    AlwaysCapturedAlike.met = threading.Barrier(2)
    monkeypatch.setattr(CpuPlatform, "steps", lambda self: Steps(graphs=AlwaysCapturedAlike()))
    monkeypatch.setattr(idle_capture, "BUSY_STEPS", 0)
    settings = {**SMALL, "model": str(folder), "num_threads": 1, "executor": "threads", "pipeline_parallel_size": 2}
    work = getattr(Runner, part)

    def fail(runner: Runner, *given: object) -> object:
        if runner.stage.draws:
            raise RuntimeError("only the last stage cannot")
        return work(runner, *given)

    with running(from_flat(settings), with_threads(Registry.load())) as engine:
        expected = drain(engine, [request("a", [5, 6, 7], 3)])
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "frame.engine"):
            patch.setattr(Runner, part, fail)
            with pytest.raises(AssertionError, match="request b failed"):
                drain(engine, [request("b", [5, 6, 7], 3)])
        errors = [record.exc_info for record in caplog.records if record.exc_info]
        assert {str(info[1]) for info in errors} == {"worker 1 of 2: only the last stage cannot"}
        again = drain(engine, [request("c", [5, 6, 7], 3)])
    assert not AlwaysCapturedAlike.met.broken
    assert [one.token_ids for one in again["c"]] == [one.token_ids for one in expected["a"]]


@pytest.mark.parametrize("lacks", range(4))
def test_engines_that_capture_at_the_start_alone_end_it_together(lacks: int) -> None:
    """Of stages one alone may lack a step: it would wait for the others."""

    def work(groups: Groups) -> int:
        left = 3 if groups.data.rank * 2 + groups.pipeline.rank == lacks else 1
        graphs = SimpleNamespace(wanted=lambda: captured < left)
        captured = 0

        def capture(run_dummy: object) -> bool:
            nonlocal captured
            gather_all(groups, b"")
            captured += 1
            return False

        graphs.capture = capture
        device, lockstep = SimpleNamespace(graphs=graphs), SimpleNamespace(captures=False)
        start._capture_first(SimpleNamespace(device=device, lockstep=lockstep, run_dummy=None), groups)  # type: ignore[arg-type]
        return captured

    assert run_mesh(Mesh(data=2, pipeline=2, expert_parallel=True), work, seconds=20) == [3] * 4


class Capturing(EagerGraphs):
    """Captures nothing, and yet runs steps of padding when it is asked to capture."""

    def __init__(self) -> None:
        self.ran: list[StepShape] = []

    def capture(self, run_dummy: Callable[[StepShape], None]) -> bool:
        self.ran.append(StepShape(4, 4))
        run_dummy(self.ran[-1])
        return False


class RunsOnce(Kernels):
    """Runs steps of every kind, as a device that compiles them does."""

    def prepare(self, run: Callable[[], None]) -> None:
        run()


class Launched(ReferenceAttention):
    """Decides nothing on the host."""

    needs_python = False


class Padding(AnyShape):
    """Has steps of padding run before the first request."""

    def every(self) -> list[StepShape]:
        return [StepShape(4, 4)]


@pytest.mark.parametrize("needs", [True, False])
def test_no_step_of_padding_runs_where_attention_needs_python(
    needs: bool, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything captured: on the host its rows seem to have tokens, and on the device they have none."""
    graphs, dummies, run_dummy = Capturing(), [], Runner.run_dummy
    set_need(monkeypatch, needs)
    monkeypatch.setattr(CpuPlatform, "steps", lambda self: Steps(Padding(), graphs, kernels=RunsOnce()))
    monkeypatch.setattr(Runner, "run_dummy", lambda self, shape: (dummies.append(shape), run_dummy(self, shape))[1])
    if not needs:
        monkeypatch.setattr(torch_attention, "TorchAttention", Launched)
    found = chosen(folder, caplog, attention_backend="torch")
    assert found[0] is (EagerGraphs if needs else Capturing)
    assert (len(graphs.ran), bool(dummies)) == ((0, False) if needs else (1, True))


@pytest.mark.parametrize("kind", [Prompts, Watching])
def test_hooks_are_called_around_each_layer_of_the_steps_that_they_ask_for(
    kind: type[Prompts], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = kind()
    monkeypatch.setattr(NullConnectorWorker, "register", lambda self, caches: setattr(self, "hooks", hooks))
    monkeypatch.setattr(CpuPlatform, "steps", lambda self: Steps(Padding(), Capturing(), kernels=RunsOnce()))
    monkeypatch.setattr(torch_attention, "TorchAttention", Launched)
    config = from_flat({**SMALL, "model": str(folder), "dtype": "float32", "attention_backend": "torch"})
    with running(config, Registry.load()) as engine:
        assert hooks.before_layers == [], "a step of padding is nobody's"
        drain(engine, [request("a", list(range(3, 12)), 4)])
    assert hooks.before_layers == hooks.after_layers
    lengths = [length for layer, length in hooks.before_layers if layer == "model.layers.0.self_attn"]
    assert lengths == ([9] if kind is Prompts else [9, 1, 1, 1])
    assert {layer for layer, _ in hooks.before_layers} == {f"model.layers.{index}.self_attn" for index in range(3)}


def test_an_output_of_another_length_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be added to every token's residual without a word."""
    forward = TorchAttention.forward
    monkeypatch.setattr(TorchAttention, "forward", lambda self, *inputs: forward(self, *inputs)[-1:])
    monkeypatch.setattr(CpuPlatform, "steps", lambda self: Steps(kernels=RunsOnce()))
    config = from_flat({**SMALL, "model": str(folder), "dtype": "float32", "attention_backend": "torch"})
    with (
        pytest.raises(
            ValueError, match=r"TorchAttention gave layer 'model.layers.0.self_attn' an output of shape \[1, "
        ),
        running(config, Registry.load()),
    ):
        pass


def test_what_the_backends_of_frame_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign backend that says nothing is not captured: what its plan decides on the host would go stale."""
    monkeypatch.undo()
    kinds = [AttentionBackend, TorchAttention, TritonAttention, FlashAttention]
    assert [kind.needs_python for kind in kinds] == [True, True, False, False]
    inner = CudnnOnCpu(BackendSetup(SPEC, None))
    assert inner.needs_python is CudnnOnCpu.inner.needs_python is True
    assert CudnnAttention.inner is TritonAttention


def test_an_engine_that_is_not_captured_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_flat({**SMALL, "model": str(folder), "dtype": "float32"})
    found = []
    for needs in (False, True):
        set_need(monkeypatch, needs)
        with running(config, Registry.load()) as engine:
            found.append(greedy(engine, prompts(512)))
    assert torch.equal(torch.tensor(found[0]), torch.tensor(found[1]))
