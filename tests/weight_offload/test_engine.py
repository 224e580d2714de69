"""Engines that keep weights in host memory give the tokens of those that do not, on a fake device beside the host."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from frame import LLM, LoRARequest, SamplingParams
from frame.core.config.flat import from_flat
from frame.core.layers.methods import PlainLinear
from frame.core.plugin_host.registry import Registry
from frame.plugins.platforms.cpu import HostStreams
from frame.testing.checkpoints import make_checkpoint
from frame.testing.encoder_decoders import make_encoder_decoder
from frame.testing.engines import SMALL, greedy, pooled, prompts, running
from frame.testing.pooling_checkpoints import make_pooling_checkpoint
from frame.testing.thread_executor import with_threads
from frame.weight_offload.kept import layer_bytes, own_parameters, parts_of
from frame.weight_offload.null import moves_weights
from tests.adapters.cases import make_adapter
from tests.plugins.quantization.stored import compressed, write_pair
from tests.weight_offload.two_places import make_two_places

GIVEN = prompts(512, (30, 3, 17, 1))
OFFLOADED = {"cpu_offload_gb": 1}


@pytest.fixture(autouse=True)
def two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    make_two_places(monkeypatch)


@contextmanager
def engine_of(folder: Path, **settings: Any):
    ranks = {name: settings[name] for name in settings if name.endswith("parallel_size")}
    threads = {"executor": "threads"} if ranks else {}
    config = from_flat({**SMALL, "model": str(folder), "max_num_batched_tokens": 32, **threads, **settings})
    with running(config, with_threads(Registry.load())) as engine:
        yield engine


def on_workers(engine: Any, look: Callable[[Any], Any]) -> list[Any]:
    return engine.executor.call("run", {"function": look})


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    with engine_of(folder, **settings) as engine:
        assert all(on_workers(engine, lambda worker: moves_weights(worker.model) == ("cpu_offload_gb" in settings)))
        return greedy(engine, GIVEN)


def quantised(kind: str, folder: Path) -> Path:
    config, quantize = {
        "ordered": lambda: compressed(
            "pack-quantized", None, num_bits=4, type="int", strategy="group", group_size=16, actorder="group"
        ),
        "fp8": lambda: compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            num_bits=8,
            type="float",
            strategy="tensor",
        ),
    }[kind]()
    return write_pair(folder, "llama", config, quantize, num_hidden_layers=4)[0]


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}, {}),
        ("qwen3-moe", {}, {}),
        ("llama", {}, {"quantization": "int4"}),
        ("llama", {}, {"tensor_parallel_size": 2}),
        pytest.param("qwen3-moe", {}, {"pipeline_parallel_size": 2, "cpu_offload_ahead": 1}, marks=pytest.mark.matrix),
        pytest.param("deepseek-v3", {}, {"quantization": "int8"}, marks=pytest.mark.matrix),
        pytest.param(
            "llama",
            {},
            {"load_format": "dummy", "deterministic": True, "cpu_offload_gb": 6e-4},
            marks=pytest.mark.matrix,
        ),
    ],
    ids=str,
)
def test_tokens_are_those_of_weights_on_the_device(
    family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=6, **changes)
    plain = {name: value for name, value in settings.items() if not name.startswith("cpu_offload")}
    assert tokens(tmp_path, **{**OFFLOADED, **settings}) == tokens(tmp_path, **plain)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family", ["gemma3n", "gemma4-shared", "gemma4-moe", "gpt-oss", "jamba", "llama4", "mamba2", "qwen3-next"]
)
def test_layers_of_other_kinds(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, **OFFLOADED, cpu_offload_ahead=1) == tokens(tmp_path)


@pytest.mark.matrix
def test_drafts_that_are_checked(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=5)
    drafted = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
    assert tokens(tmp_path, **OFFLOADED, **drafted) == tokens(tmp_path)


@pytest.mark.matrix
def test_embeddings_of_an_encoder(tmp_path: Path) -> None:
    make_pooling_checkpoint(tmp_path, "bert", num_hidden_layers=5)

    def rows(**settings: Any) -> list[Any]:
        with engine_of(
            tmp_path, **{"num_gpu_blocks_override": None, "max_num_batched_tokens": 128, **settings}
        ) as engine:
            assert on_workers(engine, lambda worker: moves_weights(worker.model)) == [bool(settings)]
            return pooled(engine, GIVEN)

    assert all((one == other).all() for one, other in zip(rows(**OFFLOADED), rows(), strict=True))


@pytest.mark.parametrize("kind", ["ordered", pytest.param("fp8", marks=pytest.mark.matrix)])
def test_layers_that_are_repacked_when_they_have_arrived(kind: str, tmp_path: Path) -> None:
    folder = quantised(kind, tmp_path)
    assert tokens(folder, **OFFLOADED, cpu_offload_ahead=2) == tokens(folder)


def test_the_device_holds_what_is_not_kept_and_the_ring(tmp_path: Path) -> None:
    """Two of three layers stay on the device, of nine layers; three are kept, and the ring has two places."""
    make_checkpoint(tmp_path, "llama", num_hidden_layers=9)

    def held(worker: Any) -> tuple[int, int]:
        """(bytes of the parameters, bytes of the memory in which they and the buffers lie)"""
        parameters = list(worker.model.parameters())
        storages = [one.untyped_storage() for one in (*parameters, *worker.model.buffers())]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(one.nbytes for one in parameters), sum(sizes.values())

    def weights_of(layer: Any) -> tuple[int, int]:
        """Without the norms; and each rounded up."""
        own = [one for part in parts_of(layer) for one in own_parameters(part)]
        return sum(one.nbytes for one in own), layer_bytes(layer)

    def ring(worker: Any) -> tuple[int, list[str]]:
        kept = [name for name, layer in worker.model.layers.named_children() if layer._forward_pre_hooks]
        return worker.model.weight_ring.num_bytes, kept

    with engine_of(tmp_path) as engine:
        whole = on_workers(engine, held)[0][1]
        layer, place = on_workers(engine, lambda worker: weights_of(worker.model.layers[0]))[0]
    with engine_of(tmp_path, cpu_offload_gb=3.01 * place / (1 << 30), cpu_offload_ahead=1) as engine:
        assert on_workers(engine, ring) == [(2 * place, ["2", "5", "8"])]
        parameters, device = on_workers(engine, held)[0]
    assert device == whole - 3 * layer + 2 * place < parameters


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own
def test_adapters_lie_on_the_device(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = make_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=5)
    folders = [make_adapter(base, tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    kinds = [None, *(LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1))]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def told(**settings: Any) -> list[list[int]]:
        llm = LLM(
            model=str(base), max_model_len=64, num_gpu_blocks_override=40, skip_tokenizer_init=True, num_threads=1,
            enable_lora=True, max_lora_rank=8, max_loras=1, **settings,
        )  # fmt: skip
        given = [{"prompt_token_ids": GIVEN[0]}]
        found = [llm.generate(given, params, use_tqdm=False, lora_request=kind) for kind in [*kinds, *kinds]]
        llm.close()
        return [list(one.outputs[0].token_ids) for (one,) in found]

    with_offload = told(**OFFLOADED)
    assert with_offload == told()
    assert len({tuple(one) for one in with_offload}) == 3


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_sleep(level: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=5)
    with engine_of(tmp_path, **OFFLOADED) as engine:
        before = greedy(engine, GIVEN)
        engine.call("sleep", {"keep": ["weights"] if level == 1 else []})
        engine.call("wake_up", {"tags": ["weights", "kv_cache"]})
        assert greedy(engine, GIVEN) == before


def test_other_weights_take_the_place_of_those_that_are_kept(tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / str(seed), "llama", num_hidden_layers=5, seed=seed) for seed in (0, 1)]
    wanted = [tokens(folder) for folder in folders]
    with engine_of(folders[0], **OFFLOADED) as engine:
        assert greedy(engine, GIVEN) == wanted[0]
        engine.call("update_weights", {"model": str(folders[1])})
        assert greedy(engine, GIVEN) == wanted[1]


@pytest.mark.parametrize("number", [1, 4, pytest.param(9, marks=pytest.mark.matrix)])
def test_weights_that_cannot_be_read_leave_the_old_ones(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new weights end in the middle of a layer."""
    folders = [make_checkpoint(tmp_path / str(seed), "llama", num_hidden_layers=5, seed=seed) for seed in (0, 1)]
    fill, calls = HostStreams.fill, count()

    def failing(self: HostStreams, pieces: Any) -> None:
        given = list(pieces)
        if next(calls) == number:
            fill(self, given[:1])
            raise OSError("a file that ends")
        fill(self, given)

    with engine_of(folders[0], **OFFLOADED) as engine:
        wanted = greedy(engine, GIVEN)
        monkeypatch.setattr(HostStreams, "fill", failing)
        with pytest.raises(RuntimeError, match="the old weights serve on: a file that ends"):
            engine.call("update_weights", {"model": str(folders[1])})
        assert greedy(engine, GIVEN) == wanted


