"""A model as it is and with other weights, another KV cache or adapters: the same runs one after the other, and ratios.

    python benchmarks/variants_gpu.py --json FILE                          # each with the runs that have a target
    python benchmarks/variants_gpu.py --variants none,int8 --runs 0,1,2,4
    python benchmarks/variants_gpu.py --shape tiny --platform cpu --runs 0 --variants none,int8,adapters

Weights are random, and nothing is downloaded. `adapters` are eight of rank 16 on every linear layer, which the requests
take in turn, `shared-adapters` the same with `shared_products`, and `wrapped` is the class of transformers with our
attention. Ratios are of seconds, those of `none` over a variant's own, so that more is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from offline_gpu import LLAMA, MODELS, Run, timed
from safetensors.torch import save_file

from frame import LLM, SamplingParams
from frame.offline.lora import LoRARequest

NUM_ADAPTERS, RANK = 8, 16
ADAPTERS = {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": RANK}
#: Arguments of `LLM` by variant.
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    **{name: {"quantization": name} for name in ("fp8", "int8", "int4")},
    "fp8-kv": {"kv_cache_dtype": "fp8"},
    "wrapped": {"model_impl": "transformers"},
    "adapters": {**ADAPTERS, "plugin": {"lora": {"shared_products": False}}},
    "shared-adapters": ADAPTERS,
}
#: Numbers of the runs of each variant, unless others are asked for.
RUNS = {
    "none": "0,1,2,4,5", "fp8": "0,1,2,4", "int8": "0,1,2,4", "int4": "0,1", "fp8-kv": "5", "adapters": "1",
    "shared-adapters": "1", "wrapped": "0,1",
}  # fmt: skip
TINY: dict[str, Any] = {
    **LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "bos_token_id": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {**MODELS, "tiny": (TINY, 256, [Run(4, (8, 16), (8, 8))])}


def write_adapter(config: dict[str, Any], folder: Path, seed: int) -> None:
    """Random matrices of rank `RANK` for every linear layer of a Llama, as PEFT stores them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    sizes = {
        "self_attn.q_proj": (hidden, query), "self_attn.k_proj": (hidden, key), "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            where = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                tensors[f"{where}.{part}.weight"] = torch.randn(shape, generator=draw).bfloat16() * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [name[-6:] for name in sizes]}
    (folder / "adapter_config.json").write_text(json.dumps(about))


@contextmanager
def started(shape: str, variant: str, extra: dict[str, Any]) -> Iterator[Any]:
    """An engine, which gives its requests the adapters of its variant in turn."""
    config, longest, _ = SHAPES[shape]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        settings = {"dtype": "bfloat16", "seed": 0, "max_model_len": longest, **VARIANTS[variant], **extra}
        llm = LLM(model=name, load_format="dummy", skip_tokenizer_init=True, **settings)
        adapters = []
        for number in range(1, NUM_ADAPTERS + 1) if variant.endswith("adapters") else ():
            write_adapter(config, folder / f"adapter-{number}", number)
            adapters.append(LoRARequest(f"adapter-{number}", number, str(folder / f"adapter-{number}")))
            llm.llm_engine.add_lora(adapters[-1])
        try:
            yield InTurn(llm, adapters)
        finally:
            llm.close()
            del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class InTurn:
    """An `LLM` whose prompts take the adapters, which may be none, in turn."""

    def __init__(self, llm: LLM, adapters: list[LoRARequest]) -> None:
        self._llm, self._adapters = weakref.proxy(llm), adapters

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> Any:
        """As `LLM.generate`."""
        given = (
            [self._adapters[place % len(self._adapters)] for place in range(len(prompts))] if self._adapters else None
        )
        return self._llm.generate(prompts, params, use_tqdm=use_tqdm, lora_request=given)


def main() -> None:
    """Reads the arguments, and prints a line for each run of each variant."""
    parser = argparse.ArgumentParser(description="A model with other weights, KV cache or adapters beside itself.")
    parser.add_argument("--shape", default="llama-8b", choices=["llama-8b", "tiny"])
    parser.add_argument("--variants", default=",".join(VARIANTS), help="Comma-separated: " + ", ".join(VARIANTS))
    parser.add_argument("--runs", default="", help="Comma-separated numbers of the shape's runs; else those of RUNS.")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--json", type=Path, help="Where the figures are written.")
    options = parser.parse_args()
    config, _, runs = SHAPES[options.shape]
    plain, found = dict[str, float](), list[dict[str, Any]]()
    for variant in options.variants.split(","):
        if variant not in VARIANTS:
            parser.error(f"no variant {variant!r}; there are: {', '.join(VARIANTS)}")
        with started(options.shape, variant, {"platform": options.platform}) as llm:
            timed(llm, SamplingParams, config["vocab_size"], Run(4, (8, 8), (4, 4)), 0)
            for run in (runs[int(number)] for number in (options.runs or RUNS[variant]).split(",")):
                seconds, tokens_in, tokens_out = min(
                    timed(llm, SamplingParams, config["vocab_size"], run, seed) for seed in (1, 2)
                )
                if variant == "none":
                    plain[str(run)] = seconds
                ratio = plain[str(run)] / seconds if str(run) in plain else None
                told = "" if ratio is None else f", {ratio:.2f} of none"
                rates = f"{tokens_in / seconds:.0f} in/s {tokens_out / seconds:.0f} out/s"
                print(f"{variant} {run}: {seconds:.3f} s, {rates}{told}", flush=True)
                found.append({"variant": variant, "run": str(run), "seconds": seconds, "ratio": ratio})
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
