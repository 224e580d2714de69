"""Adapters of routed experts, in both forms in which PEFT has written them, against its merged weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame import LLM, LoRARequest, SamplingParams
from frame.core.front.prompts import InvalidRequest
from frame.interfaces import AdapterSetup, ExpertMethod, ExpertSpec
from frame.layers import PlainExperts
from frame.ops import Ops
from frame.plugins.adapters.experts import AdaptedExperts
from frame.plugins.adapters.joined import JoinedExperts, experts_named
from frame.plugins.adapters.lora import LoraAdapters
from frame.plugins.adapters.peft import WEIGHTS, Taken, read_adapter
from frame.plugins.adapters.peft_config import CONFIG, PeftConfig
from frame.testing.checkpoints import make_checkpoint

from .cases import SMALL, make_adapter, merged_tokens
from .test_models import COUNT, PROMPT, configured, generate

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

JOINED: dict[str, Any] = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "rank_pattern": {"experts.down_proj": 3},
    "alpha_pattern": {"experts.gate_up_proj": 5},
    "use_rslora": True,
}


def batch(llm: LLM, adapters: Sequence[Path | None]) -> list[list[int]]:
    """The tokens of one batch, in which each request has one of the adapters."""
    given = [None if one is None else LoRARequest(one.name, 1 + place, str(one)) for place, one in enumerate(adapters)]
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": PROMPT} for _ in adapters]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, lora_request=given, use_tqdm=False)]


def logits(llm: LLM, adapter: Path, number: int) -> torch.Tensor:
    """The log-probabilities of the prompt's tokens but for the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    request = LoRARequest(adapter.name, number, str(adapter))
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, lora_request=request, use_tqdm=False)
    found = zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([entry[token].logprob for token, entry in found])


