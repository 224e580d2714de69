"""Adapters of models whose layers are put together, cut, transposed or quantised; and adapters that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame import API_VERSION, LLM, LoRARequest, Provider, SamplingParams
from frame.core.front.prompts import InvalidRequest
from frame.core.plugin_host.offers import Offer
from frame.core.plugin_host.registry import Registry
from frame.testing.checkpoints import make_checkpoint

from .cases import SMALL, make_adapter, merged_tokens

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = [5, 6, 7, 8, 9]
COUNT = 12


def generate(llm: LLM, adapter: Path | None, name: str = "a", number: int = 1) -> list[int]:
    given = None if adapter is None else LoRARequest(name, number, str(adapter))
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, lora_request=given, use_tqdm=False)
    return list(output.outputs[0].token_ids)


FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "phi3": (2, {}),  # queries, keys and values in one tensor, gate and up in another
    "gpt2": (2, {"fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt-neox": (2, {}),  # queries, keys and values by head
    "qwen2": (1, {}),  # biases
}


@pytest.mark.some(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    ranks, settings = FAMILIES[family]
    base = make_checkpoint(tmp_path / "base", family)
    adapter = make_adapter(base, tmp_path / "adapter", seed=1, **settings)
    with LLM(str(base), **SMALL, tensor_parallel_size=ranks) as llm:
        found = [generate(llm, one) for one in (None, adapter)]
    wanted = [merged_tokens(base, one, [PROMPT], COUNT)[0] for one in (None, adapter)]
    assert found == wanted
    assert wanted[0] != wanted[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def good(base: Path) -> Path:
    return make_adapter(base, base.parent / "good", seed=1)


@pytest.fixture(scope="module")
def llm(base: Path) -> Iterator[LLM]:
    with LLM(str(base), **SMALL) as llm:
        yield llm


def configured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def stored(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    return rewrite


_LAYER = "base_model.model.model.layers.0"
_DOWN = f"{_LAYER}.mlp.down_proj.lora_A.weight"
_HEAD = "base_model.model.lm_head"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "a pickle": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "adapter_model.bin is a pickle, which is not read",
    ),
    "torn": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\0" * 20),
        "adapter_model.safetensors cannot be read",
    ),
    "no json": (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
    "a list": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "must hold a JSON object"),
    "another kind": (configured(peft_type="IA3"), "peft_type must be LORA, got 'IA3'"),
    "dora": (configured(use_dora=True), "use_dora asks for a magnitude for each output"),
    "bias": (configured(bias="all"), "bias 'all': adapters with biases are not served"),
    "lora bias": (configured(lora_bias=True), "lora_bias asks for biases"),
    "saved modules": (configured(modules_to_save=["lm_head"]), "modules_to_save asks for whole layers"),
    "tokens": (configured(trainable_token_indices=[1]), "trainable_token_indices asks for other embeddings"),
    "alora": (configured(alora_invocation_tokens=[1]), "alora_invocation_tokens asks for an adapter that begins"),
    "replicated": (configured(layer_replication=[[0, 1]]), "layer_replication asks for layers"),
    "qalora": (configured(use_qalora=True), "use_qalora asks for inputs that are pooled"),
    "pissa": (configured(init_lora_weights="pissa_niter_4"), "init_lora_weights 'pissa_niter_4' changed the weights"),
    "rank": (configured(r=0), "r must be a whole number from 1, got 0"),
    "alpha": (configured(lora_alpha="x"), "lora_alpha must be a number, got 'x'"),
    "huge alpha": (configured(lora_alpha=10**400), "lora_alpha must be a number, got 1000"),
    "a scale beyond float32": (
        stored(lambda tensors: tensors[_DOWN.replace("lora_A", "lora_B")].fill_(3e38)),
        "the adapter of model.layers.0.mlp.down_proj has values or a scale that",
    ),
    "pattern": (configured(rank_pattern={"(": 4}), "is no regular expression"),
    "slow pattern": (configured(rank_pattern={"(a+)+b": 4}), "repeats more than can be matched in bounded time"),
    "long pattern": (configured(alpha_pattern={"a" * 201: 4}), "repeats more than can be matched in bounded time"),
    "another rank": (configured(r=4), "have the shapes [8, "),
    "high rank": (configured(r=64), "has rank 64, and the most is 16 (max_lora_rank)"),
    "shape": (stored(lambda tensors: tensors.update({_DOWN: torch.zeros(8, 3)})), "have the shapes [8, 3] and"),
    "integers": (
        stored(lambda tensors: tensors.update({_DOWN: torch.zeros(8, 64, dtype=torch.int32)})),
        "is I32, which is none of F64, F32, F16, BF16",
    ),
    "not finite": (
        stored(lambda tensors: tensors[_DOWN].fill_(float("nan"))),
        "the matrices of model.layers.0.mlp.down_proj hold values that are not finite",
    ),
    "half": (stored(lambda tensors: tensors.pop(_DOWN)), "has lora_B, and not the other matrix"),
    "nothing": (stored(lambda tensors: tensors.clear()), "holds no adapter"),
    "unknown": (
        stored(lambda tensors: tensors.update({f"{_LAYER}.mlp.other.lora_A.weight": torch.zeros(8, 3)})),
        "the model has no linear layer model.layers.0.mlp.other that takes an adapter; those that do end in down_proj",
    ),
    "a head": (
        stored(lambda tensors: tensors.update({f"{_HEAD}.lora_A.weight": torch.zeros(8, 3)})),
        "it has an adapter of lm_head, but the head takes no adapter",
    ),
    "a router": (
        stored(lambda tensors: tensors.update({f"{_LAYER}.mlp.gate.lora_A.weight": torch.zeros(8, 3)})),
        "but routers take no adapters",
    ),
    "experts": (
        stored(lambda tensors: tensors.update({f"{_LAYER}.mlp.experts.0.up_proj.lora_A.weight": torch.zeros(8, 3)})),
        "the model has no linear layer model.layers.0.mlp.experts.0.up_proj that takes an adapter",
    ),
    "embedding": (
        stored(
            lambda tensors: tensors.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(1)})
        ),
        "is an adapter of an embedding, which is not served",
    ),
    "magnitudes": (
        stored(lambda tensors: tensors.update({f"{_LAYER}.x.lora_magnitude_vector": torch.zeros(1)})),
        "is a magnitude for each output (DoRA), which is not served",
    ),
    "a whole layer": (
        stored(lambda tensors: tensors.update({f"{_HEAD}.weight": torch.zeros(1)})),
        "is no matrix of an adapter, which is not served",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_adapters_that_do_not_fit_are_refused_in_one_sentence(
    wrong: str, llm: LLM, good: Path, tmp_path: Path, base: Path
) -> None:
    change, message = WRONG[wrong]
    folder = tmp_path / "bad"
    folder.mkdir()
    for file in good.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    with pytest.raises(InvalidRequest) as caught:
        generate(llm, folder, wrong, 100 + list(WRONG).index(wrong))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_others_are_served_after_all_of_them(llm: LLM, good: Path, base: Path) -> None:
    assert generate(llm, good, "good", 99) == merged_tokens(base, good, [PROMPT], COUNT)[0]


def test_an_adapter_of_another_model_is_served_with_a_warning(
    llm: LLM, good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    for file in good.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    configured(base_model_name_or_path="someone/another")(folder)
    assert generate(llm, folder, "foreign", 98) == generate(llm, good, "good", 99)
    assert "was made for the model 'someone/another'" in caplog.text


def test_latent_attention_takes_adapters_but_for_what_it_absorbs(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "deepseek-v3")
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    with LLM(str(base), **SMALL) as llm:
        adapter = make_adapter(base, tmp_path / "good", seed=1, target_modules=names)
        assert generate(llm, adapter) == merged_tokens(base, adapter, [PROMPT], COUNT)[0]
        wrong = make_adapter(base, tmp_path / "bad", seed=1, target_modules=["kv_b_proj"])
        with pytest.raises(InvalidRequest, match="what makes keys and values of latents takes no adapter"):
            generate(llm, wrong, "b", 2)


def test_quantised_models_take_adapters(
    base: Path, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry.load()
    provider = Provider("rounded", "tests.contract.quantizations:Rounded", api=f"=={API_VERSION}")
    registry.offers.append(Offer("quantization", provider, "tests", ""))
    monkeypatch.setattr(Registry, "load", lambda *arguments, **options: registry)
    with LLM(str(base), **SMALL, quantization="rounded") as llm:
        found = [generate(llm, adapter) for adapter in (None, good)]
    rounded = tmp_path / "rounded"
    shutil.copytree(base, rounded)
    weights = load_file(base / "model.safetensors")
    for name, weight in weights.items():
        if "_proj" in name and weight.dim() == 2:
            largest = weight.abs().amax(1, keepdim=True).clamp_min(1e-12)
            weights[name] = torch.round(weight * (127 / largest)) * (largest / 127)
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    wanted = [merged_tokens(rounded, adapter, [PROMPT], COUNT)[0] for adapter in (None, good)]
    assert found == wanted
    assert found[0] != found[1]


def test_pooling_models_take_none(base: Path) -> None:
    with pytest.raises(ValueError, match="a pooling model serves no adapters"):
        LLM(str(base), **SMALL, runner="pooling")
