"""Offline speed on a CPU: frame against `generate` of transformers, on the same weights, prompts, lengths and threads.

    python benchmarks/offline_cpu.py [--threads 1] [--runs 3] [--models demo random] [--json FILE]

Greedy, float32, end-of-sequence off, token ids in and out, prefix caching off. `generate` gets one left-padded batch
and runs until its longest output is done, because it can do nothing else; output tokens are those that were asked for,
for both. Runs of the two alternate, and the ratio is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

import frame
from frame import LLM, SamplingParams

DEMO = Path(frame.__file__).parent / "core" / "demo"
#: 168 million parameters.
RANDOM_MODEL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and how many tokens each is to be continued by."""

    name: str
    target: float
    prompts: list[list[int]]
    lengths: list[int]


@dataclass(frozen=True)
class Figure:
    """Output tokens per second of both, and the median of the ratios of paired runs."""

    model: str
    workload: str
    frame: float
    transformers: float
    ratio: float
    target: float
    equal: float


def workloads(vocab_size: int, longest: int) -> list[Workload]:
    """32 requests of mixed lengths and a single one; the same for every run."""
    draw = random.Random(1)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(8, vocab_size) for _ in range(length)]

    mixed = [(draw.randint(8, longest), draw.randint(8, longest)) for _ in range(32)]
    return [
        Workload("32 requests", 1.5, [prompt(size) for size, _ in mixed], [count for _, count in mixed]),
        Workload("1 request", 0.9, [prompt(longest // 2)], [longest // 2]),
    ]


def random_checkpoint(folder: Path) -> Path:
    """Writes a Llama of `RANDOM_MODEL`'s shape with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**RANDOM_MODEL, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def frame_runner(folder: Path) -> Callable[[Workload], list[list[int]]]:
    """An engine of frame, as a function from a workload to its outputs."""
    llm = LLM(
        str(folder),
        dtype="float32",
        max_num_seqs=64,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=512 << 20,
    )

    def run(workload: Workload) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in workload.lengths
        ]
        prompts = [{"prompt_token_ids": ids} for ids in workload.prompts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def transformers_runner(folder: Path) -> Callable[[Workload], list[list[int]]]:
    """The same of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)

    def run(workload: Workload) -> list[list[int]]:
        width = max(map(len, workload.prompts))
        ids = torch.zeros((len(workload.prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(workload.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max(workload.lengths))
        return [row[width : width + length].tolist() for row, length in zip(out, workload.lengths, strict=True)]

    return run


def compare(name: str, folder: Path, runs: int, longest: int) -> list[Figure]:
    """Measures every workload on one model; both have been warmed up by a run of their own."""
    ours, theirs = frame_runner(folder), transformers_runner(folder)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    figures = []
    for workload in workloads(vocab_size, longest):
        agreement = shared_prefix(ours(workload), theirs(workload))
        times = [(timed(ours, workload), timed(theirs, workload)) for _ in range(runs)]
        tokens = sum(workload.lengths)
        figures.append(
            Figure(
                name,
                workload.name,
                tokens / statistics.median(mine for mine, _ in times),
                tokens / statistics.median(other for _, other in times),
                statistics.median(other / mine for mine, other in times),
                workload.target,
                agreement,
            )
        )
    return figures


def shared_prefix(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens up to the first difference of each row: near ties may part the two."""
    same = sum(
        next((place for place, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        for a, b in zip(ours, theirs, strict=True)
    )
    return same / sum(map(len, ours))


def timed(run: Callable[[Workload], list[list[int]]], workload: Workload) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run(workload)
    return time.perf_counter() - start


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both")
    parser.add_argument("--runs", type=int, default=3, help="paired runs of each workload")
    parser.add_argument("--models", nargs="+", choices=("demo", "random"), default=("demo", "random"))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            if name == "demo":
                figures += compare("demo (2 M)", DEMO, options.runs, 256)
            else:
                figures += compare("Llama 168 M", random_checkpoint(Path(scratch)), options.runs, 64)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} threads, float32")
    print("| model | workload | frame, tokens/s | transformers, tokens/s | ratio | target | equal tokens |")
    print("|---|---|---|---|---|---|---|")
    for figure in figures:
        print(
            f"| {figure.model} | {figure.workload} | {figure.frame:,.0f} | {figure.transformers:,.0f} "
            f"| {figure.ratio:.2f} | ≥ {figure.target} | {figure.equal:.0%} |"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
