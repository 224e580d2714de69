"""A lease of a host's GPUs, used well: tests and measurements in the order of their worth, each with a limit of time.

    python benchmarks/gpu_session.py --out $OUT --seconds 580            # what fits, the most valuable first
    python benchmarks/gpu_session.py --out $OUT --plan tests             # every test that needs a GPU
    python benchmarks/gpu_session.py --out $OUT --plan targets --peer-python /path/to/venv/bin/python
    python benchmarks/gpu_session.py --out $OUT --parts prefill,leaks    # some parts
    python benchmarks/gpu_session.py --out DIR --smoke                   # the same script, tiny, on any machine

A part is a process of its own: its output goes to OUT/PART.log, its figures to OUT/PART.json, and how it ended to
OUT/session.json, which is written anew after each part. Parts that need fewer devices than the host has run beside one
another, each with devices of its own. A part that no longer fits is left out and named, so that the next call can begin
with it (`--skip` takes the names of those that are done). The plan `targets` runs frame and its
peer, vLLM, on the shapes that `table.py` names targets for, and writes that table from OUT/target-*.json to
OUT/table.log, so that calls which share OUT add to it; the peer's packages may be those of another interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """A command, the seconds it may take, what stands for it where there is no GPU (empty: nothing), its devices."""

    name: str
    command: str
    seconds: int
    smoke: str = ""
    devices: int = 1


def gpu_tests(files: str) -> str:
    """A run of GPU tests that stops at no failure, so that one lease tells of all."""
    return f"pytest -v --tb=short -m gpu -p no:cacheprovider -o filterwarnings= --durations=5 {files}"


_KERNELS = "benchmarks/kernels"
PARTS = (
    Part("two-devices", gpu_tests("tests/gpu/test_two_ranks.py") + " -n 3", 500, devices=2),
    Part("new-kernels", gpu_tests("tests/gpu/test_latent*.py tests/gpu/test_state_kernels.py "
                                  "tests/gpu/test_coded_experts.py tests/gpu/test_coded_few.py "
                                  "tests/gpu/test_coded_blocks.py tests/gpu/test_nibble_kernels.py "
                                  "tests/gpu/test_coded_fragments.py tests/gpu/test_coded_ring.py "
                                  "tests/gpu/test_rounded_hopper.py tests/gpu/test_nibbles_hopper.py "
                                  "tests/gpu/test_expert_adapter_kernels.py tests/gpu/test_quantized_kernels.py "
                                  "tests/gpu/test_codebook_kernels.py tests/gpu/test_linear_rows.py") + " -n 8", 400),
    Part("engine-tests", gpu_tests("tests/gpu/test_engine.py tests/gpu/test_encoder_decoders.py "
                                   "tests/gpu/test_pooling.py tests/gpu/test_cascade_engine.py "
                                   "tests/gpu/test_few_engine.py") + " -n 4", 400),
    Part("kernel-tests", gpu_tests("tests/gpu/test_sampling*_kernels.py tests/gpu/test_step_kernels.py "
                                   "tests/gpu/test_layer_kernels.py tests/gpu/test_attention.py "
                                   "tests/gpu/test_attention_fp8.py tests/gpu/test_decode_narrow.py "
                                   "tests/gpu/test_decode_few.py tests/gpu/test_attention_few.py "
                                   "tests/gpu/test_linear_invariant.py "
                                   "tests/gpu/test_prefill_attention.py "
                                   "tests/gpu/test_expert_kernels.py tests/gpu/test_adapter_kernels.py "
                                   "tests/gpu/test_cascade.py tests/gpu/test_library.py") + " -n 8", 400),
    Part("graphs", gpu_tests("tests/gpu/test_doctor.py tests/gpu/test_graphs.py tests/gpu/test_leaks.py "
                             "tests/gpu/test_weight_offload.py"), 500,
         "pytest -q -p no:cacheprovider tests/engine/test_leaks.py"),
    Part("libraries", gpu_tests("tests/gpu/test_attention_libraries.py") + " -n 8", 150),
    Part("exchanges", gpu_tests("tests/gpu/test_expert_exchanges.py tests/gpu/test_expert_exchange_kernels.py "
                                "tests/gpu/test_all_reduce_kernels.py tests/gpu/test_peer_copies.py "
                                "tests/gpu/test_block_copies.py"), 300, devices=4),
    Part("transfer-tests", gpu_tests("tests/gpu/test_mapped_memory.py tests/gpu/test_transfers.py"), 400, devices=2),
    Part("kills", gpu_tests("tests/gpu/test_kills.py"), 560, devices=2),
    Part("block-copies", f"python {_KERNELS}/block_copies.py --json {{json}}", 90, devices=2),
    Part("transfers-pair", "python benchmarks/transfers.py pair --json {json}", 240,
         "python benchmarks/transfers.py pair --shape tiny --platform cpu --prompt 64 --short 32 --requests 6 "
         "--wait 0.1 --tokens 8 --json {json}", devices=2),
    Part("transfers-push", "python benchmarks/transfers.py pair --connector push --json {json}", 240,
         "python benchmarks/transfers.py pair --connector push --shape tiny --platform cpu --prompt 64 --short 32 "
         "--requests 6 --wait 0.1 --tokens 8 --buffer 64 --json {json}", devices=2),
    Part("transfers-push-host", "python benchmarks/transfers.py pair --connector push --no-direct --json {json}", 240,
         "python benchmarks/transfers.py pair --connector push --no-direct --shape tiny --platform cpu --prompt 64 "
         "--short 32 --requests 6 --wait 0.1 --tokens 8 --buffer 64 --json {json}", devices=2),
    Part("transfers-tier", "python benchmarks/transfers.py tier --json {json}", 180,
         "python benchmarks/transfers.py tier --shape tiny --platform cpu --prompt 64 --short 32 --requests 6 "
         "--wait 0.1 --tokens 8 --gib 0.1 --json {json}"),
    Part("ragged", f"python {_KERNELS}/attention.py --ragged --json {{json}}", 120),
    Part("sanitize", "benchmarks/sanitize.sh", 320),
    Part("expert-exchange", f"python {_KERNELS}/expert_exchange.py --json {{json}}", 120, devices=2),
    Part("two-halves", f"python {_KERNELS}/two_halves.py --json {{json}}", 150,
         f"python {_KERNELS}/two_halves.py --device cpu --shape tiny --tokens 24,8 --decodes 8 --context 20 "
         "--prompt 12 --json {json}", devices=2),
    Part("expert-balance", "python benchmarks/expert_balance.py --json {json}", 560,
         "python benchmarks/expert_balance.py --shape tiny --platform cpu --batch 4 --steps 60 --interval 20 "
         "--redundant 2 --rows 4 --json {json}", devices=2),
    Part("offload-speed", "python benchmarks/weight_offload.py --json {json}", 300,
         "python benchmarks/weight_offload.py --shape tiny --platform cpu --gib 0.01 --steps 4 --json {json}"),
    Part("long-prompt", "python benchmarks/long_prompt.py --json {json}", 560,
         "python benchmarks/long_prompt.py --shape tiny --platform cpu --tokens 256 --chunk 64 --json {json}"),
    Part("start", gpu_tests("tests/gpu/test_start.py"), 90),
    Part("kept-weights", gpu_tests("tests/gpu/test_kept_weights.py"), 300),
    Part("restart", "python -m benchmarks.restart --shape llama-8b --kills 2 --json {json}", 580),
    Part("cold", "python benchmarks/offline_gpu.py --models qwen3-0.6b", 60),
    Part("deterministic", "python benchmarks/deterministic.py --json {json}", 240,
         "python benchmarks/deterministic.py --model demo --requests 6 --prompt 8 --length 4 --rounds 1 --json {json}"),
    Part("broadcast", "python benchmarks/broadcast.py", 180,
         "python benchmarks/broadcast.py --readers 1 --messages 20"),
    Part("idle", "python benchmarks/idle_trace.py --kernels 16 --svg {out}/gpu-idle.svg --json {json}", 60,
         "python benchmarks/idle_trace.py --shape demo --batch 4 --prompt 8 --length 6 --steps 3 --svg {out}/idle.svg "
         "--json {json}"),
    Part("cascade", f"python {_KERNELS}/cascade.py --json {{json}}", 60),
    Part("load", "python benchmarks/load_speed.py --json {json}", 120,
         "python benchmarks/load_speed.py --gigabytes 0.2 --platform cpu --folder {out} --json {json}"),
    Part("structured", "python benchmarks/structured.py --shape qwen3-0.6b --batches 64", 180,
         "python benchmarks/structured.py --batches 2 --length 4"),
    Part("few-tokens", "python -m benchmarks.kernels.few_tokens --json {json}", 60,
         "python -m benchmarks.kernels.few_tokens --cases 1x40x5 --json {json}"),
    Part("decode-fp8", "python -m benchmarks.kernels.decode_fp8 --json {json}", 60,
         "python -m benchmarks.kernels.decode_fp8 --cases 2x40 --json {json}"),
    Part("adapters", "python -m benchmarks.kernels.adapters --json {json}", 60,
         "python -m benchmarks.kernels.adapters --rows 5 --slots 3 --json {json}"),
    Part("experts", f"python {_KERNELS}/experts.py", 120),
    Part("coded-experts", f"python {_KERNELS}/coded_experts.py --json {{json}}", 150,
         f"python {_KERNELS}/coded_experts.py --device cpu --shape 4,2,128,64 --tokens 1,3 --json {{json}}"),
    Part("experts-hopper", f"python {_KERNELS}/experts_hopper.py --json {{json}}", 120),
    Part("sampling", f"python {_KERNELS}/sampling.py --rows 1,64,256", 120),
    Part("linear", f"python {_KERNELS}/linear_invariant.py", 120),
    Part("latent-sparse", "python -m benchmarks.kernels.latent_sparse --json {json}", 120),
    Part("scans", f"python {_KERNELS}/scans.py --json {{json}}", 180),
    Part("linear-rows", f"python {_KERNELS}/linear_rows.py --json {{json}}", 90),
    Part("layers", f"python {_KERNELS}/layers.py", 60),
    Part("share", "python -m benchmarks.server_share --shape llama-8b", 120,
         "python -m benchmarks.server_share --streams 4 --tokens-in 8 --tokens-out 16 --clients 1 --rounds 1"),
    Part("doctor", "frame doctor --json", 60, "frame doctor --json"),
    Part("throughput", "python benchmarks/offline_gpu.py --models qwen3-0.6b,llama-8b", 420),
    Part("variants", "python benchmarks/variants_gpu.py --json {json}", 560,
         "python benchmarks/variants_gpu.py --shape tiny --platform cpu --runs 0 --variants none,int8,adapters "
         "--json {json}"),
    Part("latent-decode", f"python {_KERNELS}/latent_decode.py --json {{json}}", 120),
    Part("products", "python -m benchmarks.kernels.products --rows 1,8,64,128,256,2048 --json {json}", 240),
    Part("shared-prefix", f"python {_KERNELS}/cascade.py --sweep --json {{json}}", 120),
    *(Part(f"target-{name}-{engine}",
           f"{python} benchmarks/offline_gpu.py --engine {engine} {shape} --json {{json}}", 300)
      for name, shape in (("14b", "--models qwen3-14b"), ("8b", "--models llama-8b --runs 2,6"),
                          ("0.6b", "--models qwen3-0.6b --runs 2"), ("latent", "--models deepseek-v2-lite --runs 2"),
                          ("states", "--models mamba2-2.7b"), ("mxfp4", "--models gpt-oss-20b --runs 1,2"))
      for engine, python in (("frame", "python"), ("vllm", "{peer}"))),
    *(Part(f"target-{name}-frame", f"python benchmarks/offline_gpu.py {shape} --json {{json}}", 300, devices=2)
      for name, shape in (
          ("70b", "--models llama-70b --extra '{{\"tensor_parallel_size\": 2}}'"),
          ("30b", "--models qwen3-30b-a3b "
                  "--extra '{{\"tensor_parallel_size\": 2, \"enable_expert_parallel\": true}}'"))),
    *(Part(f"trace-{name}", f"python benchmarks/team_trace.py --shape {shape}", 150, devices=2)
      for name, shape in (
          ("70b", "llama-70b --batches 64,256 --prompts 16 --extra '{{\"tensor_parallel_size\": 2}}'"),
          ("30b", "qwen3-30b-a3b --batches 1,64,512 --prompts 16 "
                  "--extra '{{\"tensor_parallel_size\": 2, \"enable_expert_parallel\": true}}'"))),
    *(Part(f"steps-{name}", f"python benchmarks/run_steps.py --model {shape} --json {{json}}", 200,
           "python benchmarks/run_steps.py --json {json}", devices=2)
      for name, shape in (
          ("70b", "llama-70b --runs 1,2 --extra '{{\"tensor_parallel_size\": 2}}'"),
          ("30b", "qwen3-30b-a3b --runs 1,2 "
                  "--extra '{{\"tensor_parallel_size\": 2, \"enable_expert_parallel\": true}}'"))),
    Part("table", "python benchmarks/table.py {out}/target-*.json", 30),
)  # fmt: skip
#: Parts in the order in which a call runs them that asks for a plan.
PLANS = {
    "tests": (
        *("two-devices", "new-kernels", "engine-tests", "kernel-tests", "graphs", "start", "kept-weights", "libraries"),
        *("exchanges", "transfer-tests", "kills"),
    ),
    "models": ("latent-decode", "variants", *(f"target-{name}-frame" for name in ("latent", "states", "mxfp4"))),
    "transfers": ("block-copies", "transfers-pair", "transfers-push", "transfers-push-host", "transfers-tier"),
    "targets": (
        *(part.name for part in PARTS if part.name.startswith("target-")),
        "table",
        "products",
        "coded-experts",
        "shared-prefix",
    ),
}


def devices_here() -> list[str]:
    """The devices that parts may use, as CUDA_VISIBLE_DEVICES names them; one without a name where there is no GPU."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [""]
    return [str(number) for number in range(len(listed.splitlines()))]


