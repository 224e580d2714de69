"""One timed start: `python -m …start_process FILE`, the configuration on stdin, the times as JSON into FILE."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(output: str) -> int:
    """Starts the engine, generates one token, writes the stages."""
    order = json.load(sys.stdin)
    stages = [("python and frame", time.time() - order["began"])]
    mark = time.perf_counter()

    def stage(name: str, of_which: list[tuple[str, float]] | None = None) -> None:
        nonlocal mark
        seconds = time.perf_counter() - mark
        stages.extend(of_which or [])
        stages.append((name, seconds - sum(part for _, part in of_which or [])))
        mark = time.perf_counter()

    import torch

    del torch
    stage("import torch")
    from frame import LLM, LLMEngine, SamplingParams
    from frame.settings import FrameConfig

    config: Any = FrameConfig.model_validate(order["config"])
    stage("import the engine")
    try:
        engine = LLMEngine.from_config(config)
    except (ValueError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    stage("rest of the engine", [(name, seconds) for name, seconds in engine.core.info.stages])
    ready = time.time() - order["began"]
    params = SamplingParams(max_tokens=1, detokenize=False)
    LLM.from_engine(engine).generate([{"prompt_token_ids": [1]}], params, use_tqdm=False)
    stage("first token")
    times = {"stages": stages, "ready": ready, "first_token": time.time() - order["began"]}
    Path(output).write_text(json.dumps(times), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
