"""Where the time of steps goes, against a floor for each group of kernels, on a model shape with random weights.

    python benchmarks/profile_decode.py --shape qwen3-14b          # on a GPU, under a minute
    python benchmarks/profile_decode.py --shape demo --batches 6,3 # any machine: no table of kernels without a GPU

First a whole run of `offline_gpu.py` (`--run`, by default 256 prompts and answers of 100 to 1,024 tokens): its time
divided by kind of step. A step's time is that between two answers, so all of them are the run. Then steps of so many
running requests each (`--batches`, contexts of about 800), and steps in which so many decodes run beside one prompt
(`--mixed 160+2048`): the time of a step, the engine's own time on the host, and by torch's profiler what the device
spends on each group of kernels. Floors are those of `floors.py`, norms and logits at the rate of a copy.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from floors import BYTES, ITEM, PRODUCTS, Shape
from idle_trace import Event, merged, print_kernels, start
from offline_gpu import MODELS, RAGGED, Run, drawn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from frame import LLMEngine, RequestOutputKind, SamplingParams

#: Groups by what is found in a kernel's name; the first that matches counts.
_GROUPS = (
    ("reduce", r"splitKreduce|splitk_reduce"),
    ("product", r"nvjet|gemm|gemv|cutlass|xmma|cublas|_one_row|_some_rows|_product|_linear|aten::mm"),
    ("attention", r"attention|_longest_first|flash"),
    ("norms, rotary, cache", r"_rms_norm|_rotary|_write_kv|norm"),
    ("activation", r"_gated|silu|gelu"),
    ("sampling", r"_best_of|_filter|_tile_best|_draw|_top|_collect|_survey|_penalize|_apply_bitmask|_advance|_add\b"),
)
_LAYER_PRODUCTS = ("attention output", "gate and up", "down")
#: The largest number of rows or tokens of each kind of step in the division of a run.
_DECODES = (8, 24, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 1024)
_PROMPTS = (512, 2048, 4096, 6144, 8191, 8192, 16384)


@dataclass
class Step:
    """What one step computed, and the seconds that it took: `seconds` from the answer before it, the rest on the host.

    `keys` are tokens that its decodes attend to; `prompts` the floor of its prompts' attention in seconds.
    """

    rows: int
    tokens: int
    sampled: int
    keys: int
    prompts: float
    seconds: float = 0.0
    plan: float = 0.0
    launch: float = 0.0
    update: float = 0.0

    @property
    def kind(self) -> str:
        """The kind of step that it counts as in the division of a run."""
        if self.tokens == self.rows:
            return f"decodes, up to {next((size for size in _DECODES if self.rows <= size), self.rows)} rows"
        return f"prompts, up to {next((size for size in _PROMPTS if self.tokens <= size), self.tokens)} tokens"


@dataclass
class Steps:
    """Notes every step of an engine: wraps its scheduler and executor, whose calls it times."""

    engine: LLMEngine
    shape: Shape
    done: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        core: Any = self.engine.core
        self._host = Counter[str]()
        self._last = time.perf_counter()
        self._planned: dict[int, Step] = {}
        core.scheduler.schedule = self._timed("plan", core.scheduler.schedule)
        core.executor.execute = self._timed("launch", core.executor.execute)
        core.executor.sample = self._timed("launch", core.executor.sample)
        core.scheduler.update = self._answered(self._timed("update", core.scheduler.update))

    def begin(self) -> None:
        """Forgets what was noted; the next step's time begins now."""
        self.done.clear()
        self._host.clear()
        self._last = time.perf_counter()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                self._host[name] += time.perf_counter() - begin

        return timed

    def _answered(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def answered(plan: Any, result: Any) -> Any:
            now = time.perf_counter()
            if len(plan.slots):
                step = self._step(plan)
                step.seconds, self._last = now - self._last, now
                step.plan, step.launch, step.update = (self._host[name] for name in ("plan", "launch", "update"))
                self._host.clear()
                self.done.append(step)
            return update(plan, result)

        return answered

    def _step(self, plan: Any) -> Step:
        pairs = list(zip(plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True))
        keys = sum(computed + 1 for computed, count in pairs if count == 1)
        prompts = sum(self.shape.prompt(computed, computed + count) for computed, count in pairs if count > 1)
        return Step(len(pairs), plan.num_tokens, int(plan.samples.sum()), keys, prompts)


def group_of(name: str) -> str:
    """The group of a kernel, by its name."""
    return next((group for group, pattern in _GROUPS if re.search(pattern, name)), "other")


def labelled(names: Iterable[str], layers: int) -> list[str]:
    """The label of each kernel of whole steps in order: products by which one they are, others by their group.

    A library's names do not say which product a kernel is of; the attention before it does.
    """
    labels, expected, attended, last = [], ["query, key, value"], 0, "other"
    for name in names:
        group = group_of(name)
        if group == "attention":
            if last != "attention" and len(expected) != len(_LAYER_PRODUCTS) + 1 + (attended % layers == 0):
                attended += 1
                head = ["head"] if attended % layers == 0 else []
                expected = [*_LAYER_PRODUCTS, *head, "query, key, value"]
        elif group == "product":
            last = group = expected.pop(0) if expected else "more products"
        elif group == "reduce":
            group = last
        labels.append(group)
        if group not in ("norms, rotary, cache", "activation", "other"):
            last = group
    return labels


def floors(config: dict[str, Any], steps: Sequence[Step]) -> dict[str, float]:
    """Seconds of a step for each label, the mean of `steps`."""
    shape, hidden, wide = Shape.of(config), config["hidden_size"], config["intermediate_size"]
    sizes = {
        "query, key, value": (hidden, shape.query + 2 * shape.key),
        "attention output": (shape.query, hidden),
        "gate and up": (hidden, 2 * wide),
        "down": (wide, hidden),
    }
    found = defaultdict[str, float](float)
    for step in steps:
        for label, (inputs, outputs) in sizes.items():
            found[label] += shape.layers * product_floor(step.tokens, inputs, outputs)
        found["head"] += product_floor(step.sampled, hidden, config["vocab_size"])
        found["attention"] += shape.keys(step.keys) + step.prompts
        read = 8 * hidden + 2 * (shape.query + 2 * shape.key)
        found["norms, rotary, cache"] += shape.layers * step.tokens * read * ITEM / BYTES
        found["sampling"] += step.sampled * config["vocab_size"] * ITEM / BYTES
    return {label: seconds / len(steps) for label, seconds in found.items()}


def product_floor(rows: int, inputs: int, outputs: int) -> float:
    """Seconds of one product: the longer of its operations and of reading its weight."""
    return max(2 * rows * inputs * outputs / PRODUCTS, ITEM * inputs * outputs / BYTES)


def params(length: int) -> SamplingParams:
    """Requests that answer once, at their end, as those of `LLM.generate`."""
    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=kind)


