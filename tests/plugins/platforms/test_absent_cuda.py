"""Steps on a CUDA device that is not there reach its kernels, in another process, and leave this one as it was."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import driver

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.engine.schedule.step_budget import resolve_budget
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import platform_setup
from frame.core.worker.start.open_device import OpenDevice
from frame.core.worker.start.trial_steps import distinct_layers, rehearse
from frame.interfaces import Mesh, Placement
from frame.kernels import peer_copies
from frame.kernels.norm import _rms_norm
from frame.plugins.platforms.cuda.compile import absent_cuda as absent, rehearsal
from frame.plugins.platforms.cuda.compile.absent_cuda import AbsentCuda, CompilingAhead, num_shares
from frame.plugins.platforms.cuda.compile.absent_device import AbsentStreams, StandIn, absent_cuda
from frame.plugins.platforms.cuda.compile.compiler import absent_driver
from frame.plugins.platforms.cuda.platform import CudaKernels, CudaPlatform
from frame.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or not rehearsal.can_rehearse(), reason="nothing is compiled"
)
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10
)
ALONE = Mesh()
LONG = 600.0


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A worker of a model whose heads the Hopper kernel for prompts takes."""
    return make_worker(make_checkpoint(tmp_path_factory.mktemp("absent"), "qwen3", head_dim=128))


def make_worker(folder, mesh=ALONE, **settings):
    flat = {"model": str(folder), "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 256, **settings}
    config, registry = from_flat(flat), Registry.load()
    checkpoint = read_checkpoint(config)
    config = resolve_budget(config, checkpoint, registry)
    place = Placement(mesh=mesh)
    platform = AbsentCuda(platform_setup(config, checkpoint.max_model_len, place))
    return OpenDevice(config, registry, place, "", checkpoint, platform, platform.steps(), "bfloat16")


def compiling(worker, work=None):
    return CompilingAhead(worker.platform, H200, work or partial(rehearse, worker))


class At:
    """A process that compiles: still at it, or at its end, where it succeeded or not."""

    def __init__(self, end=False, succeeds=True):
        self.has_ended, self.wait = (lambda: end), (lambda: succeeds)


def note(folder, compile_kernel):
    """Instead of compiling: its name, and what it was to be compiled for."""
    cells = dict(zip(compile_kernel.__code__.co_freevars, compile_kernel.__closure__, strict=True))
    source, options = cells["src"].cell_contents, cells["options"].cell_contents
    (folder / f"{source.name}-{source.hash()}-{options.hash()}").touch()


def test_every_kernel_of_a_model_is_met(worker, tmp_path, monkeypatch):
    """Prompts, decodes, the sampler's features, deterministic steps, in a process of its own."""
    monkeypatch.setattr(rehearsal, "leave", partial(note, tmp_path))
    assert compiling(worker).wait()
    met = {file.name.partition("-")[0] for file in tmp_path.iterdir()}
    usual = {"_prefill_attention_kernel", "_decode_attention_kernel", "_one_row", "_rms_norm", "_rotary", "_gated"}
    assert met >= usual | {"_norm_linear", "_build_inputs", "_best_of_part", "_top", "_filter", "_penalize"}
    assert met >= {"_some_rows"}, "products of a few rows on Hopper"
    assert met >= {"_linear", "_paged_attention_kernel"}, "deterministic steps"
    assert not torch.cuda.is_available() or driver.active.get_current_target().backend == "cuda"


def test_sums_over_two_devices_are_met_without_the_other_one(tmp_path, monkeypatch):
    """Else each worker compiles their kernels alone, one after another, once its weights are there."""
    folder = make_checkpoint(tmp_path / "model", "qwen3", head_dim=128, hidden_size=2048)
    worker = make_worker(folder, Mesh(tensor=2), tensor_parallel_size=2, max_num_batched_tokens=8192)
    (tmp_path / "met").mkdir()
    monkeypatch.setattr(rehearsal, "leave", partial(note, tmp_path / "met"))
    assert compiling(worker).wait()
    met = [file.name.partition("-")[0] for file in (tmp_path / "met").iterdir()]
    assert met.count("_sum") > 2, "in packets and alone, with a norm and without"
    assert set(met) >= {"_exchange", "_await_taken", "_tell_arrived", "_add_received"}


def test_a_sum_by_copies_launches_the_kernels_of_its_rehearsal():
    with absent_cuda(0, H200), rehearsal.CompileMode(lambda *_: None) as met:
        x, words = torch.zeros(4, 2048, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
        buffers = peer_copies.CopyBuffers(torch.zeros(1 << 20, dtype=torch.uint8, device="cuda"), words, words, words)
        for rehearsed in (True, False):
            peer_copies.await_taken(buffers, rehearsed=rehearsed)
            peer_copies.tell_arrived(buffers, rehearsed=rehearsed)
            peer_copies.add_received(x, buffers, x, rehearsed=rehearsed)
            peer_copies.add_received_normed(x, x, (x[0], 1e-6, 0.0), buffers, rehearsed=rehearsed)
            assert len(met) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3-moe", {"num_hidden_layers": 5, "mlp_only_layers": [1, 2]}),
        ("gemma2", {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}),
    ],
)
def test_layers_that_differ_launch_what_all_do(family, changes, tmp_path, monkeypatch):
    made = make_worker(make_checkpoint(tmp_path / "model", family, **changes))
    met = []
    for name, keep in (("all", nullcontext), ("distinct", distinct_layers)):
        monkeypatch.setattr("frame.core.worker.start.trial_steps.distinct_layers", keep)
        (tmp_path / name).mkdir()
        monkeypatch.setattr(rehearsal, "leave", partial(note, tmp_path / name))
        assert compiling(made).wait()
        met.append({file.name for file in (tmp_path / name).iterdir()})
    assert met[0] == met[1]
    assert len(met[0]) > 30


