"""What deterministic requests cost: the same batch with none, one in 64 and all of them deterministic.

    python benchmarks/deterministic.py [--model llama-8b] [--requests 512] [--json FILE]     # a model of offline_gpu.py

One engine; the three kinds take turns, and the median of `--rounds` is kept. The goal is at most 10 % for all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from offline_gpu import MODELS

from frame import LLM, SamplingParams

KINDS = {"none": 0, "1 in 64": 64, "all": 1}


def batch_seconds(llm: LLM, vocabulary: int, every: int, options: argparse.Namespace, seed: int) -> tuple[float, int]:
    """(seconds, tokens out) of one batch of which every `every`-th request is deterministic."""
    draw = random.Random(seed)
    low, high = options.prompt // 2, options.prompt * 3 // 2
    prompts = [
        {"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(draw.randint(low, high))]}
        for _ in range(options.requests)
    ]
    params = [
        SamplingParams(
            temperature=0.6,
            max_tokens=draw.randint(options.length // 2, options.length * 3 // 2),
            ignore_eos=True,
            detokenize=False,
            deterministic=bool(every) and number % every == 0,
        )
        for number in range(options.requests)
    ]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, sum(len(output.outputs[0].token_ids) for output in outputs)


def start(options: argparse.Namespace, folder: str) -> tuple[LLM, int]:
    """An engine without prefix cache, and ids that its prompts may draw."""
    if options.model == "demo":
        return LLM(enable_prefix_caching=False), 1000
    config = MODELS[options.model][0]
    (Path(folder) / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096, "load_format": "dummy"}
    if options.hopper_products:
        settings["plugin"] = {"cuda": {"hopper_products": options.hopper_products}}
    llm = LLM(folder, skip_tokenizer_init=True, enable_prefix_caching=False, **settings)
    return llm, config["vocab_size"] - 1000


def main() -> None:
    """Prints rates and their ratio to a batch without deterministic requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b", help=f"demo, {', '.join(MODELS)}")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512, help="Tokens of a prompt on average.")
    parser.add_argument("--length", type=int, default=256, help="Tokens of an output on average.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hopper-products", help="The option of that name of the CUDA platform.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        llm, vocabulary = start(options, folder)
        for every in KINDS.values():  # meets the batch sizes of both numerics, which are then captured
            batch_seconds(llm, vocabulary, every, options, 0)
            while llm.llm_engine.core.has_idle_work():
                llm.llm_engine.step()
        for round_ in range(options.rounds):
            for kind, every in KINDS.items():
                seconds, tokens = batch_seconds(llm, vocabulary, every, options, round_ + 1)
                rates[kind].append(tokens / seconds)
                print(f"{kind}: {tokens / seconds:.0f} tokens/s", flush=True)
    found = {kind: statistics.median(values) for kind, values in rates.items()}
    for kind, rate in found.items():
        print(f"{options.model}, {kind} deterministic: {rate:.0f} tokens/s, cost {1 - rate / found['none']:.1%}")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