def capture_all(engine: LLMEngine) -> float:
    """Lets the engine capture every CUDA graph that it wants, as it does while nothing else is to do; seconds."""
    core: Any = engine.core
    begin = time.perf_counter()
    while core.has_unfinished() or core.has_idle_work():
        core.step()
    return time.perf_counter() - begin


def divide(engine: LLMEngine, steps: Steps, run: Run, config: dict[str, Any]) -> dict[str, Any]:
    """Runs all requests of a run and prints its time by kind of step."""
    prompts, lengths = drawn(config["vocab_size"], run, 1)
    steps.begin()
    begin = time.perf_counter()
    for number, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.add_request(f"run-{number}", {"prompt_token_ids": ids}, params(length))
    queued = time.perf_counter() - begin
    while engine.has_unfinished_requests():
        engine.step()
    whole = time.perf_counter() - begin
    kinds = defaultdict[str, list[Step]](list)
    for step in steps.done:
        kinds[step.kind].append(step)
    rate = sum(lengths) / whole
    print(f"\n{run}: {whole:.3f} s, {rate:.0f} out/s, {len(steps.done)} steps; queued in {queued:.3f} s")
    print("| kind of step | steps | s | ms a step | floor, ms | of the floor | host: plan, launch, update, ms |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for kind in sorted(kinds, key=lambda kind: (kind[0], int(re.findall(r"\d+", kind)[0]))):
        rows.append(row := summary(kinds[kind], config))
        host = ", ".join(f"{1e3 * row[name]:.2f}" for name in ("plan", "launch", "update"))
        print(
            f"| {kind} | {len(kinds[kind])} | {row['seconds'] * len(kinds[kind]):.3f} | {1e3 * row['seconds']:.3f} "
            f"| {1e3 * row['floor']:.3f} | {row['floor'] / row['seconds']:.2f} | {host} |",
            flush=True,
        )
        row["kind"] = kind
    return {"run": str(run), "seconds": whole, "tokens_out": sum(lengths), "kinds": rows}


def summary(steps: Sequence[Step], config: dict[str, Any]) -> dict[str, Any]:
    """Means over steps: numbers of rows and tokens, seconds, the host's, and the floor that `floors.py` takes."""
    means = {item.name: sum(getattr(step, item.name) for step in steps) / len(steps) for item in fields(Step)}
    shape = Shape.of(config)
    floor = sum(shape.products(step.tokens, step.sampled) + shape.keys(step.keys) + step.prompts for step in steps)
    return {**means, "steps": len(steps), "floor": floor / len(steps)}


def traced(step: Callable[[], None], count: int) -> list[Event]:
    """What the device does in `count` calls of `step`, in microseconds and in order; [] without a CUDA device.

    The device is waited for before and after, so that the trace begins and ends between two steps.
    """
    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA], schedule=schedule(wait=0, warmup=1, active=1)) as trace:
        step()
        torch.cuda.synchronize()
        trace.step()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("ProfilerStep", "gpu_user_annotation"))
    ]
    return sorted(events, key=lambda event: event[1])


