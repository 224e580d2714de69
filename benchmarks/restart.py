"""How long no engine serves after a kill -9 of it: with another process standing by, with weights kept, with neither.

    python -m benchmarks.restart
    python -m benchmarks.restart --kills 5 -- /models/qwen3
    python -m benchmarks.restart --shape llama-8b --rows "standing by,weights kept"     # writes the files for a while
    python -m benchmarks.restart --prompt-words 8000 -- --kv-offloading-size 1 --plugin.offload.shared true

Prints a JSON report: seconds from the kill until `/ready` answers 200 again, those until the first token of a prompt
that was answered before the kill, how many of its tokens were found, the engines that read weights and those that found
them, what the parts of their starts took, and the load of the machine meanwhile. `--rows` names the rows to measure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import httpx

from benchmarks import offline_gpu
from benchmarks.server_share import write_model
from benchmarks.soak_server import SoakServer

_TICKS = os.sysconf("SC_CLK_TCK")
FILE_BYTES = 4 << 30
#: What is measured, and the arguments of its server.
ROWS: dict[str, tuple[str, ...]] = {
    "standing by": (),
    "weights kept": ("--keep-weights",),
    "none": ("--no-standby-engine",),
}


def measure(arguments: Sequence[str], kills: int, num_words: int) -> dict[str, Any]:
    """Kills the engine of one server so many times."""
    server = SoakServer([*arguments, "--enable-prompt-tokens-details"])
    try:
        found = [_restart(server, num_words, standby="--no-standby-engine" not in arguments) for _ in range(kills)]
        text = server.text()
        server.stop()
    finally:
        server.close()
    ready, first, cached = zip(*found, strict=True)
    return {
        "median": sorted(ready)[kills // 2],
        "all": ready,
        "first token": {"median": sorted(first)[kills // 2], "all": first},
        "found tokens": cached,
        "weights": {"read": text.count("of weights in "), "found": text.count("none is read; found in")},
        "starts": re.findall(r"started: (.*)", text),
        "load": round(os.getloadavg()[0], 1),
    }


def _restart(server: SoakServer, num_words: int, standby: bool) -> tuple[float, float, int]:
    """Seconds until an engine was ready and until its first token, and how many tokens of the prompt it found."""
    if standby:
        _until_loaded(server)
    with httpx.Client(base_url=server.url, timeout=600) as client:
        prompt = " ".join(f"{number} foxes" for number in range(num_words // 2)) or "Hello"
        body = {"prompt": prompt, "max_tokens": 1}
        client.post("/v1/completions", json=body).raise_for_status()
        time.sleep(2)  # until its blocks are saved
        start = time.perf_counter()
        server.kill("engine")
        for status in (503, 200):
            while client.get("/ready").status_code != status:
                time.sleep(0.005)
        ready = time.perf_counter() - start
        answer = client.post("/v1/completions", json=body).raise_for_status()
        first = time.perf_counter() - start
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return round(ready, 2), round(first, 2), details.get("cached_tokens") or 0


def write_checkpoint(shape: str, folder: Path) -> None:
    """A model of this shape in files of some GB, whose weights repeat after 16 million."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model(shape, folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    some = (torch.randn(1 << 24) * 0.02).bfloat16()
    tensors: dict[str, Any] = {}
    left = list(model.state_dict().items())
    for number, (name, tensor) in enumerate(left, 1):
        count = prod(tensor.shape)
        tensors[name] = some.repeat(-(-count // len(some)))[:count].view(tensor.shape).clone()
        if sum(one.nbytes for one in tensors.values()) > FILE_BYTES or number == len(left):
            save_file(tensors, folder / f"model-{number:05}.safetensors", {"format": "pt"})
            tensors.clear()


def _until_loaded(server: SoakServer) -> None:
    """Waits until the process that stands by has nothing to do any more."""
    used, before = -1.0, -2.0
    while used < 1 or used != before:
        time.sleep(1)
        for pid in server.pids("standby"):
            before, used = used, _processor_seconds(pid)


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def main() -> None:
    """All rows, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="of each")
    parser.add_argument("--rows", default=",".join(ROWS), help="of the report, separated by commas")
    parser.add_argument("--prompt-words", type=int, default=1, help="of the prompt, about")
    parser.add_argument(
        "--shape", choices=list(offline_gpu.MODELS), help="of the model; default: that of the arguments"
    )
    parser.add_argument("--folder", type=Path, help="where its files go for a while")
    parser.add_argument("--json", type=Path)
    parser.add_argument("arguments", nargs="*", help="for `frame serve`, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = options.arguments
        if options.shape is not None:
            write_checkpoint(options.shape, Path(folder))
            arguments = [folder, "--dtype", "bfloat16", "--max-model-len", "8192", *arguments]
        report = {
            name: measure([*arguments, *ROWS[name]], options.kills, options.prompt_words)
            for name in options.rows.split(",")
        }
    print(text := json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
