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
import random
import tempfile
import time
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Run:
    """`requests` prompts of `tokens_in` (low, high) ids, each continued by `tokens_out` (low, high)."""

    requests: int
    tokens_in: tuple[int, int]
    tokens_out: tuple[int, int]


SHORT = [Run(1, (32, 32), (256, 256)), Run(64, (512, 512), (256, 256)), Run(512, (256, 768), (128, 384))]
LONG = [Run(8, (512, 512), (256, 256)), Run(32, (8192, 8192), (1, 1)), Run(64, (8000, 8000), (128, 128))]
#: name → (configuration, longest sequence, runs)
MODELS: dict[str, tuple[dict[str, Any], int, list[Run]]] = {
    "qwen3-0.6b": (
        QWEN,
        4096,
        [Run(1, (32, 32), (512, 512)), Run(256, (128, 128), (512, 512)), Run(256, (100, 1024), (100, 1024))],
    ),
    "llama-8b": (LLAMA, 16384, SHORT + LONG),
    "qwen3-30b-a3b": (QWEN_MOE, 16384, SHORT),
}


def drawn(vocabulary: int, run: Run, seed: int) -> tuple[list[list[int]], list[int]]:
    """The ids of each prompt, and how many tokens follow each."""
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(100, vocabulary - 1000) for _ in range(draw.randint(*run.tokens_in))]
        for _ in range(run.requests)
    ]
    return prompts, [draw.randint(*run.tokens_out) for _ in prompts]


def timed(llm: Any, params: Any, vocabulary: int, run: Run, seed: int) -> tuple[float, int, int]:
    """(seconds, tokens in, tokens out) of one batch."""
    ids, lengths = drawn(vocabulary, run, seed)
    prompts = [{"prompt_token_ids": prompt} for prompt in ids]
    heat = 0.0 if run.requests < 8 else 0.6
    wanted = [params(temperature=heat, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    start = time.perf_counter()
    outputs = llm.generate(prompts, wanted, use_tqdm=False)
    seconds = time.perf_counter() - start
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != sum(lengths):
        raise RuntimeError(f"{made} tokens came back, {sum(lengths)} were asked for")
    return seconds, sum(len(prompt["prompt_token_ids"]) for prompt in prompts), made


def measure(engine: Any, name: str) -> None:
    """Starts the model, runs its runs, prints a line for each."""
    config, max_model_len, runs = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        llm = engine.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            gpu_memory_utilization=0.9,
            max_model_len=max_model_len,
        )
    print(f"{name} start {time.perf_counter() - start:.1f} s", flush=True)
    timed(llm, engine.SamplingParams, config["vocab_size"], Run(4, (64, 64), (16, 16)), 0)
    for run in runs:
        best = min(timed(llm, engine.SamplingParams, config["vocab_size"], run, seed) for seed in (1, 2))
        seconds, tokens_in, tokens_out = best
        shape = f"{run.requests} × ({run.tokens_in[0]}–{run.tokens_in[1]} → {run.tokens_out[0]}–{run.tokens_out[1]})"
        rates = f"{tokens_in / seconds:.0f} in/s {tokens_out / seconds:.0f} out/s"
        print(f"{name} {shape}: {seconds:.3f} s, {rates}", flush=True)
    del llm
    gc.collect()


def main() -> None:
    """Reads the arguments and measures each model."""
    parser = argparse.ArgumentParser(description="Offline throughput on a GPU, random weights.")
    parser.add_argument("--engine", default="frame", help="Importable module with LLM and SamplingParams.")
    parser.add_argument("--models", default=",".join(MODELS), help="Comma-separated: " + ", ".join(MODELS))
    arguments = parser.parse_args()
    engine = importlib.import_module(arguments.engine)
    for name in arguments.models.split(","):
        if name not in MODELS:
            parser.error(f"no model {name!r}; there are: {', '.join(MODELS)}")
        measure(engine, name)


if __name__ == "__main__":
    main()
