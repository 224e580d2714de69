"""When the device works and when it waits, over some decode steps: torch's profiler, drawn as an SVG.

    python benchmarks/idle_trace.py --svg docs/gpu-idle.svg      # Qwen3 0.6B shape, 256 requests, on a GPU
    python benchmarks/idle_trace.py --shape demo --batch 8 --svg x.svg   # any machine; on a CPU: torch's ops

Each row is an equal part of the time, bars are kernels and copies (merged where they overlap or touch), the rest is
idle: seams of a microsecond between the kernels of a captured step, and waits, as between steps. The goal is that waits
are at most 3 % at batch 256 on the 0.6B shape. `--kernels N` also prints the kernels that take longest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from frame import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams

Span = tuple[float, float]
#: Name, begin, end.
Event = tuple[str, float, float]
WIDTH, ROW, GAP = 1000.0, 14.0, 6.0
#: Microseconds: what goes by between two kernels though the second has been queued; longer gaps are waits.
SEAM = 2.0
#: Ranges that the profiler draws around kernels, and are none.
_NOT_WORK = ("ProfilerStep", "gpu_user_annotation")


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans (begin, end), in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def idle_shares(busy: list[Span]) -> tuple[float, float]:
    """What seams and what waits take of the time from the first span's begin to the last one's end."""
    whole = busy[-1][1] - busy[0][0]
    gaps = [later[0] - sooner[1] for sooner, later in itertools.pairwise(busy)]
    return sum(gap for gap in gaps if gap <= SEAM) / whole, sum(gap for gap in gaps if gap > SEAM) / whole


def print_kernels(events: list[Event], steps: int, most: int) -> None:
    """A line for each of the `most` kernels that take longest: microseconds a step, launches a step, name."""
    taken = Counter[str]()
    for name, begin, end in events:
        taken[name] += end - begin
    counts = Counter(name for name, _, _ in events)
    for name, time in taken.most_common(most):
        print(f"{time / steps:9.1f} us a step, {counts[name] / steps:6.1f} times: {name[:100]}")


def draw(busy: list[Span], rows: int, title: str) -> str:
    """An SVG of the spans (microseconds) in `rows` equal rows."""
    first, part = busy[0][0], (busy[-1][1] - busy[0][0]) / rows
    height = 40 + rows * (ROW + GAP) + 18
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 20:.0f} {height:.0f}" '
        'font-family="sans-serif">',
        f"<title>{title}</title>",
        f'<text x="10" y="22" font-size="14" fill="currentColor">{title}</text>',
    ]
    for row in range(rows):
        begin, top = first + row * part, 36 + row * (ROW + GAP)
        lines.append(f'<rect x="10" y="{top:.0f}" width="{WIDTH:.0f}" height="{ROW:.0f}" fill="#f4c7c3"/>')
        path = "".join(
            f"M{10 + (max(a, begin) - begin) / part * WIDTH:.2f} {top:.0f}h"
            f"{(min(b, begin + part) - max(a, begin)) / part * WIDTH:.2f}v{ROW:.0f}h-"
            f"{(min(b, begin + part) - max(a, begin)) / part * WIDTH:.2f}z"
            for a, b in busy
            if a < begin + part and b > begin
        )
        lines.append(f'<path d="{path}" fill="#3367d6"/>')
    below = 36 + rows * (ROW + GAP) + 10
    note = f"one row: {part / 1000:.2f} ms; blue: the device works; red: it waits"
    lines += [f'<text x="10" y="{below:.0f}" font-size="11" fill="currentColor">{note}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


def start(shape: str, folder: str, **settings: Any) -> tuple[LLMEngine, int]:
    """An engine, and the size of its vocabulary."""
    if shape == "demo":
        engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        return engine, 1000
    from offline_gpu import MODELS

    config = MODELS[shape][0]
    (Path(folder) / "config.json").write_text(json.dumps(config))
    arguments = EngineArgs(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **settings)
    return LLMEngine.from_engine_args(arguments), config["vocab_size"] - 1000


def record(engine: LLMEngine, vocabulary: int, options: argparse.Namespace) -> list[Event]:
    """Fills the batch, lets it decode for a while, then traces steps; what the device did, in microseconds.

    Requests answer at their end, as those of `LLM.generate`, and on a GPU nothing of the host is traced: either would
    add host work that a user's steps do not have.
    """
    draws = random.Random(1)
    length = options.length + 64 + 4 * options.steps
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=kind)
    for number in range(options.batch):
        prompt = [draws.randrange(vocabulary) for _ in range(options.prompt)]
        engine.add_request(f"{number}", {"prompt_token_ids": prompt}, params)
    for _ in range(options.length):
        engine.step()
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    with profile(activities=activities, schedule=schedule(wait=0, warmup=options.steps, active=options.steps)) as trace:
        for step in range(2 * options.steps):
            if step:
                trace.step()
            engine.step()
        if cuda:
            torch.cuda.synchronize()
    if options.trace:
        trace.export_chrome_trace(str(options.trace))
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == wanted and not event.name.startswith(_NOT_WORK)
    ]


def main() -> None:
    """Prints the idle share and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", help="demo, or a model of benchmarks/offline_gpu.py")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--length", type=int, default=128, help="Tokens of each request before the trace begins.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--trace", type=Path, help="Also write the Chrome trace.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernels", type=int, default=0, metavar="N")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "max_num_seqs": max(options.batch, 1),
        "max_model_len": 1024 if options.shape == "demo" else 2048,
    }
    with tempfile.TemporaryDirectory() as folder:
        engine, vocabulary = start(options.shape, folder, **settings)
        events = record(engine, vocabulary, options)
        engine.close()
    busy = merged((begin, end) for _, begin, end in events)
    step_ms, (seams, waits) = (busy[-1][1] - busy[0][0]) / options.steps / 1000, idle_shares(busy)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU (torch's ops)"
    what = f"{options.shape}, {options.batch} requests, {options.steps} decode steps on {device}"
    title = f"{what}: waits {waits:.1%}, seams between kernels {seams:.1%}"
    print(f"{title}; {step_ms:.3f} ms a step")
    print_kernels(events, options.steps, options.kernels)
    if options.svg:
        options.svg.write_text(draw(busy, options.steps, title))
    if options.json:
        found = {"waits": waits, "seams": seams, "ms a step": step_ms, "batch": options.batch, "device": device}
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
