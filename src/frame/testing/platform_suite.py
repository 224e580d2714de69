"""The contract of platforms: queues, memory, graphs, and ops that mean what the references mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from frame.core.interfaces.model import ForwardStep, Model
from frame.core.interfaces.platform import (
    SMALL_COPY_BYTES,
    HostCopy,
    MemorySnapshot,
    Platform,
    PlatformSpec,
    Streams,
)
from frame.core.interfaces.platform_steps import Length, Part, StepShape
from frame.core.interfaces.step import StepPlan
from frame.core.ops import Ops
from frame.core.ops.step import StepBuffers

from .checkpoints import write_tokenizer
from .engines import SMALL, added_in_turn, every_kind, greedy, mixed_requests, prompts, running
from .op_cases import CASES, Draw
from .plugin_suite import PluginSuite, reason_or_none
from .sizes import Sizes, sizes_by_argument, watched_ops
from .tiny import write_tiny

OPS = sorted(name for name in vars(Ops) if not name.startswith("_"))
#: Of prompts: batches by which every size is met, and one of lengths that none of them has.
_LENGTHS = ((60, 3, 33, 1, 17, 48), (1,), (64, 64, 64, 64, 9, 9, 9, 9), (31, 31), (2, 2, 2), (62,) * 7, (15,), (7, 100))
_OTHER_LENGTHS = (59, 5, 34, 2, 18, 47, 98)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class PlatformSuite(PluginSuite):
    """The contract of `frame.interfaces.Platform`.

        class TestMine(PlatformSuite):
            plugin = "mine"                     # or target = "package.module:Class"
            settings = {"attention_backend": "mine"}   # what an engine on it needs, if anything

    Everything is skipped, with `probe`'s reason, on a machine without the device.
    """

    kind = "platform"
    #: the checkpoint that is served
    architecture: ClassVar[str] = "LlamaForCausalLM"

    #: the most sizes (rows, tokens, samples) that a platform of static shapes has; 0: it takes any, none are counted
    max_sizes: ClassVar[int] = 0

    def tolerance(self, dtype: torch.dtype) -> float:
        """Largest absolute and relative difference of an op from its reference."""
        return _TOLERANCE[dtype]

    @pytest.fixture
    def platform(self) -> Platform:
        """A new platform; skips where there is no such device."""
        reason = reason_or_none(self.found().probe(), "probe")
        if reason is not None:
            pytest.skip(reason)
        made = self.make()
        assert isinstance(made, Platform), f"{type(made).__name__} does not derive from Platform"
        return made

    def dtypes(self, platform: Platform) -> list[torch.dtype]:
        """The element types that the platform computes in."""
        return [dtype for dtype in _DTYPES if platform.supports(PlatformSpec(dtype)) is None]

    def test_probe_says_why_and_claims_nothing(self) -> None:
        kind = self.found()
        assert reason_or_none(kind.probe(), "probe") == reason_or_none(kind.probe(), "probe")

    def test_device_is_of_its_type(self, platform: Platform) -> None:
        assert platform.device.type == platform.device_type
        assert torch.zeros(2, device=platform.device).sum().item() == 0

    def test_default_batch_sizes_allow_a_step(self) -> None:
        kind = self.found()
        for name in ("default_num_seqs", "default_num_batched_tokens"):
            size = getattr(kind, name)
            assert isinstance(size, int), f"{name} must be an int, is {size!r}"
            assert size >= 1, f"{name} must be at least 1, is {size}"

    def test_supports_gives_reasons(self, platform: Platform) -> None:
        assert self.dtypes(platform), "none of float32, bfloat16, float16 is supported"
        reason = platform.supports(PlatformSpec(torch.complex128))
        assert reason_or_none(reason, "supports"), "supports must refuse complex128"
        for spec in (PlatformSpec(torch.float32, world_size=10**6), PlatformSpec(torch.float32, deterministic=True)):
            reason_or_none(platform.supports(spec), "supports")
        for stored in (torch.float32, torch.bfloat16, torch.float16):
            chosen = platform.auto_dtype(stored)
            reason = platform.supports(PlatformSpec(chosen))
            assert reason is None, f"auto_dtype({stored}) gave {chosen}, which is not supported: {reason}"

    @pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "bool", "uint8"])
    def test_staged_arrays_arrive_and_may_be_reused(self, platform: Platform, dtype: str) -> None:
        streams = platform.streams()
        given = (np.arange(999) % 2 if dtype == "bool" else np.arange(999) % 200).astype(dtype)
        want = given.copy()
        tensors = []
        for _ in range(3):
            tensors.append(streams.stage(given))
            given[:] = 0  # the caller may do so at once
            given[:] = want
        given[:] = 0
        streams.synchronize()
        for tensor in tensors:
            assert tensor.device.type == platform.device_type
            assert tensor.dtype == getattr(torch, dtype), f"an array of {dtype} became {tensor.dtype}"
            assert np.array_equal(tensor.cpu().numpy(), want), "stage must copy the array before it returns"
        assert streams.stage(np.zeros((0, 3), np.int32)).shape == (0, 3), "an empty array must arrive as one"

    def test_arrays_are_staged_into_memory_that_is_there(self, platform: Platform) -> None:
        streams = platform.streams()
        memory = torch.zeros(6, dtype=torch.int32, device=platform.device)
        part, given = memory[2:].view(2, 2), np.array([[1, 2], [3, 4]], np.int32)
        streams.stage_into(part, given)
        given.fill(9)
        streams.synchronize()
        assert memory.tolist() == [0, 0, 1, 2, 3, 4], "stage_into must copy the array, into that memory, and at once"

    def test_what_is_small_is_copied_out_before_it_is_overwritten(self, platform: Platform) -> None:
        streams, copies = platform.streams(), []
        memory = torch.zeros(SMALL_COPY_BYTES // 8, dtype=torch.int32, device=platform.device)
        for _ in range(5):
            memory.add_(1)
            copies.append(streams.copy_out({"one": memory, "other": memory}))
        for number, copy in enumerate(copies, 1):
            for array in copy.wait().values():
                assert (array == number).all(), "copy_out must read small tensors before later work writes to them"

    def test_copies_come_out_after_the_work_before(self, platform: Platform) -> None:
        streams = platform.streams()
        made = {"sum": self.work(streams, 50), "empty": torch.zeros(0, dtype=torch.int32, device=platform.device)}
        copy = streams.copy_out(made)
        want = made["sum"].cpu().numpy().copy()
        del made
        assert isinstance(copy, HostCopy), f"copy_out must give a HostCopy, gave {type(copy).__name__}"
        assert isinstance(copy.ready(), bool)
        for _ in range(2):
            arrays = copy.wait()
            assert set(arrays) == {"sum", "empty"}, f"the copy holds {sorted(arrays)}"
            assert np.array_equal(arrays["sum"], want), "the copy differs from the tensor"
            assert arrays["empty"].shape == (0,)
        assert copy.ready(), "a copy that was waited for is ready"

    def test_many_copies_may_be_under_way(self, platform: Platform) -> None:
        streams = platform.streams()
        copies = [streams.copy_out({"x": self.work(streams, index)}) for index in range(20)]
        wanted = [self.work(streams, index).cpu().numpy() for index in range(20)]
        for index in reversed(range(20)):
            assert np.array_equal(copies[index].wait()["x"], wanted[index]), "copies are mixed up"

    def test_ready_turns_true_without_waiting(self, platform: Platform) -> None:
        streams = platform.streams()
        copy = streams.copy_out({"x": self.work(streams, 3)})
        streams.synchronize()
        deadline = time.monotonic() + 10
        while not copy.ready():
            assert time.monotonic() < deadline, "a copy was not ready 10 s after the device had finished"
            time.sleep(0.001)

    def test_memory_is_counted(self, platform: Platform) -> None:
        memory = platform.memory()
        before = memory.snapshot()
        assert isinstance(before, MemorySnapshot)
        assert 0 <= before.free <= before.total, f"{before}: free must lie between 0 and total"
        assert 0 <= before.held <= before.peak, f"{before}: held must be at most peak"
        sizes = [memory.kv_bytes(before, share, 1 << 20, 1 << 30) for share in (0.01, 0.5, 0.9)]
        assert all(isinstance(size, int) and size >= 0 for size in sizes), f"kv_bytes gave {sizes}"
        assert sizes == sorted(sizes), f"a larger share of the memory gave a smaller cache: {sizes}"
        assert memory.kv_bytes(before, 0.5, before.total, 1 << 30) == 0, "no room is left beside such weights"

    def test_pools_wrap_allocations(self, platform: Platform) -> None:
        memory = platform.memory()
        for tag in ("weights", "kv_cache"):
            with memory.pool(tag):
                kept = torch.ones(8, device=platform.device)
            assert kept.sum().item() == 8
        for call in (lambda: memory.sleep(("weights",)), lambda: memory.wake(("weights", "kv_cache"))):
            try:
                call()
            except NotImplementedError as error:
                text = str(error)
                assert "platform" in text, f"say that this platform cannot, got {text!r}"

    @pytest.mark.parametrize("rows", [[1], [1, 1, 1], [7], [5, 1, 1, 20]], ids=str)
    def test_shapes_hold_the_step(self, platform: Platform, rows: list[int]) -> None:
        plan = step_of(rows)
        shape = platform.steps().shapes.choose(plan)
        assert shape.padded_tokens >= sum(rows), f"{shape} has no room for {sum(rows)} tokens"
        assert shape.padded_rows >= len(rows), f"{shape} has no room for {len(rows)} rows"
        assert shape.padded_samples == 0 or shape.padded_samples >= len(rows), f"{shape} has no room for its samples"
        assert shape.max_query_len >= max(rows), f"{shape} says that no row has more than {shape.max_query_len} tokens"
        assert shape.max_seq_len == 0 or shape.max_seq_len >= max(rows), f"{shape} cuts the longest row"
        plan.deterministic = True
        assert platform.steps().shapes.choose(plan).deterministic, "a deterministic plan has a shape that is not"

    def test_lengths_are_padded_upwards(self, platform: Platform) -> None:
        shapes = platform.steps().shapes
        for what in get_args(Length):
            for count in (1, 2, 3, 100, 1000):
                padded = shapes.pad(what, count)
                assert padded >= count, f"pad({what!r}, {count}) gave {padded}, which is less"

    def test_graphs_run_what_they_are_given(self, platform: Platform) -> None:
        steps = platform.steps()
        shape = steps.shapes.choose(step_of([3]))
        want = torch.ones(shape.padded_tokens, 4, device=platform.device)
        assert torch.equal(steps.graphs.run(shape, "forward", _Given(want + 1)), want + 1)
        ran: list[str] = []
        for part in get_args(Part):
            if part != "forward":
                assert steps.graphs.run(shape, part, partial(_say, ran, part)) == part, (
                    f"run must give what {part} gave"
                )
            assert isinstance(steps.graphs.captures(shape, part), bool)
        assert ran == ["writes", "draw", "drafts"], f"each part must run once, and ran: {ran}"
        assert isinstance(steps.graphs.capture(lambda shape: None), bool)

    def test_graphs_come_to_an_end_and_can_be_dropped(self, platform: Platform) -> None:
        steps = platform.steps()
        graphs = steps.graphs

        def run_dummy(shape: StepShape) -> None:
            graphs.run(shape, "forward", _Given(torch.zeros(shape.padded_tokens, 4, device=platform.device)))

        reserved = graphs.reserve(run_dummy)
        assert isinstance(reserved, int), f"reserve must give bytes, gave {reserved!r}"
        assert reserved >= 0
        while graphs.capture(run_dummy):
            pass
        for _ in range(1000):
            if not graphs.wanted():
                break
            graphs.capture(run_dummy)
        assert not graphs.wanted(), "1000 captures did not end wanted(): an idle engine would never rest"
        graphs.drop()
        shape = steps.shapes.choose(step_of([1, 1, 1]))
        want = torch.ones(shape.padded_tokens, 4, device=platform.device)
        found = graphs.run(shape, "forward", _Given(want + 1))
        assert torch.equal(found, want + 1), "a dropped capture was replayed"

    def test_every_op_is_there(self, platform: Platform) -> None:
        ops = platform.ops()
        assert isinstance(ops, Ops), f"ops() must give frame.ops.Ops or a subclass, gave {type(ops).__name__}"
        assert platform.ops() is ops, "ops() must give the same object each time: the runner sets its `invariant`"
        for name in OPS:
            assert callable(getattr(ops, name)), f"op {name} cannot be called"

    @pytest.mark.parametrize("name", OPS)
    def test_ops_equal_their_references(self, platform: Platform, name: str) -> None:
        assert name in CASES, f"op {name} has no case in frame.testing.op_cases"
        for dtype in self.dtypes(platform):
            for case in CASES[name]:
                positional, named = case(Draw(dtype))
                there = [_to(value, platform.device) for value in positional]
                want = getattr(Ops(), name)(*positional, **named)
                got = getattr(platform.ops(), name)(*there, **{k: _to(v, platform.device) for k, v in named.items()})
                self.check_op(name, got, want, dtype)
                self.check_op(f"{name} (arguments afterwards)", there, positional, dtype)

    def check_op(self, name: str, got: Any, want: Any, dtype: torch.dtype) -> None:
        """`got` equals `want` up to rounding, in shape and dtype exactly."""
        if isinstance(want, StepBuffers):
            for part in fields(want):
                self.check_op(f"{name}: {part.name}", getattr(got, part.name), getattr(want, part.name), dtype)
        elif isinstance(want, (tuple, list)):
            assert len(got) == len(want), f"{name} gave {len(got)} values, expected {len(want)}"
            for one, other in zip(got, want, strict=True):
                self.check_op(name, one, other, dtype)
        elif isinstance(want, Tensor):
            assert got.dtype == want.dtype, f"{name} gave {got.dtype}, expected {want.dtype}"
            assert got.shape == want.shape, f"{name} gave {list(got.shape)}, expected {list(want.shape)}"
            bound = self.tolerance(dtype)
            message = f"{name} in {dtype} differs from its reference"
            torch.testing.assert_close(
                got.cpu(), want, atol=bound, rtol=bound, equal_nan=True, msg=lambda text: f"{message}: {text}"
            )

    def test_deterministic_rows_do_not_depend_on_the_batch(self, platform: Platform) -> None:
        """While `ops().invariant` is set, each row of an op's result has the bits that it has when computed alone."""
        for dtype in self.dtypes(platform):
            if platform.supports(PlatformSpec(dtype, deterministic=True)) is not None:
                continue
            ops = platform.ops()
            assert platform.ops() is ops, "ops() must give one object, which the runner sets `invariant` of"
            ops.invariant = True
            try:
                for name, op in _row_ops(ops, Draw(dtype), platform.device).items():
                    whole = op(slice(0, 70))
                    for rows in (slice(0, 1), slice(5, 7), slice(33, 34), slice(17, 50), slice(1, 70)):
                        assert torch.equal(op(rows), whole[rows]), f"{name} in {dtype} depends on the batch"
            finally:
                ops.invariant = False

    def test_an_engine_serves_on_it(self, platform: Platform, tmp_path: Path) -> None:
        dtype = str(self.dtypes(platform)[0]).removeprefix("torch.")
        write_tiny(tmp_path, self.architecture)
        given = prompts(512)
        settings = {**SMALL, "model": str(tmp_path), "platform": self.name, "dtype": dtype}
        with running(self.config(**settings), self.registry()) as engine:
            assert engine.info.platform == platform.device_type
            alone = [greedy(engine, [prompt])[0] for prompt in given]
            together = greedy(engine, given)
        if dtype == "float32":
            assert together == alone, "tokens depend on what a request is batched with"
        assert all(len(tokens) == 12 for tokens in together)
        if dtype == "float32":
            assert together == self.reference(tmp_path, given), "tokens differ from the transformers library's"

    def test_a_fixed_set_of_sizes_is_met(self, platform: Platform, tmp_path: Path) -> None:
        """Ops get tensors of few sizes, and requests of other lengths add no size."""
        if not self.max_sizes:
            pytest.skip("the platform takes any size")
        dtype = str(self.dtypes(platform)[0]).removeprefix("torch.")
        write_tiny(tmp_path, self.architecture)
        settings = {**SMALL, "max_num_seqs": 8, "model": str(tmp_path), "platform": self.name, "dtype": dtype}
        seen: set[tuple[Any, ...]] = set()
        with watched_ops(type(platform), seen), running(self.config(**settings), self.registry()) as engine:
            for seed, lengths in enumerate(_LENGTHS):
                mixed_requests(engine, prompts(512, lengths, seed))
            assert seen, "the engine's steps reached no op of the platform"
            before = set(seen)
            mixed_requests(engine, prompts(512, _OTHER_LENGTHS, seed=99))
            new = sorted(map(str, seen - before))
        self.check_sizes(before)
        assert not new, f"ops met sizes that no request before had: {'; '.join(new[:5])}"

    @pytest.mark.parametrize("speculator", [None, "ngram"])
    def test_whatever_is_asked_for_meets_a_fixed_set_of_sizes(
        self, platform: Platform, tmp_path: Path, speculator: str | None
    ) -> None:
        """Penalties, token rules, log-probabilities, grammars, drafts, several outputs: each in amounts of its own."""
        if not self.max_sizes:
            pytest.skip("the platform takes any size")
        dtype = str(self.dtypes(platform)[0]).removeprefix("torch.")
        write_tiny(tmp_path, self.architecture)
        write_tokenizer(tmp_path)
        settings = {**SMALL, "max_num_seqs": 8, "model": str(tmp_path), "platform": self.name, "dtype": dtype}
        if speculator is not None:
            lookup = {"method": speculator, "num_speculative_tokens": 8, "prompt_lookup_max": 2}
            settings |= {"speculative_config": lookup}
        seen: set[tuple[Any, ...]] = set()
        with watched_ops(type(platform), seen), running(self.config(**settings), self.registry()) as engine:
            for amount, lengths in enumerate((*_LENGTHS, _OTHER_LENGTHS), 1):
                given = [(prompt[:5] * 20)[: len(prompt)] for prompt in prompts(400, lengths, seed=amount)]
                added_in_turn(engine, every_kind(given, amount), amount)
        self.check_sizes(seen)

    def check_sizes(self, seen: Sizes) -> None:
        """No argument of an op has more than `max_sizes` sizes."""
        for (op, place, axis), sizes in sizes_by_argument(seen).items():
            which = f"argument {place} (axis {axis}) of op {op}"
            assert len(sizes) <= self.max_sizes, f"{which} has sizes {sorted(sizes)}"

    def reference(self, folder: Path, given: Sequence[Sequence[int]]) -> list[list[int]]:
        """What the transformers library continues each prompt with, greedily, on the CPU in float32."""
        from transformers import AutoModelForCausalLM

        from .model_suite import continue_greedily

        model: Model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return [continue_greedily(model, prompt, 12) for prompt in given]

    @staticmethod
    def work(streams: Streams, seed: int) -> Tensor:
        """Some work on the device, of integers."""
        value = streams.stage(np.arange(2000, dtype=np.int64) + seed)
        for _ in range(20):
            value = value * 3 + 1
        return value


