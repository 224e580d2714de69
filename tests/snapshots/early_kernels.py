"""Which kernels that take long to compile steps of common models launch, found by rehearsing them without a device.

Run `python -m tests.snapshots.early_kernels` (or `make snapshots`) to write the file anew that starts read.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.flat import from_flat
from frame.core.engine.schedule.step_budget import resolve_budget
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.open_device import OpenDevice
from frame.core.worker.start.trial_steps import rehearse
from frame.interfaces import Placement
from frame.plugins.platforms.cuda.compile.absent_cuda import AbsentCuda
from frame.plugins.platforms.cuda.compile.absent_device import absent_cuda
from frame.plugins.platforms.cuda.compile.compiler import hash_of, without_lines
from frame.plugins.platforms.cuda.compile.early_kernels import SPECIALIZATIONS, facts_of
from frame.plugins.platforms.cuda.compile.rehearsal import CompileMode
from frame.testing import make_setup

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10
)
#: One for each rehearsal: Triton does not ask again for a kernel that it has been told a device has.
DEVICES = count(1)
#: Kernels that take about a second or more, and which fact of a model their specialisations follow from.
LONG = {
    "_prefill_attention_kernel": "heads",
    "_paged_attention_kernel": "heads",
    "_decode_attention_kernel": "heads",
    "_filter": "tokens",
    "_top": "tokens",
    "_product": "layers",
}
#: architecture, hidden and intermediate size, query heads, key heads, head size, vocabulary: those the file is for.
LLAMA, QWEN, MIXED = "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
MODELS = {
    "Qwen3 0.6B": (QWEN, 1024, 3072, 16, 8, 128, 151936),
    "Qwen3 8B": (QWEN, 4096, 12288, 32, 8, 128, 151936),
    "Qwen3 14B": (QWEN, 5120, 17408, 40, 8, 128, 151936),
    "Qwen3 30B-A3B": (MIXED, 2048, 6144, 32, 4, 128, 151936),
    "Llama 3.2 1B": (LLAMA, 2048, 8192, 32, 8, 64, 128256),
    "Llama 3.2 3B": (LLAMA, 3072, 8192, 24, 8, 128, 128256),
    "Llama 3.1 8B": (LLAMA, 4096, 14336, 32, 8, 128, 128256),
    "Mistral 7B": ("MistralForCausalLM", 4096, 14336, 32, 8, 128, 32768),
}
_EXPERTS = {
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """The config.json of one of MODELS, of two layers."""
    architecture, hidden, intermediate, heads, key_heads, head_dim, vocab = MODELS[name]
    return {
        "architectures": [architecture],
        "model_type": {MIXED: "qwen3_moe", QWEN: "qwen3", LLAMA: "llama"}.get(architecture, "mistral"),
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head_dim, "vocab_size": vocab,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": False, "sliding_window": None, "torch_dtype": "bfloat16", "eos_token_id": 2,
        **(_EXPERTS if architecture == MIXED else {}),
    }  # fmt: skip


def rehearsed(
    config: Mapping[str, Any], max_model_len: int, **settings: Any
) -> tuple[frozenset[str], dict[str, dict[str, Any]]]:
    """(what entries are chosen by, hash of the key → entry of each long kernel that steps launch)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        flat = {"model": folder, "skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": max_model_len}
        flat |= settings
        given, registry = from_flat(flat), Registry.load()
        checkpoint = read_checkpoint(given)
        given = resolve_budget(given, checkpoint, registry)
    met = dict[str, dict[str, Any]]()

    class Noting(CompileMode):
        def submit(self, key: str, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
            cells = dict(zip(compile_kernel.__code__.co_freevars, compile_kernel.__closure__ or (), strict=True))
            source, options = cells["src"].cell_contents, cells["options"].cell_contents
            if source.name in LONG:
                met[hash_of(key)] = described(source, vars(options))
            return super().submit(key, compile_kernel, finalize)

    device = next(DEVICES)
    with without_lines(), absent_cuda(device, H200), Noting(lambda _: None), torch.inference_mode():
        platform = AbsentCuda(make_setup("platform", config=given, placement=Placement(local_rank=device)))
        opened = OpenDevice(given, registry, Placement(), "", checkpoint, platform, platform.steps(), "bfloat16")
        rehearse(opened, platform)
    return facts_of(given, checkpoint), met


def described(source: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The entry for a kernel as Triton is about to compile it."""
    kernel = source.fn
    usual = vars(kernel.device_caches[driver.active.get_current_device()][3].parse_options({}))
    known = {index: "|" + ("D" if marks else "") for (index,), marks in source.attrs.items()}
    types = enumerate(source.signature.items())
    return {
        "kernel": f"{kernel.fn.__module__}:{kernel.fn.__name__}",
        "arguments": {name: type_ + known.get(index, "") for index, (name, type_) in types if type_ != "constexpr"},
        "constants": {kernel.arg_names[index]: value for (index,), value in source.constants.items()},
        "options": {name: value for name, value in options.items() if value != usual[name]},
    }


def entries() -> list[dict[str, Any]]:
    """Every entry of the file: each names the facts with which every model launched it."""
    runs = [rehearsed(config_of(name), length) for name in MODELS for length in (2048, 16384)]
    found = {key: entry for _, met in runs for key, entry in met.items()}
    for key, entry in found.items():
        kind = LONG[entry["kernel"].partition(":")[2]]
        facts = {fact for run, met in runs if key in met for fact in run if kind in fact}
        always = {fact for fact in facts if all(key in met for run, met in runs if fact in run)}
        entry["for"] = sorted(fact for fact in always if fact.removesuffix(", long") not in always - {fact})
    return [entry for entry in found.values() if entry["for"]]


def main() -> None:
    """Writes the file, an entry a line."""
    lines = ",\n".join(json.dumps(entry) for entry in entries())
    SPECIALIZATIONS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