def groups(events: list[Event], count: int, config: dict[str, Any], steps: Sequence[Step]) -> dict[str, Any]:
    """Prints the device's time of a step by group of kernels; microseconds a step, launches and floor by label."""
    taken, launches = Counter[str](), Counter[str]()
    labels = labelled((name for name, _, _ in events), config["num_hidden_layers"])
    for label, (_, begin, end) in zip(labels, events, strict=True):
        taken[label] += (end - begin) / count
        launches[label] += 1
    busy = merged((begin, end) for _, begin, end in events)
    whole = (busy[-1][1] - busy[0][0]) / count
    taken["gaps"] = whole - sum(end - begin for begin, end in busy) / count
    least = floors(config, steps)
    print("| group | launches a step | µs a step | share | floor, µs | over the floor, µs |")
    print("|---|---|---|---|---|---|")
    for label, time_taken in taken.most_common():
        floor = 1e6 * least.get(label, 0.0)
        print(
            f"| {label} | {launches[label] / count:.0f} | {time_taken:.0f} | {time_taken / whole:.1%} | {floor:.0f} "
            f"| {time_taken - floor:.0f} |"
        )
    print(f"| all | {len(events) / count:.0f} | {whole:.0f} | | {1e6 * sum(least.values()):.0f} | |", flush=True)
    return {"microseconds": dict(taken), "launches": dict(launches), "floor": {k: 1e6 * v for k, v in least.items()}}


def case(
    name: str, engine: LLMEngine, steps: Steps, step: Callable[[], None], options: Any, config: dict[str, Any]
) -> dict[str, Any]:
    """Times steps without a profiler, then traces some; prints both."""
    for _ in range(options.settle):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    steps.begin()
    for _ in range(options.steps):
        step()
    found = summary(steps.done, config)
    host = ", ".join(f"{part} {1e3 * found[part]:.2f}" for part in ("plan", "launch", "update"))
    print(
        f"\n{name}: {found['rows']:.0f} rows, {found['tokens']:.0f} tokens, {found['keys']:.0f} keys; "
        f"{1e3 * found['seconds']:.3f} ms a step, floor {1e3 * found['floor']:.3f} "
        f"({found['floor'] / found['seconds']:.2f} of it); host ms: {host}"
    )
    steps.begin()
    if events := traced(step, options.traced):
        found["groups"] = groups(events, options.traced, config, steps.done[-options.traced :])
        print_kernels(events, options.traced, options.kernels)
    return {"case": name, **found}


