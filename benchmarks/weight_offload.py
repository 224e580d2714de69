"""GB/s at which weights in host memory reach the device while an engine decodes, against the link to the host alone.

    python benchmarks/weight_offload.py --json $OUT/offload.json                                # a GPU of 24 GB or more
    python benchmarks/weight_offload.py --model llama-70b --gib 80 --ahead 1 --no-baseline      # larger than an H100
    python benchmarks/weight_offload.py --shape tiny --platform cpu --gib 0.01 --steps 4        # the script, anywhere

The link is measured in the same process: copies from pinned memory in pieces of the engine's, one after another, best
of three. Weights are random, nothing is downloaded. A row tells the milliseconds of a decode step of one request, the
bytes that are copied in it over that time, and what share of the link that is; then the same of a prompt. The goal is a
share of 0.85 where the copies take longer than the rest. `equal`: the tokens are those of weights on the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import offline_gpu
import torch

from frame import LLM, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    **{name: config for name, (config, _, _) in offline_gpu.MODELS.items()},
    "tiny": {
        **offline_gpu.LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
PIECE_BYTES, PIECES = 256 << 20, 8
PROMPT_TOKENS, DECODE_PROMPT = 4096, 32


def link_gb_per_s(worker: Any) -> float:
    """Of copies from pinned memory alone, best of three; called in the worker."""
    streams, memory, size = worker.platform.streams(), worker.platform.memory(), PIECE_BYTES
    if worker.platform.device_type == "cpu":
        size = 8 << 20
    sources = [memory.pinned(size) for _ in range(2)]
    target = torch.empty(size, dtype=torch.uint8, device=worker.platform.device)
    best = 0.0
    for _ in range(3):
        streams.synchronize()
        start = time.perf_counter()
        for number in range(PIECES):
            target.copy_(sources[number % 2], non_blocking=True)
        streams.synchronize()
        best = max(best, PIECES * size / (time.perf_counter() - start))
    return best / 1e9


def kept_bytes(worker: Any) -> tuple[int, int, int]:
    """(bytes that are copied in a step, layers whose they are, bytes of the device that hold some of them)."""
    ring = getattr(worker.model, "weight_ring", None)
    if ring is None:
        return 0, 0, 0
    return sum(one.num_bytes for one in ring._layers), len(ring._layers), ring.num_bytes


def started(shape: str, platform: str, **settings: Any) -> LLM:
    """An engine of random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        return LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0, platform=platform,
            max_model_len=PROMPT_TOKENS + 512, max_num_batched_tokens=PROMPT_TOKENS, max_num_seqs=8,
            kv_cache_memory_bytes=2 << 30 if shape != "tiny" else 1 << 24, enable_prefix_caching=False, **settings,
        )  # fmt: skip


def generated(llm: LLM, vocabulary: int, length: int, count: int) -> tuple[float, list[int]]:
    """(seconds, tokens) of one request."""
    draw = random.Random(length)
    prompt = {"prompt_token_ids": [draw.randrange(100, vocabulary - 100) for _ in range(length)]}
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    if len(tokens) != count:
        raise RuntimeError(f"{len(tokens)} tokens came back, {count} were asked for")
    return time.perf_counter() - start, tokens


def measure(shape: str, platform: str, steps: int, **settings: Any) -> tuple[dict[str, Any], list[int]]:
    """(figures, tokens) of an engine with these settings."""
    begun = time.perf_counter()
    llm = started(shape, platform, **settings)
    figures: dict[str, Any] = {**settings, "start_seconds": time.perf_counter() - begun}
    try:
        link = llm.collective_rpc(link_gb_per_s)[0]
        kept, layers, held = llm.collective_rpc(kept_bytes)[0]
        vocabulary = SHAPES[shape]["vocab_size"]
        generated(llm, vocabulary, DECODE_PROMPT, 4)  # all is warm
        short, _ = generated(llm, vocabulary, DECODE_PROMPT, 2)
        long, tokens = generated(llm, vocabulary, DECODE_PROMPT, 2 + steps)
        step = (long - short) / steps
        length = PROMPT_TOKENS if shape != "tiny" else 64
        generated(llm, vocabulary, length, 1)
        prompt, _ = generated(llm, vocabulary, length, 1)
    finally:
        llm.llm_engine.core.close()
        del llm
        gc.collect()
    copied = kept / step / 1e9
    figures |= {
        "kept_gib": kept / (1 << 30), "kept_layers": layers, "ring_gib": held / (1 << 30), "link_gb_per_s": link,
        "step_ms": 1e3 * step, "step_gb_per_s": copied, "step_share": copied / link,
        "prompt_tokens": length, "prompt_ms": 1e3 * prompt, "prompt_gb_per_s": kept / prompt / 1e9,
        "prompt_share": kept / prompt / 1e9 / link,
    }  # fmt: skip
    return figures, tokens


def main() -> None:
    """Measures all weights on the device, where they fit, then each number of GiB in host memory."""
    parser = argparse.ArgumentParser(description="Weights in host memory: copies in a step against the link.")
    parser.add_argument("--model", "--shape", dest="shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--gib", default="4,8,12", help="Comma-separated values of cpu_offload_gb.")
    parser.add_argument("--ahead", default="2,1", help="Comma-separated values of cpu_offload_ahead.")
    parser.add_argument("--steps", type=int, default=16, help="Decode steps that are timed.")
    parser.add_argument("--eager", action="store_true", help="Also with enforce_eager.")
    parser.add_argument("--no-baseline", action="store_true", help="For models that do not fit the device.")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--json", type=Path, help="Where results are written.")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = [] if arguments.no_baseline else [{}]
    runs += [
        {"cpu_offload_gb": float(size), "cpu_offload_ahead": int(ahead), "enforce_eager": eager}
        for eager in ((False, True) if arguments.eager else (False,))
        for size in arguments.gib.split(",")
        for ahead in arguments.ahead.split(",")
    ]
    results, wanted = list[dict[str, Any]](), None
    for settings in runs:
        found, tokens = measure(arguments.shape, arguments.platform, arguments.steps, **settings)
        wanted = tokens if wanted is None else wanted
        found["equal"] = tokens == wanted
        print(json.dumps(found), flush=True)
        results.append(found)
        if arguments.json:  # what was measured counts, also if a later run is cut off
            arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
