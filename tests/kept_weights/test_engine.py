"""An engine finds the weights of the one before it: the same tokens, and none of the checkpoint's weights is read."""

from __future__ import annotations

import logging

import pytest
import torch

from frame.core.interfaces.model import Model
from frame.core.plugin_host.registry import Registry
from frame.kept_weights import holder, placing
from frame.kept_weights.checksum import checksum
from frame.kept_weights.keeper import WeightKeeper
from frame.plugins.platforms.cpu import HostMemory
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import greedy, prompts, running
from tests.gguf.files import write_gguf
from tests.gguf.test_models import FOURS, MOE
from tests.kept_weights.engines import CHANGES, FOUND, KEEPS, LEFT, LOADED, damage, engine_of, served

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def small(monkeypatch, caplog):
    """Tensors of tiny models count as large."""
    for module in (placing, holder):
        monkeypatch.setattr(module, "LARGE_BYTES", 256)
    caplog.set_level(logging.INFO, "frame.worker")


@pytest.fixture
def keeper():
    made = WeightKeeper()
    yield made
    made.close()


CASES = {
    "plain": ("qwen3", {}, {}),
    "packed": ("llama-tied", {"hidden_size": 512, "intermediate_size": 1024}, {}),
    "bfloat16": ("qwen3", {"hidden_size": 256}, {"dtype": "bfloat16"}),
    "int8": ("qwen3", {}, {"quantization": "int8"}),
    "fp8": ("qwen3", {}, {"quantization": "fp8"}),
    "int4": ("qwen3", {}, {"quantization": "int4"}),
    "experts": ("qwen3-moe", {}, {}),
    "experts int4": ("qwen3-moe", {}, {"quantization": "int4"}),
    "mla": ("deepseek-v2-lite", {}, {}),
    "mla int8": ("deepseek-v2-lite", {}, {"quantization": "int8"}),
    "states": ("falcon-h1", {}, {}),
    "two ranks": ("qwen3", {}, {"tensor_parallel_size": 2}),
}
SOME = ("packed", "experts int4")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SOME else pytest.mark.matrix) for case in CASES]
)
def test_tokens_stay_the_same_and_nothing_is_read(case, tmp_path, keeper, caplog):
    family, overrides, settings = CASES[case]
    folder = make_checkpoint(tmp_path / "model", family, **overrides)
    want = served(folder, keeper, **settings)
    kept = keeper.num_bytes
    assert kept > 0, caplog.text
    damage(folder)
    for time in (1, 2):
        assert served(folder, keeper, **settings) == want
        if "tensor_parallel_size" not in settings:
            assert caplog.text.count(FOUND) == time, caplog.text
    assert keeper.num_bytes == kept
    assert LEFT not in caplog.text


@pytest.mark.parametrize(
    "kind", ["gptq 4", *(pytest.param(f"gptq {bits} ordered", marks=pytest.mark.matrix) for bits in (4, 8))]
)
def test_stored_codes(kind, tmp_path, keeper, caplog, monkeypatch):
    from tests.plugins.quantization.grouped import gptq
    from tests.plugins.quantization.stored import write_pair

    for module in (placing, holder):
        monkeypatch.setattr(module, "LARGE_BYTES", 2048)  # larger than an order of columns
    bits = 8 if "8" in kind else 4
    config, quantize = gptq(bits, 32, ordered="ordered" in kind)
    folder, _ = write_pair(tmp_path, "qwen3", config, quantize)
    want = served(folder, keeper)
    damage(folder)
    assert served(folder, keeper) == want
    assert caplog.text.count(FOUND) == 1, caplog.text


@pytest.mark.matrix
def test_codes_of_gguf_files(tmp_path, keeper, caplog):
    plain = make_checkpoint(tmp_path / "plain", "qwen3-moe", **MOE)
    file = write_gguf(plain, tmp_path / "m.gguf", FOURS)
    settings = {"download_dir": str(tmp_path / "cache")}
    want = served(file, keeper, **settings)
    assert served(file, keeper, **settings) == want
    assert caplog.text.count(FOUND) == 1, caplog.text
    assert caplog.text.count(LOADED) == 1


