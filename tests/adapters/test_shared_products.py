"""The first matrices of adapters behind a layer's weight, multiplied by one product; see `shared_products`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frame import LLM, LoRARequest, SamplingParams
from frame.core.plugin_host.registry import Registry
from frame.interfaces import LinearSpec
from frame.kept_weights.placing import Placing
from frame.layers import Rows
from frame.ops import Ops
from frame.plugins.adapters import shared_product
from frame.plugins.adapters.shared_product import SharedProduct
from frame.plugins.platforms.held_host import HostHeldMemory
from frame.testing.checkpoints import make_checkpoint
from frame.testing.thread_executor import with_threads

from .cases import SMALL, make_adapter, merged_tokens

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = [[5, 6, 7, 8, 9], [3, 1, 4, 1, 5, 9, 2, 6]]
COUNT = 8
SHARED: dict[str, Any] = {**SMALL, "max_loras": 2, "plugin": {"lora": {"shared_products": True}}}


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Layers of any size share; the list says which calls of the op gated halves."""
    calls: list[bool] = []
    real = Ops.add_joined_adapters

    def noted(*given: Any, halves: bool = False) -> torch.Tensor:
        calls.append(halves)
        return real(*given, halves=halves)

    monkeypatch.setattr(shared_product, "MOST", 100)
    monkeypatch.setattr(Ops, "add_joined_adapters", staticmethod(noted))
    return calls


def tokens(llm: LLM, adapters: list[LoRARequest | None], **changes: Any) -> list[list[int]]:
    """Those of all prompts with each adapter, in one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False, **changes)
    pairs = [({"prompt_token_ids": prompt}, adapter) for adapter in adapters for prompt in PROMPTS]
    outputs = llm.generate([one for one, _ in pairs], params, lora_request=[one for _, one in pairs], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(("family", "settings"), [
    ("llama", {}), ("qwen2", {}), ("gpt2", {"fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    ("phi3", {}),
])  # fmt: skip
def test_one_product_gives_what_merged_weights_give(
    family: str, settings: dict[str, Any], tmp_path: Path, gated: list[bool]
) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    folders = [make_adapter(base, tmp_path / str(seed), seed=seed, **settings) for seed in (1, 2)]
    wanted = [one for adapter in (None, *folders) for one in merged_tokens(base, adapter, PROMPTS, COUNT)]
    requests = [LoRARequest(str(number), number, str(folder)) for number, folder in enumerate(folders, 1)]
    with LLM(str(base), **SHARED) as llm:
        assert tokens(llm, [None, *requests]) == wanted
        count = len(gated)
        assert tokens(llm, [None]) == wanted[:2]
        assert len(gated) == count  # of a step without adapters
    assert count > 0
    assert any(gated) == (family != "gpt2")


def test_deterministic_steps_multiply_by_the_weight_alone(tmp_path: Path, gated: list[bool]) -> None:
    base = make_checkpoint(tmp_path / "base", "llama")
    adapter = make_adapter(base, tmp_path / "adapter", seed=1)
    wanted = merged_tokens(base, adapter, PROMPTS, COUNT)
    with LLM(str(base), **SHARED) as llm:
        gated.clear()
        assert tokens(llm, [LoRARequest("a", 1, str(adapter))], deterministic=True) == wanted
    assert gated == []


@pytest.mark.parametrize("changes", [
    {"quantization": "fp8"}, {"cpu_offload_gb": 0.001}, {"plugin": {}},
], ids=str)  # fmt: skip
def test_other_weights_are_multiplied_alone(changes: dict[str, Any], tmp_path: Path, gated: list[bool]) -> None:
    base = make_checkpoint(tmp_path / "base", "llama")
    request = LoRARequest("a", 1, str(make_adapter(base, tmp_path / "adapter", seed=1)))
    with LLM(str(base), **{**SHARED, **changes}) as llm:
        assert tokens(llm, [request]) != tokens(llm, [None])
    assert gated == []


@pytest.mark.parametrize("divided", [False, True])
def test_ranks_share_products(
    divided: bool, tmp_path: Path, gated: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for layers whose ranks divide the rows of A, of which each product is gathered."""
    base = make_checkpoint(tmp_path / "base", "llama")
    adapter = make_adapter(base, tmp_path / "adapter", seed=1)

    def shared(worker: Any) -> set[str]:
        layers = [module for module in worker.model.modules() if hasattr(module, "adapter_down")]
        places = {layer.spec.prefix: (layer.weight, layer.adapter_down) for layer in layers}
        return {
            name.rpartition(".")[2]
            for name, pair in places.items()
            if len({tensor.untyped_storage().data_ptr() for tensor in pair}) == 1
        }

    load = Registry.load
    monkeypatch.setattr(Registry, "load", lambda: with_threads(load()))
    with LLM(str(base), **SHARED, executor="threads", tensor_parallel_size=2, fully_sharded_loras=divided) as llm:
        names = llm.llm_engine.core.executor.call("run", {"function": shared})
        found = tokens(llm, [LoRARequest("a", 1, str(adapter)), None])
    by_inputs = {"o_proj", "down_proj"}
    assert names[0] == names[1]
    assert names[0] >= by_inputs
    assert (names[0] == by_inputs) == divided
    assert found == [one for given in (adapter, None) for one in merged_tokens(base, given, PROMPTS, COUNT)]
    assert any(gated) != divided


def test_memory_that_outlived_a_process_has_no_rows_of_adapters() -> None:
    """Kept weights are recognised by all bytes of the memory that they lie in, and kept before adapters are loaded."""
    spec = LinearSpec((Rows("layer", 1024, 0, 1024),), slice(0, 512), 512, False, False, False)
    empty = partial(torch.empty, dtype=torch.float32, device=torch.device("cpu"))

    def layer(memory: HostHeldMemory) -> tuple[Any, SharedProduct]:
        made = SimpleNamespace(spec=spec, empty=lambda *shape: torch.nn.Parameter(empty(*shape), requires_grad=False))
        with Placing(memory, torch.device("cpu")):
            return made, SharedProduct(made, 48)

    memory = HostHeldMemory()
    first, shared = layer(memory)
    first.weight.data.fill_(2)
    shared.down.fill_(3)
    second, shared = layer(HostHeldMemory(memory.pieces()))
    assert second.weight.data_ptr() == shared.whole.data_ptr() != first.weight.data_ptr()
    assert torch.equal(second.weight, first.weight)
    assert not shared.down.any()


def test_layers_with_few_outputs_beside_the_rows_of_all_slots_are_multiplied_alone(
    tmp_path: Path, gated: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_product, "MOST", 1 / 8)
    base = make_checkpoint(tmp_path / "base", "llama")
    adapter = make_adapter(base, tmp_path / "adapter", seed=1)
    with LLM(str(base), **SHARED) as llm:
        assert tokens(llm, [LoRARequest("a", 1, str(adapter))]) == merged_tokens(base, adapter, PROMPTS, COUNT)
    assert gated == []