def run(part: Part, command: str, seconds: float, options: argparse.Namespace, devices: list[str]) -> dict[str, object]:
    """Runs one part on these devices; how it ended."""
    out = options.out
    command = command.format(json=out / f"{part.name}.json", out=out, peer=options.peer_python)
    words = shlex.split(command) if "*" not in command else ["bash", "-c", command]
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    imports = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PATH": paths, "PYTHONPATH": imports, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    if words[0] in ("python", "pytest", "frame"):
        words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", words[0]]
    begin = time.perf_counter()
    with (out / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = "out of time"
            process.send_signal(signal.SIGINT)  # pytest says what failed until then
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started itself
            process.wait()
    spent = round(time.perf_counter() - begin, 1)
    last = (out / f"{part.name}.log").read_text(errors="replace").strip().splitlines()[-1:]
    return {"part": part.name, "status": status, "seconds": spent, "last line": "".join(last)[:200]}


def run_all(pairs: list[tuple[Part, str]], options: argparse.Namespace, devices: list[str]) -> None:
    """Runs parts as soon as their devices are free, in the order given where that is so for several."""
    end, results = time.monotonic() + options.seconds, list[dict[str, object]]()
    pending, free, running = list(pairs), list(devices), dict[Future[dict[str, object]], list[str]]()

    def ended(result: dict[str, object]) -> None:
        results.append(result)
        print("{part}: {status}, {seconds} s: {last line}".format(**result), flush=True)
        (options.out / "session.json").write_text(json.dumps(results, indent=1))

    with ThreadPoolExecutor(len(devices)) as pool:
        while pending or running:
            fitting = (pair for pair in pending if min(pair[0].devices, len(devices)) <= len(free))
            if (pair := next(fitting, None)) is not None:
                pending.remove(pair)
                part, command = pair
                left = end - time.monotonic()
                if left < min(60, part.seconds):
                    ended({"part": part.name, "status": "left out", "seconds": 0.0, "last line": ""})
                    continue
                taken = [free.pop(0) for _ in range(min(part.devices, len(devices)))]
                running[pool.submit(run, part, command, min(part.seconds, left), options, taken)] = taken
                continue
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                free = sorted(free + running.pop(future))
                ended(future.result())


def chosen(options: argparse.Namespace) -> list[tuple[Part, str]]:
    """The parts asked for and their commands, in order."""
    parts = {part.name: part for part in PARTS}
    names = options.parts.split(",") if options.parts else PLANS.get(options.plan, tuple(parts))
    skipped = options.skip.split(",")
    unknown = sorted({*names, *skipped} - parts.keys() - {""})
    if unknown:
        raise SystemExit(f"no part {unknown[0]!r}; there are: {', '.join(parts)}")
    wanted = [parts[name] for name in names if name not in skipped]
    pairs = [(part, part.smoke if options.smoke else part.command) for part in wanted]
    return [(part, command) for part, command in pairs if command]


def main() -> None:
    """Runs the parts and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=580.0, help="Of all parts together.")
    parser.add_argument("--parts", default="", help="Comma-separated: " + ", ".join(part.name for part in PARTS))
    parser.add_argument("--plan", default="", choices=["", *PLANS], help="A list of parts and their order.")
    parser.add_argument("--peer-python", default=sys.executable, help="The interpreter that can import vLLM.")
    parser.add_argument("--skip", default="", help="Parts that are done.")
    parser.add_argument("--smoke", action="store_true", help="Tiny stand-ins, which need no GPU.")
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    run_all(chosen(options), options, [""] if options.smoke else devices_here())


if __name__ == "__main__":
    main()