def test_other_files_or_settings_are_loaded(tmp_path, keeper, caplog):
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    want = served(folder, keeper)
    (file,) = folder.glob("*.safetensors")
    file.touch()
    assert served(folder, keeper) == want
    assert (FOUND in caplog.text, caplog.text.count(LOADED)) == (False, 2)
    served(folder, keeper, dtype="bfloat16")
    assert (FOUND in caplog.text, caplog.text.count(LOADED)) == (False, 3)
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=1)
    assert served(other, keeper) != want
    assert (FOUND in caplog.text, caplog.text.count(LOADED)) == (False, 4)
    assert caplog.text.count("loaded anew: they are of other files or settings") == 3


@pytest.mark.parametrize("wide", [{}, {"hidden_size": 512, "intermediate_size": 1024}], ids=["plain", "packed"])
def test_the_next_engine_finds_weights_that_were_updated(wide, tmp_path, keeper, caplog):
    folder = make_checkpoint(tmp_path / "model", "qwen3", **wide)
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=1, **wide)
    with engine_of(folder, keeper) as engine:
        engine.call("pause")
        engine.call("update_weights", {"model": str(other)})
        engine.call("resume")
        want = greedy(engine, prompts(512), 8)
        again = engine.executor.call("run", {"function": lambda worker: worker.config})[0]
        assert again.model.model == str(other)
    damage(other)
    with running(again, Registry.load()) as engine:
        assert greedy(engine, prompts(512), 8) == want
    assert (caplog.text.count(FOUND), caplog.text.count(LOADED)) == (1, 1)
    assert served(folder, keeper) != want
    assert (caplog.text.count(FOUND), caplog.text.count(LOADED)) == (1, 2)


def test_an_update_that_fails_leaves_nothing_to_find(tmp_path, keeper, caplog, monkeypatch):
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=1)

    def broken(model, *rest):
        next(model.parameters()).data.zero_()
        raise OSError("the disk is gone")

    with engine_of(folder, keeper) as engine:
        want = greedy(engine, prompts(512), 8)
        engine.call("pause")
        monkeypatch.setattr("frame.core.worker.worker.load_weights", broken)
        with pytest.raises(Exception, match="the disk is gone"):
            engine.call("update_weights", {"model": str(other)})
        monkeypatch.undo()
    assert served(folder, keeper) == want
    assert (FOUND in caplog.text, caplog.text.count(LOADED)) == (False, 2)


def test_a_sleep_gives_weights_back(tmp_path, keeper, caplog):
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    with engine_of(folder, keeper) as engine:
        want = greedy(engine, prompts(512), 8)
        engine.call("sleep", {"keep": ["weights"]})
        assert keeper.num_bytes
        engine.call("wake_up")
        engine.call("sleep", {"keep": []})
        assert not keeper.num_bytes
        assert CHANGES in caplog.text
        engine.call("wake_up")
        assert greedy(engine, prompts(512), 8) == want
    assert not keeper.num_bytes
    assert served(folder, keeper) == want
    assert FOUND not in caplog.text


