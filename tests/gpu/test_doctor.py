"""`frame doctor` says before loading about how many blocks the GPU's engine gets."""

from __future__ import annotations

import json

import pytest
import torch

from frame import EngineArgs, LLMEngine
from frame.core.cli.main import main
from frame.testing.checkpoints import make_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 16,
         "num_key_value_heads": 8, "vocab_size": 32000}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{}, {"enforce_eager": True}, {"num_layers": 24, "cpu_offload_gb": 0.4, "cpu_offload_ahead": 1}],
    ids=["captured", "eager", "offloaded"],
)
def test_predicted_blocks_are_about_those_of_the_engine(settings, tmp_path, capsys):
    settings = dict(settings)
    shape = {**SHAPE, "num_hidden_layers": settings.pop("num_layers", 3)}
    folder = str(make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, **shape))
    flags = ["--gpu-memory-utilization", "0.2", "--max-model-len", "256"]
    for name, value in settings.items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    assert main(["doctor", folder, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    arguments = EngineArgs(
        model=folder, skip_tokenizer_init=True, gpu_memory_utilization=0.2, max_model_len=256, **settings
    )
    engine = LLMEngine.from_engine_args(arguments)
    try:
        blocks = engine.core.scheduler._kv.pool.num_free + 1
    finally:
        engine.close()
    print(f"predicted {found['kv_cache']['num_blocks']} blocks, got {blocks}; {found['memory']}")
    assert found["kv_cache"]["num_blocks"] == pytest.approx(blocks, rel=0.04)