def test_tensors_that_come_one_by_one_in_any_order(tmp_path: Path) -> None:
    """As a trainer sends them, through `Model.load`: parts of layers that share a place on the device, by turns."""
    from safetensors.torch import load_file

    folders = [make_checkpoint(tmp_path / str(seed), "llama", num_hidden_layers=5, seed=seed) for seed in (0, 1)]
    sent = list(load_file(folders[1] / "model.safetensors").items())
    sent.sort(key=lambda pair: hash(pair[0][::-1]) % 1009)
    wanted = tokens(folders[1])

    def load(worker: Any) -> None:
        worker.model.load(sent[:20])
        worker.model.load(sent[20:])
        worker.model.finish_load()

    with engine_of(folders[0], **OFFLOADED) as engine:
        on_workers(engine, load)
        assert greedy(engine, GIVEN) == wanted


def test_a_step_that_fails_leaves_the_next_ones_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=6)
    multiply, calls = PlainLinear.apply, iter(range(10**9))

    def failing(self: PlainLinear, *arguments: Any) -> Any:
        if next(calls) == 45:
            raise RuntimeError("a product that fails")
        return multiply(self, *arguments)

    wanted = tokens(tmp_path)
    with engine_of(tmp_path, **OFFLOADED) as engine:
        monkeypatch.setattr(PlainLinear, "apply", failing)
        assert greedy(engine, GIVEN) == wanted
        assert next(calls) > 46


