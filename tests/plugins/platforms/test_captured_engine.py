"""A whole engine on captured steps, on a CPU: a capturer that replays what the host believed at the capture."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.engine import idle_capture as capture
from frame.core.engine.engine import Engine
from frame.core.interfaces.model import ForwardStep
from frame.core.interfaces.platform_steps import (
    AnyShape,
    EagerGraphs,
    Forward,
    Part,
    Steps,
    StepShape,
)
from frame.core.interfaces.step import StepPlan
from frame.core.ops import Ops
from frame.core.plugin_host.registry import Registry
from frame.core.worker.worker import Worker
from frame.interfaces import pool_bytes
from frame.plugins.attention import torch as torch_attention
from frame.plugins.platforms.cpu import CpuPlatform, HostMemory
from frame.plugins.platforms.cuda.graphs.capture import CapturedGraph
from frame.plugins.platforms.cuda.graphs.cuda_graphs import CudaGraphs
from frame.plugins.platforms.cuda.graphs.piecewise import PiecewiseGraphs
from frame.plugins.platforms.cuda.graphs.shapes import CudaShapes, decode_shape
from frame.plugins.platforms.options import CudaOptions
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import drain, greedy, prompts, request, running, tokens_of
from frame.testing.reference_attention import ReferenceAttention
from frame.testing.tiny import write_tiny
from tests.plugins.platforms.capturer import FakeCapturer
from tests.plugins.platforms.tape import TapeCapturer
from tests.weight_offload.two_places import make_two_places

SETTINGS = {"max_model_len": 96, "max_num_seqs": 8, "num_gpu_blocks_override": 80, "dtype": "float32"}
GIVEN = prompts(512, (3, 17, 40, 1, 9, 22))


class Launched(ReferenceAttention):
    """Decides nothing on the host."""

    needs_python = False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    write_tiny(folder, "LlamaForCausalLM")
    return folder


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts an engine: (engine, its worker, its capturer, the plans that it launches)."""
    monkeypatch.setattr(torch_attention, "TorchAttention", Launched)

    @contextmanager
    def started(
        *sizes: int | None, settings: dict[str, Any] | None = None, max_tokens: int = 0, **options: Any
    ) -> Iterator[Any]:
        capturer = FakeCapturer(*sizes)
        sized = {"graph_sizes": [1, 2, 4, 8], "graph_sizes_at_start": 1, "capture_draws": False}
        given = CudaOptions(**{**sized, **options})
        pieces = PiecewiseGraphs(TapeCapturer())
        graphs = partial(CudaGraphs, capturer, given, 8, pieces=pieces, max_tokens=max_tokens)
        monkeypatch.setattr(CpuPlatform, "steps", lambda self: captured_steps(graphs()))
        config = from_flat({"model": str(folder), **SETTINGS, "attention_backend": "torch", **(settings or {})})
        plans: list[StepPlan] = []
        with running(config, Registry.load()) as engine:
            execute = engine.executor.execute
            monkeypatch.setattr(engine.executor, "execute", lambda plan: (plans.append(plan), execute(plan))[1])
            worker = engine.executor.call("run", {"function": lambda worker: worker})[0]
            yield engine, worker, capturer, plans

    return started


