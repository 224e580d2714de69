"""What a grammar costs: throughput of batches with and without structured output, everything else equal.

    python benchmarks/structured.py                      # the demo model, on this machine
    python benchmarks/structured.py --shape llama-168m   # random weights and 32,000 made-up tokens, on a CPU
    python benchmarks/structured.py --shape qwen3-0.6b   # random weights and 151,936 made-up tokens, on a GPU

Every request makes the same number of tokens: the free ones because they heed no end, the constrained ones because
their grammar does not end before. Runs of both kinds alternate; ratios are medians of pairs, with the lowest and the
highest. CPU seconds, which other programs stretch less, are those of the whole process and those of the engine's thread
alone, beside which masks are filled: with a processor to spare, the thread's tell what throughput will be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import string
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frame import LLM, SamplingParams, StructuredOutputsParams

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "pattern": r"^[a-z]{2,12}@[a-z]{2,12}\.org$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "age", "email", "tags", "kind"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, StructuredOutputsParams] = {
    "JSON schema": StructuredOutputsParams(json={"type": "array", "items": RECORD, "minItems": 10_000}),
    "regular expression": StructuredOutputsParams(regex=r"([A-Z][a-z]{1,9}( [a-z]{1,9}){2,8}\. ){100,}"),
}


def words() -> Iterator[str]:
    """Made-up tokens: every short run of letters, as words begin and go on, and numbers."""
    yield from map(str, range(1000))
    for length in (2, 3, 4):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            text = "".join(letters)
            yield from (text, "Ġ" + text, text.capitalize(), "Ġ" + text.capitalize())


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer of `size` tokens, the last of which ends an output."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(itertools.chain(alphabet, words()))
    vocabulary = {token: index for index, token in enumerate(itertools.islice(tokens, size - 1))}
    vocabulary["<end>"] = size - 1
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def start(shape: str | None, folder: Path, **settings: Any) -> LLM:
    """The demo model, or a shape of benchmarks/offline_cpu.py or offline_gpu.py with random weights."""
    if shape is None:
        return LLM(enable_prefix_caching=False, **settings)
    if shape == "llama-168m":
        from offline_cpu import RANDOM_MODEL

        config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **RANDOM_MODEL}
        settings |= {"dtype": "float32", "max_model_len": 1024}
    else:
        from offline_gpu import MODELS

        config = MODELS[shape][0]
        settings |= {"dtype": "bfloat16", "max_model_len": 2048}
    config = {**config, "eos_token_id": config["vocab_size"] - 1}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    return LLM(str(folder), load_format="dummy", enable_prefix_caching=False, **settings)


def run(llm: LLM, batch: int, length: int, constraint: StructuredOutputsParams | None) -> tuple[float, ...]:
    """One batch of equal lengths: seconds, CPU seconds of the process, and of this thread, which is the engine's."""
    params = [
        SamplingParams(
            temperature=0.8, seed=number, max_tokens=length, ignore_eos=True, detokenize=False,
            structured_outputs=constraint,
        )
        for number in range(batch)
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": [65 + (number + place) % 100 for place in range(32)]} for number in range(batch)]
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    begin = [clock() for clock in clocks]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    spent = tuple(clock() - start for clock, start in zip(clocks, begin, strict=True))
    made = [len(output.outputs[0].token_ids) for output in outputs]
    if made != [length] * batch:
        raise RuntimeError(f"{batch} outputs of {length} tokens were asked for, got {sorted(set(made))}")
    return spent


def report(batch: int, name: str, tokens: int, pairs: list[Any]) -> None:
    """Prints a line of the table."""
    rates = [tokens / statistics.median(each[0] for each in kind) for kind in zip(*pairs, strict=True)]
    ratios = [sorted(free[part] / constrained[part] for free, constrained in pairs) for part in range(3)]
    shown = " | ".join(f"{statistics.median(one):.3f} ({one[0]:.2f}–{one[-1]:.2f})" for one in ratios)
    print(f"| {batch} | {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {shown} |", flush=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description="What a grammar costs.")
    parser.add_argument("--shape", help="llama-168m, or a shape of offline_gpu.py; default: the demo model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--length", type=int, default=200, help="tokens of each output")
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs")
    parser.add_argument("--threads", type=int, help="torch threads on a CPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_num_seqs": max(options.batches), "num_threads": options.threads}
        llm = start(options.shape, Path(folder), **settings)
        print(
            "| batch | grammar | free, tokens/s | constrained, tokens/s | ratio | of CPU seconds | of engine thread |"
        )
        print("|---|---|---|---|---|---|---|")
        for batch in options.batches:
            for name, constraint in CONSTRAINTS.items():
                for warm in (None, constraint):
                    run(llm, batch, options.length, warm)
                pairs = [
                    (run(llm, batch, options.length, None), run(llm, batch, options.length, constraint))
                    for _ in range(options.runs)
                ]
                report(batch, name, batch * options.length, pairs)
        llm.close()


if __name__ == "__main__":
    main()