def merged_logits(base: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    with torch.inference_mode():
        found = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


TWO = {"tensor_parallel_size": 2}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", TWO),  # the checkpoint has other names for the experts than transformers
        pytest.param("qwen3-moe", TWO | {"enable_expert_parallel": True}, marks=pytest.mark.matrix),
        ("gpt-oss", {}),  # gate and up take turns, inputs before outputs, biases, another gating
        pytest.param("llama4", {}, marks=pytest.mark.matrix),  # weights multiply inputs
        pytest.param("gemma4-moe", TWO, marks=pytest.mark.matrix),  # a dense part beside the experts
    ],
)
def test_one_batch_has_experts_with_several_adapters_and_with_none(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    adapters: list[Path | None] = [
        None,
        make_adapter(base, tmp_path / "one", seed=1, **JOINED),
        make_adapter(base, tmp_path / "two", seed=2, **JOINED | {"target_parameters": ["experts.down_proj"]}),
    ]
    with LLM(str(base), **SMALL, max_loras=2, **settings) as llm:
        found = batch(llm, adapters)
        assert isinstance(adapters[1], Path)
        torch.testing.assert_close(logits(llm, adapters[1], 2), merged_logits(base, adapters[1]), atol=2e-4, rtol=1e-4)
    wanted = [merged_tokens(base, one, [PROMPT], COUNT)[0] for one in adapters]
    assert found == wanted
    assert len({tuple(one) for one in wanted}) == len(wanted)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts") / "base", "qwen3-moe")


@pytest.fixture(scope="module")
def joined(base: Path) -> Path:
    return make_adapter(base, base.parent / "joined", seed=3, **JOINED)


def test_each_expert_may_have_an_adapter_of_its_own(base: Path, tmp_path: Path) -> None:
    """As PEFT wrote them while experts were modules; merged here, since it cannot make them any more."""
    experts, scale = [0, 3, 7], 2.0
    weights, tensors = load_file(base / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(5)
    for name in list(weights):
        part = name.removesuffix(".weight")
        if ".experts." not in name or int(part.split(".")[-2]) not in experts:
            continue
        outputs, inputs = weights[name].shape
        a, b = (0.3 * torch.randn(*shape, generator=generator) for shape in ((4, inputs), (outputs, 4)))
        tensors |= {f"base_model.model.{part}.lora_{kind}.weight": one for kind, one in (("A", a), ("B", b))}
        weights[name] += scale * b @ a
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    shutil.copytree(base, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(base), **SMALL) as llm:
        found = [generate(llm, one) for one in (None, adapter)]
    wanted = [merged_tokens(one, None, [PROMPT], COUNT)[0] for one in (base, merged)]
    assert found == wanted
    assert wanted[0] != wanted[1]


def exchanged(adapter: Path, folder: Path, num_experts: int) -> Path:
    """As PEFT before 0.20 wrote it: A has the outputs, and B the inputs."""
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in [name for name in tensors if "experts" in name and "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        a, b = tensors[name], tensors[other]
        tensors[name] = b.unflatten(1, (-1, num_experts)).permute(2, 1, 0).flatten(0, 1).contiguous()
        tensors[other] = a.unflatten(0, (num_experts, -1)).permute(2, 1, 0).flatten(1).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    configured(peft_version="0.18.1")(folder)
    return folder


def test_adapters_of_earlier_versions_and_quantised_experts(base: Path, joined: Path, tmp_path: Path) -> None:
    before = exchanged(joined, tmp_path / "before", 8)
    with LLM(str(base), **SMALL, quantization="int8") as llm:
        found = [generate(llm, one, one.name, place + 1) for place, one in enumerate((joined, before))]
        plain = generate(llm, None)
    rounded = tmp_path / "rounded"
    shutil.copytree(base, rounded)
    weights = load_file(base / "model.safetensors")
    for name, weight in weights.items():
        if "_proj" in name:
            largest = weight.abs().amax(1, keepdim=True).clamp_min(1e-12)
            weights[name] = torch.round(weight * (127 / largest)) * (largest / 127)
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    assert found == [merged_tokens(rounded, joined, [PROMPT], COUNT)[0]] * 2
    assert plain != found[0]


def test_experts_that_take_no_adapters_say_why(base: Path, joined: Path, tmp_path: Path) -> None:
    with LLM(str(base), **SMALL, plugin={"lora": {"experts": False}}) as llm:
        with pytest.raises(InvalidRequest, match=r"experts take none here: --plugin\.lora\.experts is false"):
            generate(llm, joined)
        dense = make_adapter(base, tmp_path / "dense", seed=1, target_modules=["q_proj", "o_proj"])
        assert generate(llm, dense, "dense", 2) == merged_tokens(base, dense, [PROMPT], COUNT)[0]


def test_wrong_shapes_and_ranks_are_named(base: Path, joined: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(joined, folder)
    configured(r=4)(folder)
    with LLM(str(base), **SMALL | {"max_lora_rank": 4}) as llm:
        for adapter, number, message in (
            (folder, 1, "8 experts take [32, 64] and [96, 32] (gate_up_proj) or [24, 48] and [64, 24] (down_proj)"),
            (joined, 2, "has rank 8, and the most is 4 (max_lora_rank)"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                generate(llm, adapter, adapter.name, number)
            assert message in str(caught.value)


def test_parameters_that_could_be_either_are_told_by_the_version() -> None:
    experts = JoinedExperts("model.layers.0.mlp.experts", ExpertSpec(4, 64, 32, 2))
    config = {"rank": 8, "alpha": 8.0, "rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "base_model": None}
    new, old = PeftConfig(**config, version=(0, 21)), PeftConfig(**config, version=(0, 19))
    name, shapes = "model.layers.0.mlp.experts", ([32, 64], [64, 32])  # gate and up together have as many rows as down
    assert experts.parameter_of(name, shapes, new) == ("gate_up_proj", False)
    assert experts.parameter_of(name, ([32, 32], [64, 32]), old) == ("down_proj", False)
    with pytest.raises(ValueError, match="save the adapter with PEFT"):
        experts.parameter_of(name, shapes, old)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"experts": ([32], [64, 32])}, r"have the shapes \[32\] and \[64, 32\]; 4 experts take"),
        (
            {"experts": ([32, 64], [64, 32]), "experts.1.up_proj": ([8, 64], [32, 8])},
            r"has several adapters of model\.layers\.0\.mlp\.experts\.1\.up_proj",
        ),
    ],
)
def test_files_that_no_peft_writes_are_refused_in_a_sentence(
    tmp_path: Path, tensors: dict[str, tuple[list[int], list[int]]], message: str
) -> None:
    prefix = "model.layers.0.mlp.experts"
    experts = JoinedExperts(prefix, ExpertSpec(4, 64, 32, 2))
    taken = Taken({f"{prefix}.1.up_proj": (64, 32)}, 8, experts={prefix: experts})
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "peft_version": "0.21"}
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    made = {
        f"base_model.model.model.layers.0.mlp.{module}.lora_{kind}.weight": torch.ones(shape)
        for module, shapes in tensors.items()
        for kind, shape in zip("AB", shapes, strict=True)
    }
    save_file(made, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path, taken)


def test_experts_that_do_not_fit_say_what_they_take(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def full(*shape: Any, **options: Any) -> torch.Tensor:
        if isinstance(shape[0], tuple) and len(shape[0]) == 4:
            raise torch.OutOfMemoryError
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(
        ValueError, match=r"adapters of routed experts do not fit cpu: max_loras 512 of .* 84 MiB in each"
    ):
        LLM(str(base), **SMALL, max_loras=512)


@pytest.mark.parametrize(
    ("prefix", "module", "found"),
    [
        ("model.layers.1.mlp.experts", "model.layers.1.mlp.experts", True),
        ("model.layers.1.block_sparse_moe.experts", "model.layers.1.mlp.experts", True),
        ("model.layers.1.block_sparse_moe", "model.layers.1.block_sparse_moe.experts", True),
        ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts", False),
        ("model.layers.1.mlp.experts", "model.layers.1.mlp.experts.0.up_proj", False),
    ],
)
def test_experts_have_other_names_in_transformers(prefix: str, module: str, found: bool) -> None:
    layers = {prefix: JoinedExperts(prefix, ExpertSpec(4, 64, 32, 2))}
    assert experts_named(module, layers) is (layers[prefix] if found else None)


@pytest.mark.parametrize(
    ("facts", "why"),
    [({"local": False}, "spread over data ranks"), ({"balanced": True}, "balanced between ranks"), ({}, "Silent does")],
)
def test_experts_that_move_or_say_no_weights_take_none(facts: dict[str, bool], why: str) -> None:
    class Silent(PlainExperts):
        matrices = ExpertMethod.matrices

        def create(self, layer: Any) -> None:
            """Nothing is needed here."""

    setup = AdapterSetup(
        max_adapters=1, max_rank=2, max_num_tokens=8, device=torch.device("cpu"), dtype=torch.float32, ops=Ops()
    )
    owner = LoraAdapters(setup)
    method = owner.experts("layer", ExpertSpec(4, 64, 32, 2), Silent())
    method.create(SimpleNamespace(**{"local": True, "balanced": False} | facts))
    assert isinstance(method, AdaptedExperts)
    assert why in method.refused
    assert owner.expert_bytes == 0