@pytest.mark.parametrize(
    ("family", "changes", "settings", "said"),
    [
        (
            "llama",
            {},
            {"cpu_offload_gb": 1e-5},
            r"keeps 0 of 4 layers .* nothing would be saved; give at least 0.000.* GiB, lower",
        ),
        ("llama", {"num_hidden_layers": 2}, {}, "keeps 2 of 2 layers .* saved; lower cpu_offload_ahead, or leave"),
        ("zamba2", {}, {}, "layers of this model share weights"),
        (
            "qwen3-moe",
            {},
            {"enable_eplb": True, "tensor_parallel_size": 2, "enable_expert_parallel": True},
            "enable_eplb",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_a_sentence(
    family: str, changes: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, **{**({"num_hidden_layers": 4} if family == "llama" else {}), **changes})
    with pytest.raises(ValueError, match=said) as caught, engine_of(tmp_path, **{**OFFLOADED, **settings}):
        pass
    assert "\n" not in str(caught.value)


def test_more_than_the_host_has_is_refused_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=5)
    monkeypatch.setattr("frame.weight_offload.offload.host_memory", lambda: (1 << 40, 300_000))
    said = "cpu_offload_gb: 0.0 GiB of weights are to be kept in host memory, of which 0.0 GiB are available"
    with pytest.raises(ValueError, match=said), engine_of(tmp_path, **OFFLOADED):
        pass


def test_weights_as_they_are_held_are_neither_stored_nor_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=5)
    said = "cpu_offload_gb keeps some in host memory"
    with engine_of(tmp_path / "model") as engine:
        engine.executor.call("save_sharded_state", {"path": str(tmp_path / "state")})
    with engine_of(tmp_path / "model", **OFFLOADED) as engine, pytest.raises(ValueError, match=said):
        engine.executor.call("save_sharded_state", {"path": str(tmp_path / "again")})
    with (
        pytest.raises(ValueError, match=said),
        engine_of(tmp_path / "state", load_format="sharded_state", **OFFLOADED),
    ):
        pass


def test_it_has_no_effect_where_weights_lie_in_host_memory_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    make_checkpoint(tmp_path, "llama")
    with caplog.at_level(logging.INFO, "frame.worker"), engine_of(tmp_path, **OFFLOADED) as engine:
        assert on_workers(engine, lambda worker: moves_weights(worker.model)) == [False]
    (line,) = [line for line in caplog.messages if "cpu_offload_gb" in line]
    assert re.fullmatch(r"cpu_offload_gb has no effect on platform '\S*cpu': its weights stay where they are", line)


def test_an_encoder_beside_a_decoder_is_refused(tmp_path: Path) -> None:
    make_encoder_decoder(tmp_path, "t5")
    said = "cpu_offload_gb: this model has an encoder beside its decoder"
    with pytest.raises(ValueError, match=said), engine_of(tmp_path, **OFFLOADED):
        pass