class Traffic:
    """Requests that decode for as long as they are wanted, and prompts that end with their first token."""

    def __init__(self, engine: LLMEngine, vocabulary: int, longest: int, context: int) -> None:
        self._engine, self._vocabulary, self._longest, self._context = engine, vocabulary, longest, context
        self._draw = random.Random(1)
        self._running: list[str] = []
        self._number = 0

    def _add(self, tokens: int, length: int) -> str:
        self._number += 1
        ids = [self._draw.randrange(self._vocabulary) for _ in range(tokens)]
        self._engine.add_request(f"{self._number}", {"prompt_token_ids": ids}, params(length))
        return f"{self._number}"

    def decode(self, rows: int) -> None:
        """So many requests decode from now on; those there are too many of end."""
        while len(self._running) > rows:
            self._engine.abort_request([self._running.pop()])
        while len(self._running) < rows:
            tokens = self._draw.randint(self._context // 2, self._context * 3 // 2)
            self._running.append(self._add(tokens, self._longest - tokens - 1))
        core: Any = self._engine.core
        while core.stats().waiting:
            self._engine.step()
        for _ in range(4):
            self._engine.step()

    def step(self) -> None:
        """A step of decodes."""
        self._engine.step()

    def mixed_step(self, tokens: int) -> None:
        """A step to which a prompt comes."""
        self._add(tokens, 1)
        self._engine.step()


def main() -> None:
    """Reads the arguments, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-14b", help="demo, or a model of benchmarks/offline_gpu.py")
    parser.add_argument("--run", type=int, default=-1, help="Number of the shape's run; 0 for none, -1 for the ragged.")
    parser.add_argument("--batches", default="256,160,64,24")
    parser.add_argument("--mixed", default="160+512,160+2048,160+7936", help="Decodes+tokens of a prompt in each step.")
    parser.add_argument("--context", type=int, default=800)
    parser.add_argument("--settle", type=int, default=20, help="Steps of a case before it is measured.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--traced", type=int, default=6, help="Steps under torch's profiler.")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="Also the N longest kernels of each case.")
    parser.add_argument("--extra", default="{}", type=json.loads, help="JSON of more engine arguments.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    demo = options.shape == "demo"
    config = _DEMO if demo else MODELS[options.shape][0]
    longest = 1024 if demo else 4096
    run = Run(8, (10, 60), (10, 60)) if demo else RAGGED
    if options.run > 0:
        run = MODELS[options.shape][2][options.run - 1]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine, vocabulary = start(options.shape, folder, max_model_len=longest, **options.extra)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{options.shape} on {device}: started in {time.perf_counter() - begin:.1f} s", flush=True)
    steps, traffic = Steps(engine, Shape.of(config)), Traffic(engine, vocabulary, longest, options.context)
    traffic.decode(4)
    traffic.decode(0)
    print(f"CUDA graphs captured while idle in {capture_all(engine):.1f} s", flush=True)
    results: list[dict[str, Any]] = [divide(engine, steps, run, config)] if options.run else []
    mixed = [tuple(map(int, each.split("+"))) for each in options.mixed.split(",") if each]
    batches = [int(rows) for rows in options.batches.split(",") if rows]
    for rows in sorted({*batches, *(decodes for decodes, _ in mixed)}, reverse=True):
        traffic.decode(rows)
        if rows in batches:
            results.append(case(f"{rows} decodes", engine, steps, traffic.step, options, config))
        for decodes, tokens in mixed:
            if decodes == rows:
                call = lambda tokens=tokens: traffic.mixed_step(tokens)  # noqa: E731
                results.append(case(f"{decodes} decodes and a prompt", engine, steps, call, options, config))
    engine.close()
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "device": device, "results": results}, indent=1))


#: What floors need of the demo model; its figures mean nothing on a CPU.
_DEMO = {**MODELS["qwen3-0.6b"][0], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "vocab_size": 2000}  # fmt: skip

if __name__ == "__main__":
    main()