@pytest.mark.slow
def test_kernels_lie_in_the_cache_on_disk(worker, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rehearsal, "leave", lambda compile_kernel: compile_kernel())
    assert compiling(worker).wait()
    assert len(list(tmp_path.rglob("*.cubin"))) > 30


@pytest.mark.parametrize(("processors", "shares"), [(1, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_the_more_processors_the_more_run_the_steps(processors, shares):
    assert num_shares(processors) == shares


@pytest.mark.matrix
def test_a_cache_of_8_bit_floats_is_rehearsed(tmp_path, monkeypatch):
    """Its layers read their scales when loading ends, of which there are none."""
    folder = make_checkpoint(tmp_path / "model", "qwen3", head_dim=128)
    monkeypatch.setattr(rehearsal, "leave", lambda compile_kernel: None)
    assert compiling(make_worker(folder, kv_cache_dtype="fp8_e4m3")).wait()


def test_a_rehearsal_that_fails_is_told_by_its_end(worker):
    def fail(platform):
        raise ValueError(f"no {platform.device_type}")

    assert not compiling(worker, fail).wait()


class Loaded(dict):
    """Triton's kernels of a device in a process that has launched all of them; the driver of a fork refuses."""

    def get(self, key, default=None):
        raise RuntimeError("launched")


@pytest.mark.matrix
def test_kernels_that_the_parent_has_launched_are_not_launched(worker, tmp_path, monkeypatch):
    """As in a process that has had an engine before: Triton holds that engine's kernels of device 0 ready."""
    with absent_driver((9, 0), H200.shared_memory_per_block_optin):
        _, *others = _rms_norm.create_binder()
    monkeypatch.setitem(_rms_norm.device_caches, 0, (Loaded(), *others))
    monkeypatch.setattr(rehearsal, "leave", partial(note, tmp_path))
    assert compiling(worker).wait()
    assert [file for file in tmp_path.iterdir() if file.name.startswith("_rms_norm-")]


@pytest.mark.parametrize("shares", [1, 2])
def test_a_kernel_that_nobody_compiled_is_told_by_its_end(worker, monkeypatch, tmp_path, shares):
    """Else a start would look for no kernels, and the first request that launches it would wait for its compiler."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(absent, "num_shares", lambda _: shares)
    monkeypatch.setattr(rehearsal, "leave", lambda compile_kernel: compile_kernel())

    def fail():
        raise ValueError("no kernel")

    def work(last):
        mode = rehearsal._async_compile.active_mode.get()
        for number in range(shares):
            mode.submit(f"{number}", last if number == shares - 1 else list, lambda kernel: None)

    assert not compiling(worker, lambda _: work(fail)).wait()
    assert compiling(worker, lambda _: work(list)).wait()


def test_dropping_it_ends_the_process(worker):
    ahead = compiling(worker, lambda platform: time.sleep(LONG))
    (child,) = ahead._group._leader
    del ahead
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_tensors_on_it_have_no_memory_and_others_do():
    with absent_cuda(0, H200):
        table = torch.zeros(1 << 40, device="cuda")
        assert table.device == torch.device("cuda", 0)
        assert table.is_cuda
        assert torch.arange(3, 10, 2, device=torch.device("cuda")).shape == (4,)
        assert torch.cat((table[:3], table[:2])).shape == (5,)
        assert torch.nn.functional.linear(table[:8].view(2, 4), table[:12].view(3, 4)).shape == (2, 3)
        assert torch.cuda.get_device_capability() == (9, 0)
        here = torch.arange(4.0)
        assert here.device.type == "cpu"
        assert not here.is_cuda
        assert (here.cos() * 2).tolist()[0] == 2.0
        assert here.to("cuda").is_cuda
        assert AbsentStreams().copy_out({"ids": table[:3]}).wait()["ids"].tolist() == [0.0, 0.0, 0.0]
    assert torch.zeros(1).device.type == "cpu"


def test_kernels_that_nobody_compiled_are_compiled_when_they_are_loaded(monkeypatch, tmp_path):
    """After those who compile meanwhile failed, forked processes do, and then whoever loads."""
    monkeypatch.setattr(rehearsal, "leave", lambda compile_kernel: (tmp_path / "left").touch())
    loaded = []

    def run():
        mode = rehearsal._async_compile.active_mode.get()
        for _ in range(2):
            mode.submit("key", lambda: "kernel", loaded.append)

    for ahead, left in ((lambda: True, False), (lambda: False, True), (None, True)):
        loaded.clear()
        rehearsal.rehearse(run, ahead)
        assert loaded[-2:] == ["kernel", "kernel"]
        assert (tmp_path / "left").exists() == left
        (tmp_path / "left").unlink(missing_ok=True)


def test_what_stands_in_for_a_module_lets_it_in_when_asked_for_more(monkeypatch):
    for name in [name for name in sys.modules if name == "sympy" or name.startswith("sympy.")]:
        monkeypatch.delitem(sys.modules, name)
    with absent_cuda(0, H200):
        import sympy

        assert isinstance(sympy, StandIn)
        assert not isinstance(3, sympy.Basic)
    assert "sympy" not in sys.modules
    with absent_cuda(0, H200):
        from sympy import Integer

        assert Integer(3) == 3
    assert sys.modules["sympy"].Integer is Integer


def test_only_the_first_engine_of_a_process_compiles_ahead_in_a_fork(worker, monkeypatch):
    """In a process that has a context, torch's calls fail in a fork: "CUDA error: initialization error"."""
    started = []
    monkeypatch.setattr(absent, "CompilingAhead", lambda *_: started.append(1) or At())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
    monkeypatch.setattr(CudaKernels, "_compiled_ahead", False)
    for _ in range(2):
        CudaKernels(worker.platform).compile_ahead(lambda _: None)
    assert started == [1]


def test_a_start_as_an_earlier_one_looks_for_no_kernels(worker, monkeypatch, tmp_path):
    """Until the configuration, the device or a library is another one."""
    ran, forked, chip = [], [], ["NVIDIA H200"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(absent, "CompilingAhead", lambda *_: forked.append(1) or At())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: chip[0])
    monkeypatch.setattr(CudaPlatform, "settle_products", lambda _: None)

    def start(key, fails=False, first=True):
        monkeypatch.setattr(CudaKernels, "_compiled_ahead", not first)

        def run(*, brief=False):
            ran.append(brief)
            if fails:
                raise ValueError("a part that no rehearsal can run")

        platform = copy(worker.platform)
        platform.setup = replace(platform.setup, steps_key=key)
        kernels = CudaKernels(platform)
        kernels.compile_ahead(lambda _: None)
        with suppress(ValueError):
            kernels.prepare(run)
        found = list(ran)
        ran.clear()
        return found

    assert start("a", fails=True) == [False, False]
    assert start("a") == [False, False]
    assert len(forked) == 2
    assert start("a") == [True]
    assert CudaKernels._compiled_ahead  # a further engine must not fork beside the first one's context
    assert len(forked) == 2
    assert start("b", first=False) == [False, False]
    assert len(forked) == 2
    assert start("") == start("") == [False, False]
    chip[0] = "NVIDIA H100 80GB HBM3"
    assert start("a") == [False, False]
    assert start("a") == [True]
    for note in tmp_path.glob("frame-start-*"):
        note.unlink()
    assert start("a") == [False, False]


def test_no_kernel_is_looked_for_where_all_are_compiled_by_then(worker, monkeypatch, tmp_path):
    """Steps load them from Triton's cache, as in a start that is as an earlier one; such a start comes next."""
    ran, forks = [], []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(absent, "CompilingAhead", lambda *_: forks.pop())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: H200.name)
    monkeypatch.setattr(CudaPlatform, "settle_products", lambda _: None)

    def start(key, *processes):
        monkeypatch.setattr(CudaKernels, "_compiled_ahead", False)
        platform = copy(worker.platform)
        platform.setup = replace(platform.setup, steps_key=key)
        forks[:], ran[:] = processes, ()
        kernels = CudaKernels(platform)
        kernels.compile_ahead(lambda _: None)
        kernels.prepare(lambda *, brief=False: ran.append(brief))
        return list(ran)

    assert start("failed", At(end=True, succeeds=False)) == [False, False]
    assert start("at it", At()) == [False, False]
    assert start("done", At(end=True)) == [True]
    assert start("done") == [True], "which needs no process"
