"""Step times of an engine while experts move between its devices, beside those of the same engine without balance.

    python benchmarks/expert_balance.py --json $OUT/experts.json                                   # two GPUs
    python benchmarks/expert_balance.py --shape tiny --platform cpu --batch 4 --steps 60 --interval 20

Requests of random ids decode together; a step is the time from one answer of the engine to the next. Weights are
random, so a router spreads tokens about evenly, and `hierarchical`, which heeds no cost of a move, moves nearly all
experts at each placement: that is the most that balancing does to steps. "moving" are the steps in which copies were
under way. The target is that no step is longer than 1.2 times the median. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import offline_gpu

from frame.core.engine.engine import Engine
from frame.core.interfaces.engine import EngineRequest
from frame.core.interfaces.sampling import SamplingParams
from frame.core.plugin_host.registry import Registry
from frame.offline.in_process import make_engine
from frame.settings import FrameConfig

PROMPT_LEN = 32
WARM_STEPS = 60
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": offline_gpu.QWEN_MOE,
    "tiny": {
        **offline_gpu.QWEN_MOE, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
        "num_hidden_layers": 3, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 16,
        "num_experts_per_tok": 2, "vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip


def started(options: argparse.Namespace, extra: dict[str, Any]) -> Engine:
    """An engine over the ranks, with requests that outlast the measurement."""
    tokens = WARM_STEPS + options.steps + 20
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[options.shape]))
        config = FrameConfig.from_flat(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=PROMPT_LEN + tokens, max_num_seqs=options.batch, tensor_parallel_size=options.ranks,
            enable_expert_parallel=True, platform=options.platform, **extra,
        )  # fmt: skip
        engine = make_engine(config, Registry.load())
    draw = np.random.default_rng(0)
    for index in range(options.batch):
        engine.add(
            EngineRequest(
                request_id=str(index),
                prompt_ids=draw.integers(5, engine.info.vocab_size, PROMPT_LEN, dtype=np.int32),
                params=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
                max_tokens=tokens,
                seed=index,
            )
        )
    return engine


def measure(options: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of steps: the median, high percentiles, the longest, and those of steps in which experts moved."""
    engine = started(options, extra)
    for _ in range(WARM_STEPS):
        engine.step()
    gc.collect()
    gc.freeze()
    seconds, copies = np.zeros(options.steps), np.zeros(options.steps + 1)
    copies[0] = engine.stats().num_expert_copies
    end = time.perf_counter()
    for step in range(options.steps):
        engine.step()
        begin, end = end, time.perf_counter()
        seconds[step] = end - begin
        copies[step + 1] = engine.stats().num_expert_copies
    stats = engine.stats()
    engine.close()
    moving = np.diff(copies) > 0
    median = float(np.median(seconds))
    found = {
        "steps": options.steps,
        "median_ms": 1e3 * median,
        "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
        "longest_ms": 1e3 * float(seconds.max()),
        "longest_over_median": float(seconds.max()) / median,
        "steps_above_1.2_medians": int((seconds > 1.2 * median).sum()),
        "placements": stats.num_expert_placements,
        "copies": stats.num_expert_copies,
        "balancedness": stats.expert_balancedness,
        "moving_steps": int(moving.sum()),
    }
    if moving.any():
        found |= {
            "moving_median_ms": 1e3 * float(np.median(seconds[moving])),
            "moving_p99_ms": 1e3 * float(np.percentile(seconds[moving], 99)),
            "moving_longest_ms": 1e3 * float(seconds[moving].max()),
        }
    return found


def main() -> None:
    """Measures without balance, and with experts that move beside the steps and between them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="requests that decode together")
    parser.add_argument("--steps", type=int, default=1500, help="that are timed")
    parser.add_argument("--interval", type=int, default=400, help="steps from placement to placement")
    parser.add_argument("--redundant", type=int, default=8, help="redundant experts")
    parser.add_argument("--rows", default="1,4", help="values of eplb_rows_per_step, by commas")
    parser.add_argument("--modes", default="none,beside,between", help="which of these, by commas")
    parser.add_argument("--extra", type=json.loads, default={}, help="further settings, as JSON")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    balanced = {
        "enable_eplb": True, "num_redundant_experts": options.redundant, "eplb_window_size": options.interval,
        "eplb_step_interval": options.interval,
    }  # fmt: skip
    runs: list[tuple[str, dict[str, Any]]] = []
    for mode in options.modes.split(","):
        if mode == "none":
            runs.append((mode, {}))
        elif mode == "between":
            runs.append((mode, {**balanced, "eplb_use_async": False}))
        else:
            rows = map(int, options.rows.split(","))
            runs += [(f"{mode}, {one} rows", {**balanced, "eplb_rows_per_step": one}) for one in rows]
    results = []
    for name, extra in runs:
        found = {"mode": name, **measure(options, {**options.extra, **extra})}
        print(json.dumps(found), flush=True)
        results.append(found)
        gc.unfreeze()
        gc.collect()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
