"""Seconds to the first token of one long prompt, and memory, by the number of devices that divide its tokens.

    python benchmarks/long_prompt.py --ranks 1,2 --tokens 131072,1000000 --json $OUT/long.json     # two GPUs
    python benchmarks/long_prompt.py --shape tiny --platform cpu --tokens 256 --chunk 64           # the same, anywhere

The shape is that of a Llama with 1.2 billion weights, which are random. `--tokens-out` above 1 tells seconds a token
behind such a prompt as well. Nothing is downloaded.
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

from frame import LLM, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": {
        **offline_gpu.LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **offline_gpu.LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip


def started(shape: str, ranks: int, longest: int, chunk: int, extra: dict[str, Any]) -> LLM:
    """An engine whose requests may have `longest` tokens, of which a step computes `chunk`."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**SHAPES[shape], "max_position_embeddings": longest}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=longest, max_num_batched_tokens=chunk, max_num_seqs=4, enable_prefix_caching=False,
            prefill_context_parallel_size=ranks, **extra,
        )  # fmt: skip


def measure(llm: LLM, vocabulary: int, tokens: int, tokens_out: int) -> dict[str, Any]:
    """Seconds of a prompt of `tokens` with its first token, and of each token behind it."""
    draw = random.Random(tokens)
    prompt = {"prompt_token_ids": [draw.randrange(100, vocabulary - 100) for _ in range(tokens)]}

    def seconds(count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        if (made := len(output.outputs[0].token_ids)) != count:
            raise RuntimeError(f"{made} tokens came back, {count} were asked for")
        return time.perf_counter() - start

    first = seconds(1)
    figures: dict[str, Any] = {"tokens": tokens, "first_token_seconds": first}
    if tokens_out > 1:
        figures["seconds_per_token"] = (seconds(tokens_out) - first) / (tokens_out - 1)
    return figures


def main() -> None:
    """Reads the arguments and measures each number of ranks."""
    parser = argparse.ArgumentParser(description="One long prompt, divided over devices.")
    parser.add_argument("--shape", default="llama-1b", choices=SHAPES)
    parser.add_argument("--ranks", default="1,2", help="Comma-separated values of prefill_context_parallel_size.")
    parser.add_argument("--tokens", default="131072,1000000", help="Comma-separated lengths of prompts.")
    parser.add_argument("--chunk", type=int, default=16384, help="Tokens that a step computes.")
    parser.add_argument("--tokens-out", type=int, default=1, help="Above 1: each prompt is run once more, with these.")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--extra", default="{}", type=json.loads, help="JSON of more arguments of LLM.")
    parser.add_argument("--json", type=Path, help="Where results are written.")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.tokens.split(",")]
    extra = {"platform": arguments.platform, **arguments.extra}
    vocabulary, results = SHAPES[arguments.shape]["vocab_size"], list[dict[str, Any]]()
    for ranks in map(int, arguments.ranks.split(",")):
        llm = started(arguments.shape, ranks, max(lengths) + arguments.tokens_out, arguments.chunk, extra)
        info = llm.llm_engine.core.info
        room = info.num_blocks * info.block_size
        measure(llm, vocabulary, arguments.chunk, 1)  # kernels have met a chunk
        for length in lengths:
            found = {"ranks": ranks, "kv_tokens": room, **measure(llm, vocabulary, length, arguments.tokens_out)}
            print(json.dumps(found), flush=True)
            results.append(found)
        llm.llm_engine.core.close()
        del llm
        gc.collect()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