@pytest.mark.parametrize("wide", [{}, {"hidden_size": 512, "intermediate_size": 1024}], ids=["plain", "packed"])
def test_a_sleep_that_is_refused_drops_no_weights(wide, tmp_path, keeper, caplog, monkeypatch):
    """As on a platform that cannot free its memory. What is packed is packed afterwards, too."""
    folder = make_checkpoint(tmp_path / "model", "qwen3", **wide)

    def num_packed(worker):
        return sum(tensor.is_mkldnn for tensor in worker.model.parameters())

    def refuse(memory, keep):
        raise NotImplementedError("sleep is not available on this platform")

    with engine_of(folder, keeper) as engine:
        want = greedy(engine, prompts(512), 8)
        (packed,) = engine.executor.call("run", {"function": num_packed})
        assert bool(packed) == bool(wide)
        kept = keeper.num_bytes
        with monkeypatch.context() as refusing:
            refusing.setattr(HostMemory, "sleep", refuse)
            with pytest.raises(Exception, match="sleep is not available on this platform"):
                engine.call("sleep", {"keep": []})
        assert keeper.num_bytes == kept
        assert engine.executor.call("run", {"function": num_packed}) == [packed]
        assert greedy(engine, prompts(512), 8) == want
    damage(folder)
    assert served(folder, keeper) == want
    assert (caplog.text.count(FOUND), caplog.text.count(LOADED)) == (1, 1)
    assert CHANGES not in caplog.text


def test_weights_are_hidden_before_their_memory_may_be_freed(tmp_path, keeper, monkeypatch):
    """An engine that ends in the middle of a sleep leaves nothing to find."""
    folder, asked = make_checkpoint(tmp_path / "model", "qwen3"), []
    sleep = HostMemory.sleep

    def asleep(memory, keep):
        asked.append([held.key for held in keeper._held.values()])
        sleep(memory, keep)

    monkeypatch.setattr(HostMemory, "sleep", asleep)
    with engine_of(folder, keeper) as engine:
        engine.call("sleep", {"keep": []})
        assert asked == [[""]]
        engine.call("wake_up")


def test_weights_that_somebody_wrote_to_are_found_out(tmp_path, keeper, caplog):
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    with engine_of(folder, keeper) as engine:
        want = greedy(engine, prompts(512), 8)

        def write(worker):
            tensor = next(one for one in worker.model.parameters() if one.numel() > 1000)
            tensor.data.view(-1)[17] += 1

        engine.executor.call("run", {"function": write})
    assert served(folder, keeper) == want
    assert "are loaded anew: they have changed since" in caplog.text
    assert FOUND not in caplog.text
    assert caplog.text.count(KEEPS) == 2
    damage(folder)
    assert served(folder, keeper) == want
    assert FOUND in caplog.text


def test_small_weights_that_change_whenever_they_are_finished_are_found_out(tmp_path, keeper, caplog, monkeypatch):
    finish = Model.finish_load

    def doubling(model):
        for name, parameter in model.named_parameters():
            if parameter.nbytes < 256:
                assert name.endswith("norm.weight"), name
                parameter.data.mul_(2)
        finish(model)

    monkeypatch.setattr(Model, "finish_load", doubling)
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    want = served(folder, keeper)
    assert served(folder, keeper) == want
    assert "are loaded anew: its layers change weights whenever they are finished" in caplog.text
    assert FOUND not in caplog.text
    assert not keeper.num_bytes


@pytest.mark.parametrize("distance", [8, 512, 65536, 80000])
def test_a_checksum_finds_what_was_moved(distance):
    part = torch.arange(1 << 16, dtype=torch.int64).view(torch.uint8)
    moved = part.clone()
    moved[:8], moved[distance : distance + 8] = part[distance : distance + 8], part[:8]
    assert checksum([part]) == checksum([part.clone()])
    assert checksum([part]) != checksum([moved])


def test_what_cannot_be_kept_is_loaded_with_a_reason(tmp_path, keeper, caplog):
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    want = served(folder, keeper)
    settings = {"cpu_offload_gb": 1}
    assert served(folder, keeper, **settings) == want
    assert "the server keeps no weights: cpu_offload_gb keeps some in the engine's own memory" in caplog.text
    assert not keeper.num_bytes


def test_without_a_keeper_weights_are_loaded(tmp_path, keeper, caplog):
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    keeper.close()
    assert served(folder, keeper)
    assert LEFT in caplog.text
    assert LOADED in caplog.text
