"""What the process beside the worker compiles is all that a start needs: the worker itself compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from frame.testing.checkpoints import make_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
START = """
import json, logging, sys
from triton import knobs
from frame import LLM, SamplingParams
logging.basicConfig(level=logging.DEBUG)
made = []
def listen(*, src, cache_hit, **_):
    if not cache_hit:
        made.append(src.name)
knobs.compilation.listener = listen
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, gpu_memory_utilization=0.1)
llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
print(json.dumps(made))
"""


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "gemma2"])
def test_the_worker_compiles_nothing_itself(family, tmp_path):
    folder = make_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, head_dim=128)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", START, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    assert "compiled once the weights are loaded" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr[-2000:]