@pytest.fixture
def wanted(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of an engine that captures nothing."""
    with start() as (engine, worker, capturer, _):
        worker.runner.device.graphs = EagerGraphs()
        tokens = greedy(engine, GIVEN)
        assert capturer.num_replayed == capturer.num_captured == 2
    return tokens


def captured_steps(graphs: CudaGraphs) -> Steps:
    return Steps(shapes=CudaShapes(graphs), graphs=graphs, compiler=graphs)


def idle(engine: Engine, limit: int = 20) -> int:
    """Steps that the engine takes while nobody asks for anything."""
    for count in range(limit):
        if not engine.has_idle_work():
            return count
        assert engine.step() == []
        assert not engine.has_unfinished()
    raise AssertionError("there is no end to it")


def test_the_rest_is_captured_while_nothing_else_is_to_do(start: Callable[..., Any], wanted: list[list[int]]) -> None:
    with start() as (engine, worker, capturer, plans):
        assert capturer.num_captured == 2
        assert idle(engine) == 2
        assert capturer.num_captured == 4
        assert [(len(plan.slots), plan.capture) for plan in plans] == [(0, True)] * 2
        assert not worker.runner.device.graphs.wanted()
        before = capturer.num_replayed
        assert greedy(engine, GIVEN) == wanted
        assert capturer.num_replayed > before + 5
        assert not any(plan.capture for plan in plans[2:])
        assert idle(engine) == 0


def test_scales_that_are_calculated_come_before_any_replay(start: Callable[..., Any]) -> None:
    """The first request has one token, for which a step is captured already; that step would measure nothing."""
    settings = {"calculate_kv_scales": True, "kv_cache_dtype": "fp8_e4m3"}
    found = []
    for captures in (True, False):
        with start(settings=settings) as (engine, worker, capturer, _):
            layers = [one for one in worker.model.modules() if getattr(one, "kv_scales", None) is not None]
            if not captures:
                worker.runner.device.graphs._graphs = EagerGraphs()
            idle(engine)
            assert all(layer.measures and layer.kv_scales.eq(1).all() for layer in layers)
            before = capturer.num_replayed
            first = tokens_of(drain(engine, [request("first", [7], 1)])["first"])
            assert capturer.num_replayed == before
            scales = [layer.kv_scales.tolist() for layer in layers]
            assert not any(layer.measures for layer in layers)
            tokens = greedy(engine, GIVEN)
            assert (capturer.num_replayed > before) == captures
            assert [layer.kv_scales.tolist() for layer in layers] == scales
            found.append((first, scales, tokens))
    assert found[0] == found[1]


def test_while_requests_run_steps_are_captured_now_and_then(
    start: Callable[..., Any], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then a batch is padded to a larger size, and the tokens are the same."""
    monkeypatch.setattr(capture, "BUSY_STEPS", 3)
    monkeypatch.setattr(FakeCapturer, "row_seconds", 1e9)  # so that a capture seems to cost nothing
    with start() as (engine, _, capturer, plans):
        assert greedy(engine, GIVEN) == wanted
        assert capturer.num_captured == 2, "all batches were of the largest size or of one row"
        assert greedy(engine, GIVEN[:3]) == wanted[:3]
        assert greedy(engine, GIVEN[:2]) == wanted[:2]
        assert capturer.num_captured == 4
        asked = [place for place, plan in enumerate(plans) if plan.capture]
        assert asked[0] >= 3
        assert all(later - earlier > 3 for earlier, later in pairwise(asked))
        assert greedy(engine, GIVEN) == wanted


def test_a_kind_that_comes_later_is_captured_later(start: Callable[..., Any], wanted: list[list[int]]) -> None:
    with start() as (engine, worker, capturer, _):
        idle(engine)
        monkey = request("strict", GIVEN[0], 8, deterministic=True)
        monkey.params.deterministic = False  # the reference cannot: only the plan says so
        execute = worker.runner.execute

        def as_if(plan: StepPlan) -> None:
            plan.deterministic = True
            execute(plan)

        worker.runner.execute = as_if
        found = tokens_of(drain(engine, [monkey])["strict"])
        assert found == wanted[0][:8]
        assert idle(engine) == 1
        assert capturer.num_captured == 5
        assert greedy(engine, GIVEN[:1]) == wanted[:1]


def test_memory_for_graphs_is_not_the_caches(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "kv_bytes", lambda self, *given: 128 << 20)
    found = []
    for each, given in ((2 << 20, None), (8 << 20, None), (8 << 20, 14 << 20)):
        with start(each, settings={"num_gpu_blocks_override": None}, graph_memory_bytes=given) as (
            engine,
            _,
            capturer,
            _,
        ):
            layout = engine.executor.call("run", {"function": lambda worker: worker.started.memory.layout})[0]
            (block,) = pool_bytes(layout)
            found.append((capturer.num_forgotten, capturer.num_captured, round(engine.info.num_blocks * block / 2**20)))
    # two are captured on trial, of the eight that may come: four sizes, deterministic and not
    assert found == [(1, 4, 112), (1, 4, 64), (0, 2, 114)]


@pytest.mark.parametrize("moved", ["input_ids", "layers.0", "KV cache"])
def test_a_replay_that_would_read_where_nothing_is_any_more_is_an_error(moved: str, start: Callable[..., Any]) -> None:
    with start(check_captured_inputs=True) as (engine, worker, capturer, _):
        found = greedy(engine, GIVEN[:1])
        runner = worker.runner
        if moved == "input_ids":
            buffers = runner.inputs.buffers
            object.__setattr__(buffers, "input_ids", buffers.input_ids.clone())
            runner.inputs._cut = None
        elif moved == "KV cache":
            for layer in (one for one in runner.model.modules() if hasattr(one, "kv_cache")):
                layer.kv_cache = layer.kv_cache.clone()
        else:
            weight = next(iter(runner.model.parameters()))
            weight.data = weight.data.clone()
        with pytest.raises(RuntimeError, match=r"captured step of 1 tokens would read .* has moved"):
            runner.captured_inputs.check(decode_shape(1))
        worker._drop_stale_graphs()
        before = capturer.num_captured
        assert greedy(engine, GIVEN[:1]) == found
        idle(engine)
        assert capturer.num_captured == before + 4
        assert greedy(engine, GIVEN[:1]) == found


def test_graphs_are_dropped_where_memory_moved_in_its_sleep(start: Callable[..., Any], wanted: list[list[int]]) -> None:
    with start(check_captured_inputs=True) as (engine, worker, capturer, _):
        idle(engine)
        assert greedy(engine, GIVEN) == wanted
        before = worker.runner.captured_inputs.addresses()
        sizes = [one.untyped_storage().nbytes() for one in worker.started.memory.slots]
        engine.call("sleep")
        assert not engine.has_idle_work(), "what captured steps read is not there"
        held = [torch.empty(size, dtype=torch.uint8) for size in sizes]  # where the cache was, in all likelihood
        engine.call("wake_up")
        moved = worker.runner.captured_inputs.addresses() != before
        assert capturer.num_forgotten == moved
        assert greedy(engine, GIVEN) == wanted
        idle(engine)
        assert capturer.num_captured == (8 if moved else 4)
        assert greedy(engine, GIVEN) == wanted
        del held


def test_new_weights_are_read_by_the_graphs_there_are(start: Callable[..., Any]) -> None:
    with start(check_captured_inputs=True) as (engine, _, capturer, _):
        idle(engine)
        old = greedy(engine, GIVEN)
        engine.call("update_weights", {"load_format": "dummy"})
        new = greedy(engine, GIVEN)
        engine.call("update_weights", {"load_format": "auto"})
        assert greedy(engine, GIVEN) == old != new
        assert (capturer.num_forgotten, capturer.num_captured) == (0, 4)


def test_a_worker_says_whether_it_has_more_to_record(start: Callable[..., Any]) -> None:
    with start() as (_, worker, _, _):
        assert isinstance(worker, Worker)
        assert worker.runner.device.graphs.wanted() is True
    with start(graph_sizes_at_start=8) as (engine, worker, _, _):
        assert worker.runner.device.graphs.wanted() is False
        assert not engine.has_idle_work()


ASKED: list[list[dict[str, Any]]] = [
    [{}],
    [{"temperature": 0.8}],
    [{}, {"temperature": 0.8}],
    [{"temperature": 0.8}, {"temperature": 0.8, "presence_penalty": 1.5}],
    [{}, {"temperature": 0.7, "top_k": 5}, {"logprobs": 2}],
]


@pytest.mark.matrix
@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("at_start", [1, 8])
def test_draws_captured_beside_their_steps_give_the_same_tokens(
    start: Callable[..., Any], asked: list[dict[str, Any]], at_start: int
) -> None:
    """Also while other sizes are captured between the steps of requests that live, and where rows come and go."""
    given = [
        request(f"{number}", prompt, 6 + 5 * number, seed=number, **asked[number % len(asked)])
        for number, prompt in enumerate(GIVEN)
    ]
    with start() as (engine, worker, _, _):
        worker.runner.device.graphs = EagerGraphs()
        wanted = {name: tokens_of(outputs) for name, outputs in drain(engine, given).items()}
    with start(capture_draws=True, graph_sizes_at_start=at_start) as (engine, worker, capturer, _):
        drawn, run = [], worker.runner.plain_draw.run
        worker.runner.plain_draw.run = lambda *args: (drawn.append(run(*args)), drawn[-1])[1]
        for _ in range(2):
            assert {name: tokens_of(outputs) for name, outputs in drain(engine, given).items()} == wanted
        plain = all(one.keys() <= {"temperature"} for one in asked)
        assert any(drawn) if plain else None in drawn
        idle(engine)
        assert capturer.num_captured == 3 * 4, "a step, its greedy and its random draw"


def test_a_captured_draw_that_is_not_finite_ends_its_request_alone(start: Callable[..., Any]) -> None:
    with start(capture_draws=True, graph_sizes_at_start=8) as (engine, worker, _, plans):
        engine.add(request("good", GIVEN[0]))
        engine.add(request("bad", GIVEN[1]))
        outputs = [*engine.step(), *engine.step()]
        logits, slots = worker.runner.model.logits, {one.request_id: one.slot for plan in plans for one in plan.added}

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            found = logits(hidden)
            found[worker.runner.inputs.buffers.rows[: len(hidden)] == slots["bad"]] = torch.nan
            return found

        worker.runner.model.logits = broken
        while engine.has_unfinished():
            outputs += engine.step()
    ends = {one.request_id: one for one in outputs if one.finish_reason}
    assert ends["good"].finish_reason == "length"
    assert "not finite" in str(ends["bad"].error)


def test_steps_with_prompts_run_in_pieces(
    start: Callable[..., Any], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts beside decodes, padded: the tokens are those of an engine that captures nothing."""
    monkeypatch.setattr(CpuPlatform, "ops", lambda self: Ops())  # on a tape are torch's operators only
    budget = {"max_num_batched_tokens": 24, "enable_prefix_caching": False}
    with start(settings=budget, max_tokens=24) as (engine, worker, _, plans):
        pieces = worker.runner.device.graphs._pieces
        assert pieces.sizes == [16, 24]
        for _ in range(2):
            assert greedy(engine, GIVEN) == wanted
            assert set(pieces._graphs) == {16, 24}
        capturer = pieces._capturer
        before, capturer.fails_after = capturer.ended, capturer.ended
        assert greedy(engine, GIVEN) == wanted
        assert capturer.ended == before, "what is captured is not captured again"
        assert any(len(plan.slots) < plan.num_tokens <= 24 for plan in plans)


def test_steps_with_prompts_are_captured_while_nothing_else_is_to_do(
    start: Callable[..., Any], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By steps of padding, which leave the cache as it was: every size is there when its first prompt comes."""
    monkeypatch.setattr(CpuPlatform, "ops", lambda self: Ops())
    budget = {"max_num_batched_tokens": 24, "enable_prefix_caching": False}
    with start(settings=budget, max_tokens=24) as (engine, worker, capturer, plans):
        pieces = worker.runner.device.graphs._pieces
        assert (capturer.num_captured, pieces._graphs) == (2, {}), "none is captured before the first request"
        before = [slot.clone() for slot in worker.started.memory.slots]
        assert idle(engine) == 4
        assert (capturer.num_captured, list(pieces._graphs)) == (4, [24, 16])
        assert all(torch.equal(slot, old) for slot, old in zip(worker.started.memory.slots, before, strict=True))
        assert [(len(plan.slots), plan.capture) for plan in plans] == [(0, True)] * 4
        made = pieces._capturer.ended
        assert greedy(engine, GIVEN) == wanted
        assert pieces._capturer.ended == made
        assert not any(plan.capture for plan in plans[4:])
        assert idle(engine) == 0
        worker.runner.device.graphs.drop()
        assert greedy(engine, GIVEN[:1]) == wanted[:1]
        idle(engine)
        assert greedy(engine, GIVEN) == wanted


def test_while_requests_run_no_step_of_padding_with_prompts_does(
    start: Callable[..., Any], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "ops", lambda self: Ops())
    monkeypatch.setattr(capture, "BUSY_STEPS", 3)
    budget = {"max_num_batched_tokens": 24, "enable_prefix_caching": False}
    with start(settings=budget, max_tokens=24, graph_sizes_at_start=8) as (engine, worker, _, plans):
        pieces = worker.runner.device.graphs._pieces
        assert greedy(engine, GIVEN[3:4]) == wanted[3:4]  # of one token
        assert any(plan.capture for plan in plans)
        assert all(len(plan.slots) for plan in plans), "a capture that is not made takes no step of its own"
        assert not pieces._graphs
        assert engine.has_idle_work()
        assert idle(engine) in (2, 3), "of which the first may only see that a request was served"
        assert set(pieces._graphs) == {16, 24}
        assert greedy(engine, GIVEN) == wanted


DECODE = StepShape(8, 8)


class Decodes(AnyShape):
    """Pads every decode step to one shape."""

    def choose(self, plan: StepPlan) -> StepShape:
        return DECODE if len(plan.slots) == plan.num_tokens else super().choose(plan)


class PlansOnce(EagerGraphs):
    """Graphs that go on with the plans of the first step of a shape, which was padding."""

    def __init__(self) -> None:
        self.steps: dict[StepShape, ForwardStep] = {}

    def run(self, shape: StepShape, part: Part, work: Any, kind: str = "") -> Any:
        if part != "forward" or shape != DECODE:
            return work()
        forward: Forward = work
        step = forward.step()
        return forward(self.steps.setdefault(shape, step))


def test_plans_of_a_shape_hold_for_all_its_steps(start: Callable[..., Any], wanted: list[list[int]]) -> None:
    with start() as (engine, worker, _, _):
        graphs = worker.runner.device.graphs = PlansOnce()
        worker.runner.device.shapes = Decodes()
        worker.runner.run_dummy(DECODE)
        assert list(graphs.steps) == [DECODE]
        assert greedy(engine, GIVEN) == wanted


def test_a_step_of_prompts_may_be_run_on_padding(start: Callable[..., Any]) -> None:
    with start() as (_, worker, _, _):
        worker.runner.device.graphs = EagerGraphs()
        worker.runner.run_dummy(StepShape(64, 8))


def test_where_logits_cannot_be_captured_draws_are_not(
    start: Callable[..., Any],
    wanted: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = FakeCapturer.capture

    def refusing(self: FakeCapturer, forward: Callable[[], torch.Tensor]) -> CapturedGraph:
        if isinstance(forward, partial):  # a draw
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(self, forward)

    monkeypatch.setattr(FakeCapturer, "capture", refusing)
    with start(capture_draws=True, graph_sizes_at_start=8) as (engine, worker, capturer, _):
        assert greedy(engine, GIVEN) == wanted
        assert capturer.num_captured > 1
        assert not worker.runner.device.graphs._draws
    assert sum("draws are not captured: RuntimeError: operation not permitted" in line for line in caplog.messages) == 1


def test_a_closed_engine_keeps_nothing_that_its_graphs_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though somebody still holds it: captured steps with prompts hold layers, and those their KV cache."""
    monkeypatch.setattr(torch_attention, "TorchAttention", Launched)
    monkeypatch.setattr(CpuPlatform, "ops", lambda self: Ops())
    options = CudaOptions(graph_sizes=[1, 2], graph_sizes_at_start=1, capture_draws=False)

    def steps(self: CpuPlatform) -> Steps:
        return captured_steps(
            CudaGraphs(FakeCapturer(), options, 8, pieces=PiecewiseGraphs(TapeCapturer()), max_tokens=128)
        )

    monkeypatch.setattr(CpuPlatform, "steps", steps)
    config = from_flat({"model": str(folder), **SETTINGS, "attention_backend": "torch"})
    with running(config, Registry.load()) as engine:
        greedy(engine, GIVEN)
        worker = engine.executor.call("run", {"function": lambda worker: worker})[0]
        assert worker.started.opened.steps.graphs._pieces._graphs
        cache = weakref.ref(worker.started.memory)
        layer = weakref.ref(next(iter(worker.started.model.modules())))
    assert cache() is None
    assert layer() is None


@pytest.mark.parametrize("family", ["qwen3-5", "mamba2"])
def test_steps_of_layers_with_states_are_captured(
    family: str, start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single tokens as a whole and prompts in pieces, also on from states that were kept of prefixes."""
    monkeypatch.setattr(CpuPlatform, "ops", lambda self: Ops())
    settings = {"model": str(make_checkpoint(tmp_path, family)), "max_num_batched_tokens": 24}
    given = [[*one, *range(3, 30)][:60] for one in GIVEN[:4]]
    with start(settings=settings) as (engine, worker, _, _):
        worker.runner.device.graphs = EagerGraphs()
        wanted = greedy(engine, given)
    with start(settings=settings, max_tokens=24) as (engine, worker, capturer, plans):
        before = capturer.num_replayed
        for _ in range(2):
            assert greedy(engine, given) == wanted
        assert capturer.num_replayed > before + 5
        assert set(worker.runner.device.graphs._pieces._graphs) == {16, 24}
        assert any(copy.sources.size for plan in plans for copy in plan.copies)
        assert engine.stats().prefix_hits > 0


def test_weights_in_host_memory_arrive_in_captured_steps(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps are captured as a whole; prompts run eagerly, since no piece can wait for the copy of another."""
    settings = {"model": str(make_checkpoint(tmp_path, "llama", num_hidden_layers=5))}
    make_two_places(monkeypatch)
    with start(settings=settings) as (engine, worker, _, _):
        worker.runner.device.graphs = EagerGraphs()
        wanted = greedy(engine, GIVEN)
    with start(settings={**settings, "cpu_offload_gb": 1}, max_tokens=64) as (engine, worker, capturer, _):
        assert idle(engine) > 0
        before = capturer.num_replayed
        for _ in range(2):
            assert greedy(engine, GIVEN) == wanted
        assert capturer.num_replayed > before + 5
        assert worker.runner.device.graphs._pieces.sizes == []