def _say(said: list[str], part: str) -> str:
    said.append(part)
    return part


class _Given:
    """Implements `Forward` with a function that returns a given result."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def step(self) -> ForwardStep:
        return ForwardStep(plans=[], batches=[])

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        del step
        return self._hidden


def step_of(rows: Sequence[int]) -> StepPlan:
    """A plan of rows with that many tokens each, all of them new."""
    count = len(rows)
    return StepPlan(
        step=1,
        removed_slots=np.zeros(0, np.int32),
        added=[],
        appends=[],
        slots=np.arange(count, dtype=np.int32),
        num_scheduled=np.array(rows, np.int32),
        num_computed=np.zeros(count, np.int32),
        samples=np.ones(count, bool),
        num_drafts=np.zeros(count, np.int32),
    )


def _row_ops(ops: Ops, draw: Draw, device: torch.device) -> dict[str, Callable[[slice], Tensor]]:
    """What layers do with 70 rows, as functions of which rows they get."""
    x, gates, logits = draw.floats(70, 72).to(device), draw.floats(70, 80).to(device), draw.floats(70, 6).to(device)
    weight, bias, scale = draw.floats(88, 72).to(device), draw.floats(88).to(device), draw.floats(72).to(device)
    heads, table = draw.floats(70, 3, 24).to(device), draw.float32(80, 24).to(device)
    gate_up, down = draw.floats(6, 48, 72).to(device), draw.floats(6, 72, 24).to(device)
    positions = torch.arange(70, device=device)
    weights, ids = ops.route(logits, 2, True)
    return {
        "linear": lambda rows: ops.linear(x[rows], weight, bias),
        "linear_silu_mul": lambda rows: ops.linear_silu_mul(x[rows], weight),
        "norm_linear": lambda rows: ops.norm_linear(x[rows], x[rows], (scale, 1e-6, 0.0), weight, bias)[0],
        "norm_linear_silu_mul": lambda rows: ops.norm_linear_silu_mul(x[rows], x[rows], (scale, 1e-6, 0.0), weight)[0],
        "rms_norm": lambda rows: ops.rms_norm(x[rows], scale, 1e-6),
        "add_rms_norm": lambda rows: ops.add_rms_norm(x[rows], x[rows], scale, 1e-6, 1.0)[0],
        "layer_norm": lambda rows: ops.layer_norm(x[rows], scale, None, 1e-6),
        "silu_mul": lambda rows: ops.silu_mul(gates[rows]),
        "gelu_tanh_mul": lambda rows: ops.gelu_tanh_mul(gates[rows]),
        "map_rows": lambda rows: ops.map_rows(torch.tanh, x[rows]),
        "rotary": lambda rows: ops.rotary(heads[rows], heads[rows], positions[rows], table)[0],
        "route": lambda rows: ops.route(logits[rows], 2, True)[0],
        "fused_experts": lambda rows: ops.fused_experts(x[rows], gate_up, down, weights[rows], ids[rows]),
    }


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.clone().to(device)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, (tuple, list)):
        return type(value)(_to(one, device) for one in value)
    if isinstance(value, StepBuffers):
        return StepBuffers(**{part.name: _to(getattr(value, part.name), device) for part in fields(value)})
    return value
