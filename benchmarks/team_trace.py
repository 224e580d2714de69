"""What each device of an engine does during its steps: kernels by time, and how long it waits, by torch's profiler.

    python benchmarks/team_trace.py --shape llama-70b --extra '{"tensor_parallel_size": 2}' --batches 1,64 --prompts 16

First steps are timed without a profiler: decodes of so many running requests (`--batches`, contexts of about
`--context`), then so many prompts of 512 tokens with one token each (`--prompts`). Then each is traced in the workers,
whichever process they are in. Requests answer at their end, as those of `LLM.generate`. Times of the traced steps are
longer, as the profiler works in the same processes; what kernels take is not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from idle_trace import merged, start

from frame import LLMEngine, RequestOutputKind, SamplingParams

_PROMPT = 512
#: Tokens of prompts that a step computes at least while there are some.
_LEAST_TOKENS = 2048
_IDS = (f"{number}" for number in itertools.count())


def main() -> None:
    """Reads the arguments, starts the engine, and measures each batch."""
    parser = argparse.ArgumentParser(description="Kernels and waits of each device of an engine.")
    parser.add_argument("--shape", default="demo", help="A model of offline_gpu.py, or demo.")
    parser.add_argument("--extra", default="{}", type=json.loads, help="JSON of more arguments of the engine.")
    parser.add_argument("--batches", default="1,64", help="Comma-separated numbers of running requests.")
    parser.add_argument("--prompts", type=int, default=0, help="Prompts of 512 tokens that are computed at once.")
    parser.add_argument("--context", type=int, default=_PROMPT, help="Tokens of each running request's prompt.")
    parser.add_argument("--steps", type=int, default=24, help="Decode steps that are timed, and traced.")
    parser.add_argument("--kernels", type=int, default=16, help="Kernels that are printed for each device.")
    options = parser.parse_args()
    batches = [int(number) for number in options.batches.split(",") if number]
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder) / "traces"
        longest = 64 + max(batches, default=0) * options.context // _LEAST_TOKENS + 4 * options.steps
        settings = {"profile_dir": str(traces), "max_num_seqs": max([*batches, options.prompts, 16])}
        if options.shape != "demo":
            settings["max_model_len"] = max(options.context + longest, _PROMPT + 8)
        engine, vocabulary = start(options.shape, folder, **{**settings, **options.extra})
        for batch in batches:
            added = add(engine, vocabulary, batch, options.context, longest)
            run(engine, 16 + batch * options.context // _LEAST_TOKENS)  # by then all prompts have been computed
            seconds = run(engine, options.steps)
            print(f"{batch} decodes: {seconds / options.steps * 1e3:.2f} ms a step", flush=True)
            report(engine, traces, options.steps, options.steps, options.kernels)
            engine.abort_request(added)
            drain(engine)
        if options.prompts:
            for traced in (False, False, True):
                add(engine, vocabulary, options.prompts, _PROMPT, 1)
                if traced:
                    report(engine, traces, 0, 1, options.kernels)
                    continue
                began = time.perf_counter()
                drain(engine)
                print(
                    f"{options.prompts} prompts of {_PROMPT}: {(time.perf_counter() - began) * 1e3:.1f} ms", flush=True
                )


def add(engine: LLMEngine, vocabulary: int, count: int, length: int, tokens: int) -> list[str]:
    """Adds `count` requests of `length` random ids each that make `tokens` tokens; returns what they are called."""
    draws = random.Random(time.time())
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=kind)
    added = list(itertools.islice(_IDS, count))
    for request in added:
        prompt = [draws.randrange(vocabulary) for _ in range(length)]
        engine.add_request(request, {"prompt_token_ids": prompt}, params)
    return added


def run(engine: LLMEngine, steps: int) -> float:
    """Makes so many steps; the seconds that they took."""
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return time.perf_counter() - began


def drain(engine: LLMEngine) -> None:
    """Steps until no request is left."""
    while engine.has_unfinished_requests():
        engine.step()


def report(engine: LLMEngine, traces: Path, steps: int, divisor: int, kernels: int) -> None:
    """Traces `steps` steps, or all until no request is left, and prints what each device did, for each of `divisor`."""
    engine.start_profile()
    if steps:
        run(engine, steps)
    else:
        drain(engine)
    engine.stop_profile()
    for path in sorted(traces.glob("*.json")):
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        path.unlink()
        devices = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        if not devices:
            print(f"  {path.stem}: no device in this trace")
            continue
        spans = merged((event["ts"], event["ts"] + event["dur"]) for event in devices)
        busy = sum(end - begin for begin, end in spans)
        whole = spans[-1][1] - spans[0][0]
        print(
            f"  {path.stem}: {whole / divisor:.0f} us, busy {busy / divisor:.0f}, {len(devices) / divisor:.0f} kernels"
        )
        taken, counts = Counter[str](), Counter[str]()
        for event in devices:
            taken[event["name"]] += event["dur"]
            counts[event["name"]] += 1
        for name, took in taken.most_common(kernels):
            print(f"  {took / divisor:9.1f} us, {counts[name] / divisor:6.1f} times: {name[:110]}")
        for (before, after), (count, took) in waits(devices).most_common(kernels // 2):
            print(f"  waits {took / divisor:.1f} us, {count / divisor:.1f} times: {before[:50]} -> {after[:50]}")


class Waits(dict[tuple[str, str], tuple[int, float]]):
    """How often and how long a device waited, by the names of what it did before and after."""

    def most_common(self, count: int) -> list[tuple[tuple[str, str], tuple[int, float]]]:
        """Those that took longest."""
        return sorted(self.items(), key=lambda item: -item[1][1])[:count]


def waits(events: list[dict[str, Any]]) -> Waits:
    """Times at which none of the events was under way."""
    found = Waits()
    ordered = sorted(events, key=lambda event: float(event["ts"]))
    last, end = ordered[0]["name"], ordered[0]["ts"] + ordered[0]["dur"]
    for event in ordered[1:]:
        if event["ts"] > end:
            count, took = found.get((last, event["name"]), (0, 0.0))
            found[last, event["name"]] = count + 1, took + event["ts"] - end
        if event["ts"] + event["dur"] > end:
            last, end = event["name"], event["ts"] + event["dur"]
    return found


if __name__ == "__main__":
    main()
