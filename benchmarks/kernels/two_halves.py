"""What two halves of a batch gain whose expert exchange and compute overlap: microseconds of a layer, two GPUs.

    python benchmarks/kernels/two_halves.py [--shape qwen3-30b-a3b] [--tokens 8192,2048,512,128] [--json FILE]
    python benchmarks/kernels/two_halves.py --device cpu --shape tiny --tokens 64,16 --decodes 16 --prompt 8

Starts a process for each GPU. Two data ranks share the experts of a few decoder layers, attention included, and each
has so many tokens: up to `--decodes` of them single tokens behind `--context` others, else prompts of `--prompt`.
For each exchange:

    whole    the batch in one piece
    alone    the same without an exchange: no overlap can be faster
    apart    two halves, one after the other
    overlap  two halves by turns, the exchanges on streams of their own beside what the other half computes
    late     the same, but exchanges are launched behind what the other half computes, not before

"replayed" are CUDA graphs, "launched" steps without. "copies" is carried by copy engines, "gather-4" by NCCL with at
most 4 programs. Beside the times stands how far these two are from `apart` (by anything, and it read what was not there
yet) and from `whole` (the median over tokens of the relative distance), `whole` from that of the first exchange, and
what is replayed from what is launched. A second table says what the parts of `whole` take, each timed by itself:
"exchange" is there and back. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from expert_ranks import Ranks
from expert_stack import SHAPES, Stack
from halves_clock import PARTS, HalvesClock

SIZE = 2
DISTANCES = ("from apart", "from whole", "from first", "from launched")
MODES = ("whole", "alone", "apart", "overlap", "late")
RATIOS = ("alone", "overlap", "late")


def main() -> None:
    """Starts the ranks; the first of them prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="layers that are made, not the shape's own number")
    parser.add_argument("--tokens", default="8192,2048,512,128", help="tokens of each rank, comma-separated")
    parser.add_argument("--exchanges", default="", help="comma-separated beginnings of the names of some exchanges")
    parser.add_argument("--decodes", type=int, default=512, help="up to so many tokens are rows of one token")
    parser.add_argument("--context", type=int, default=1024, help="tokens of such a row")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a row in steps of more tokens")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--launched", action="store_true", help="capture no CUDA graphs")
    parser.add_argument("--trace", help="a folder for traces of what is timed last")
    parser.add_argument("--json")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        run_rank(options)
        return
    from frame.core.parallel.rendezvous import Rendezvous

    rendezvous = Rendezvous()
    command = [sys.executable, __file__, *sys.argv[1:], "--rendezvous", rendezvous.address]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(SIZE)]
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.1)
        if any(rank.poll() for rank in ranks):  # the other one waits for it
            for rank in ranks:
                rank.kill()
    sys.exit(max(abs(rank.wait()) for rank in ranks))


def run_rank(options: argparse.Namespace) -> None:
    """Measures with the other rank."""
    began = time.perf_counter()
    tokens = [int(number) for number in options.tokens.split(",")]
    wanted = tuple(options.exchanges.split(","))
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", options.rank)
    with torch.inference_mode(), Ranks(options.rank, SIZE, options.rendezvous, device) as ranks:
        shape = SHAPES[options.shape].of(options.layers)
        stack = Stack(shape, ranks.groups, device, ranks.ops, ranks.attention)
        exchanges = {
            name: made for name, made in ranks.exchanges(stack, max(tokens)).items() if name.startswith(wanted)
        }
        batches = {count: rows_of(options, count) for count in tokens}
        stack.give_cache(max(rows * length for rows, _, length in batches.values()))
        parts = {count: stack.parts(*rows) for count, rows in batches.items()}
        clock = HalvesClock(stack, ranks, graphs=not options.launched)
        ranks.warm_up(
            lambda: [clock.run_all(parts[count], pair) for pair in exchanges.values() for count in tokens], max(tokens)
        )
        say(options, f"{time.perf_counter() - began:.0f} s: all kernels are compiled")
        results = list[dict[str, Any]]()
        for count in tokens:
            for name, pair in exchanges.items():
                if pair.serves(count):
                    results.append({"tokens": count, "exchange": name, **clock.measure(parts[count], pair)})
                    say(options, f"{time.perf_counter() - began:.0f} s: {json.dumps(results[-1])}")
        if options.trace:
            clock.trace(parts[tokens[-1]], pair, Path(options.trace) / f"two-halves-{options.rank}.json")
    if options.rank == 0:
        print_tables(results)
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1))


def rows_of(options: argparse.Namespace, tokens: int) -> tuple[int, int, int]:
    """(rows, tokens of each, tokens of each with those before them) of a step of so many tokens."""
    query, length = (1, options.context) if tokens <= options.decodes else (options.prompt, options.prompt)
    rows, left = divmod(tokens, query)
    if left or rows % 2:
        raise SystemExit(f"{tokens} tokens are no even number of rows of {query}: change --tokens or --prompt")
    return rows, query, length


def say(options: argparse.Namespace, line: str) -> None:
    """Prints from the first rank."""
    if options.rank == 0:
        print(line, flush=True)


def print_tables(results: list[dict[str, Any]]) -> None:
    """Microseconds of a layer: the five ways, and the parts of the whole."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"\n{device}, torch {torch.__version__}, microseconds of a layer; x is relative to `whole` of the same kind\n"
    )
    ways = [f"{how} {mode}" for how in ("launched", "replayed") for mode in (*MODES, *(f"{mode} x" for mode in RATIOS))]
    print("| tokens | exchange | " + " | ".join(ways) + " | " + " | ".join(DISTANCES) + " |")
    print("|---|---|" + "---|" * (len(ways) + len(DISTANCES)))
    for one in results:
        cells = [str(one["tokens"]), one["exchange"]]
        for how in ("launched", "replayed"):
            times = one[how]
            cells += [f"{times[mode]:.0f}" if mode in times else "" for mode in MODES]
            whole = times.get("whole", 0.0)
            cells += [f"{times[mode] / whole:.3f}" if whole and mode in times else "" for mode in RATIOS]
        cells += [f"{one[name]:.1e}" if name in one else "" for name in DISTANCES]
        print("| " + " | ".join(cells) + " |")
    print("\n| tokens | exchange | " + " | ".join(PARTS) + " |\n|---|---|" + "---|" * len(PARTS))
    for one in results:
        cells = [f"{one['parts'][part]:.0f}" if part in one["parts"] else "" for part in PARTS]
        print("| " + " | ".join([str(one["tokens"]), one["exchange"], *cells]) + " |")


if __name__ == "__main__":
    main()
