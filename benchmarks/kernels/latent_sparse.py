"""Speed of sparse latent attention and of its index on a GPU: DeepSeek V3.2's sizes in bf16, pages of 16.

    python -m benchmarks.kernels.latent_sparse [--json FILE]

Each case times the scores, the choice of the 2,048 best beside `torch.topk` of the same scores, attention to what is
chosen, and the whole of both layers, which store their tokens first. Scores and attention are given as shares of what
the device does in the same run: bytes of keys or latents against a copy of a gigabyte, read and written, products
against one of two matrices of 8,192. Results are first compared with the formulas. Medians; decode is replayed from
CUDA graphs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.latent_decode import NOPE, PAGE, RANK, ROPE, VALUE, batch_of, copy_rate, median, product_rate
from frame.core.interfaces.latent import IndexSpec, LatentParams, LatentSpec
from frame.core.interfaces.setup import BackendSetup
from frame.core.ops import Ops
from frame.kernels.latent_index import choose_best, index_scores, launch_for
from frame.kernels.latent_sparse import latent_sparse
from frame.plugins.attention.triton_sparse import SparseStep, TritonIndex, TritonSparse

HEADS, INDEX_HEADS, DIM, TOP_K = (16, 128), 64, 128, 2048
#: (rows, tokens in the cache, new ones)
STEPS = [(1, 32767, 1), (8, 32767, 1), (64, 8191, 1), (64, 32767, 1), (1, 131071, 1), (1, 0, 8192), (1, 32768, 2048)]
HALF = torch.bfloat16


def random(*shape: int) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, dtype=HALF, device="cuda")


def index_error(found: Tensor, query: Tensor, weights: Tensor, keys: Tensor, seen: int) -> float:
    """The largest part of the formula's choice of the last token that is not in `found` [top_k]."""
    products = (query.float() @ keys[:seen].float().t() * DIM**-0.5).relu()
    best = (weights.float() @ products).topk(min(TOP_K, seen)).indices
    return 1 - len(set(best.tolist()) & set(found.tolist())) / len(best)


def attention_error(out: Tensor, query: Tensor, latents: Tensor, chosen: Tensor, scale: float) -> float:
    """Relative error of the last token's sums against float32."""
    kept = latents[chosen[chosen >= 0].long()].float()
    want = (query.float() @ kept.t() * scale).softmax(-1) @ kept[:, :RANK]
    return float((out.float() - want).norm() / want.norm())


def step(heads: int, rows: int, cached: int, new: int, rates: tuple[float, float]) -> dict[str, Any]:
    """Prints a line for the index and one for attention."""
    batch, scale, graph = batch_of(rows, cached, new), (NOPE + ROPE) ** -0.5, new == 1
    spec = LatentSpec(heads, NOPE, ROPE, VALUE, RANK, scale, HALF, HALF, PAGE, "cuda", top_k=TOP_K)
    of_index = IndexSpec(INDEX_HEADS, DIM, TOP_K, DIM**-0.5, HALF, HALF, PAGE, "cuda")
    index, attention = TritonIndex(BackendSetup(of_index, Ops())), TritonSparse(BackendSetup(spec, Ops()))
    tokens, pages = batch.num_tokens, batch.block_table.numel()
    keys, latents = random(pages, PAGE, DIM), random(pages, PAGE, spec.width)
    small, weights, key = random(tokens, INDEX_HEADS, DIM), random(tokens, INDEX_HEADS), random(tokens, DIM)
    layer = LatentParams(spec, random(heads, NOPE + VALUE, RANK) * RANK**-0.5)
    query, latent = random(tokens, heads, NOPE + ROPE), random(tokens, spec.width)
    plan = SparseStep.of(batch)
    chosen = index.forward(of_index, small, weights, key, keys, plan)
    attention.forward(layer, query, latent, latents, plan, chosen)
    run = plan.runs(4 * plan.longest)[-1]
    rows_of, seen, absorbed = plan.table_rows[run], plan.seen[run], layer.absorb(query[-min(tokens, 64) :])
    how: dict[str, Any] = {
        "top_k": TOP_K, "longest": plan.longest, "scale": of_index.scale,
        "launch": launch_for(run.stop - run.start, plan.longest, index._multiprocessors, HALF),
    }  # fmt: skip
    given = (rows_of, seen, batch.block_table)

    def scored() -> Tensor:
        return index_scores(small[run], weights[run], keys, *given, **how)

    scores, target = scored(), torch.empty_like(chosen[run])

    def choice() -> Tensor:
        choose_best(scores, seen, target)
        return target

    last = slice(tokens - len(absorbed), tokens)
    launch = attention._launch(len(absorbed), plan.longest)

    def attended() -> Tensor:
        return latent_sparse(
            absorbed, latents, plan.table_rows[last], plan.seen[last], batch.block_table, chosen[last],
            rank=RANK, scale=scale, launch=launch,
        )  # fmt: skip

    def timed(call: Callable[[], Tensor]) -> float:
        return median(call, graph=graph) * 1e3

    length = cached + new
    table = batch.block_table[-1].long()
    wrong = index_error(chosen[-1], small[-1], weights[-1], keys[table].flatten(0, 1), length)
    off = attention_error(attended()[-1], absorbed[-1], latents[table].flatten(0, 1), chosen[-1], scale)
    found = {
        "heads": heads, "rows": rows, "cached": cached, "new": new, "index missed": wrong, "attention error": off,
        "scores us": timed(scored), "choice us": timed(choice),
        "torch.topk us": timed(lambda: scores.topk(min(TOP_K, length), -1).indices), "attention us": timed(attended),
        "index us": timed(lambda: index.forward(of_index, small, weights, key, keys, plan)),
        "whole us": timed(lambda: attention.forward(layer, query, latent, latents, plan, chosen)),
    }  # fmt: skip
    pairs = float(seen.float().sum())
    read, listed = (rows * length if new == 1 else pairs) * DIM * 2, len(absorbed) * min(TOP_K, length)
    found["scores of copy"] = read / found["scores us"] * 1e6 / rates[0]
    found["scores of product"] = 2 * pairs * INDEX_HEADS * DIM / found["scores us"] * 1e6 / rates[1]
    found["attention of copy"] = listed * spec.width * 2 / found["attention us"] * 1e6 / rates[0]
    found["attention of product"] = 2 * listed * heads * (2 * RANK + ROPE) / found["attention us"] * 1e6 / rates[1]
    print(", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
    return found


@torch.inference_mode()
def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates = copy_rate(), product_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies {rates[0] / 1e12:.2f} TB/s, ", end="")
    print(f"products {rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    results = [step(heads, *sizes, rates) for heads, sizes in itertools.product(HEADS, STEPS)]
    if options.json:
        options.json.write_text(json.dumps({"copy": rates[0], "product": rates[1], "cases": results}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
