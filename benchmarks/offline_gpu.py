"""Offline throughput of an engine with vLLM's `LLM` on model shapes with random weights; nothing is downloaded.

    python benchmarks/offline_gpu.py --engine frame --models qwen3-0.6b,llama-8b,qwen3-30b-a3b
    python benchmarks/offline_gpu.py --engine vllm …        # the peer, in the same lease of the same machine

Token ids in, token ids out, every token asked for is produced. Each run is timed twice and the better one is kept.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import random
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000,
    "eos_token_id": 128001, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 151643,
    "eos_token_id": 151645, "attention_bias": False,
}  # fmt: skip
QWEN_MOE: dict[str, Any] = {
    **QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_14B: dict[str, Any] = {
    **QWEN, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    "tie_word_embeddings": False,
}  # fmt: skip
#: wants two devices: --extra '{"tensor_parallel_size": 2}'
LLAMA_70B: dict[str, Any] = {
    **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
#: gpt-oss-20b: its experts are stored as mxfp4, all else as bfloat16
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "vocab_size": 201088, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 150000, "attention_bias": True, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
    "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 200002,
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 100000,
    "eos_token_id": 100001,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64,
    "state_size": 128, "head_dim": 64, "num_heads": 80, "expand": 2, "n_groups": 1, "conv_kernel": 4, "chunk_size": 256,
    "vocab_size": 50288, "layer_norm_epsilon": 1e-5, "residual_in_fp32": True, "rms_norm": True, "use_bias": False,
    "use_conv_bias": True, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """`requests` prompts of `tokens_in` (low, high) ids, behind `shared` ids of all, continued by `tokens_out`."""

    requests: int
    tokens_in: tuple[int, int]
    tokens_out: tuple[int, int]
    shared: int = 0

    def __str__(self) -> str:
        prefix = f"{self.shared} + " if self.shared else ""
        return f"{self.requests} × ({prefix}{_span(self.tokens_in)} → {_span(self.tokens_out)})"


def _span(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}" if bounds[0] == bounds[1] else f"{bounds[0]}–{bounds[1]}"


LLAMA_MIXED = Run(512, (256, 768), (128, 384))
SHORT = [Run(1, (32, 32), (256, 256)), Run(64, (512, 512), (256, 256)), LLAMA_MIXED]
RAGGED = Run(256, (100, 1024), (100, 1024))
STATES = Run(256, (128, 128), (512, 512))
SHARED = Run(64, (64, 64), (128, 128), shared=16384)
LONG = [Run(8, (512, 512), (256, 256)), Run(32, (8192, 8192), (1, 1)), Run(64, (8000, 8000), (128, 128)), SHARED]
#: name → (configuration, longest sequence, runs)
MODELS: dict[str, tuple[dict[str, Any], int, list[Run]]] = {
    "qwen3-0.6b": (
        QWEN,
        4096,
        [Run(1, (32, 32), (512, 512)), Run(256, (128, 128), (512, 512)), RAGGED],
    ),
    "llama-8b": (LLAMA, 20480, SHORT + LONG),
    "qwen3-14b": (QWEN_14B, 4096, [RAGGED]),
    "qwen3-30b-a3b": (QWEN_MOE, 16384, SHORT),
    "gpt-oss-20b": (GPT_OSS, 16384, SHORT),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 16384, SHORT),
    "mamba2-2.7b": (MAMBA2, 2048, [STATES]),
    "llama-70b": (LLAMA_70B, 8192, [*SHORT[:2], Run(256, (256, 768), (128, 384))]),
}


def drawn(vocabulary: int, run: Run, seed: int) -> tuple[list[list[int]], list[int]]:
    """The ids of each prompt, and how many tokens follow each."""
    draw = random.Random(seed)
    prefix = [draw.randrange(100, vocabulary - 1000) for _ in range(run.shared)]
    prompts = [
        prefix + [draw.randrange(100, vocabulary - 1000) for _ in range(draw.randint(*run.tokens_in))]
        for _ in range(run.requests)
    ]
    return prompts, [draw.randint(*run.tokens_out) for _ in prompts]


def timed(llm: Any, params: Any, vocabulary: int, run: Run, seed: int) -> tuple[float, int, int]:
    """(seconds, tokens in, tokens out) of one batch."""
    ids, lengths = drawn(vocabulary, run, seed)
    prompts = [{"prompt_token_ids": prompt} for prompt in ids]
    temperature = 0.0 if run.requests < 8 else 0.6
    wanted = [params(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    start = time.perf_counter()
    outputs = llm.generate(prompts, wanted, use_tqdm=False)
    seconds = time.perf_counter() - start
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != sum(lengths):
        raise RuntimeError(f"{made} tokens came back, {sum(lengths)} were asked for")
    return seconds, sum(len(prompt["prompt_token_ids"]) for prompt in prompts), made


def measure(engine: Any, name: str, chosen: set[int], extra: dict[str, Any]) -> list[dict[str, Any]]:
    """Starts the model and runs its runs, those whose numbers are `chosen` or all; prints and returns a line each."""
    config, max_model_len, runs = MODELS[name]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        settings = {"dtype": "bfloat16", "seed": 0, "gpu_memory_utilization": 0.9, "max_model_len": max_model_len}
        llm = engine.LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, **{**settings, **extra})
    results.append({"model": name, "run": "start", "seconds": time.perf_counter() - start})
    print(f"{name} start {results[0]['seconds']:.1f} s", flush=True)
    timed(llm, engine.SamplingParams, config["vocab_size"], Run(4, (64, 64), (16, 16)), 0)
    for run in (run for number, run in enumerate(runs) if not chosen or number in chosen):
        best = min(timed(llm, engine.SamplingParams, config["vocab_size"], run, seed) for seed in (1, 2))
        seconds, tokens_in, tokens_out = best
        rates = f"{tokens_in / seconds:.0f} in/s {tokens_out / seconds:.0f} out/s"
        print(f"{name} {run}: {seconds:.3f} s, {rates}", flush=True)
        figures = {"seconds": seconds, "tokens_in": tokens_in, "tokens_out": tokens_out}
        results.append({"model": name, "run": str(run), **figures})
    del llm
    gc.collect()
    return results


def device_name() -> str:
    """The GPU that the figures are of."""
    import torch

    return torch.cuda.get_device_name()


def main() -> None:
    """Reads the arguments and measures each model."""
    parser = argparse.ArgumentParser(description="Offline throughput on a GPU, random weights.")
    parser.add_argument("--engine", default="frame", help="Importable module with LLM and SamplingParams.")
    parser.add_argument("--models", default=",".join(list(MODELS)[:4]), help="Comma-separated: " + ", ".join(MODELS))
    parser.add_argument("--runs", default="", help="Comma-separated numbers of each model's runs; all by default.")
    parser.add_argument("--extra", default="{}", type=json.loads, help="JSON of more arguments of LLM.")
    parser.add_argument("--json", type=Path, help="Where results are written, for benchmarks/table.py.")
    parser.add_argument("--verbose", action="store_true", help="Log what frame's starts do, with seconds, to stderr.")
    arguments = parser.parse_args()
    if arguments.verbose:
        logging.basicConfig(format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("frame").setLevel(logging.DEBUG)
        arguments.extra["log_level"] = "debug"
    engine = importlib.import_module(arguments.engine)
    chosen = {int(number) for number in arguments.runs.split(",") if number}
    results: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        if name not in MODELS:
            parser.error(f"no model {name!r}; there are: {', '.join(MODELS)}")
        results += measure(engine, name, chosen, arguments.extra)
        if arguments.json:
            versions = {package: version(package) for package in ("torch", "triton")}
            about = {"engine": arguments.engine, "engine_version": engine.__version__, **versions}
            about |= {"device": device_name(), "date": f"{date.today()}"}
            arguments.json.write_text(json.dumps({**about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
