"""A tiny random checkpoint of the example model, for tests: `write_checkpoint(folder)`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {
    "architectures": ["ExampleForCausalLM"],
    "model_type": "example",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def write_checkpoint(folder: Path) -> None:
    """Writes config.json and model.safetensors, the tensors under the names that the model's `renames` expect."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int, center: float = 0.0) -> Tensor:
        return center + 0.3 * torch.randn(shape, generator=draw)

    tensors = {"words.weight": random(259, 32), "last_norm.weight": random(32, center=1.0)}
    for layer in (f"trunk.{i}" for i in range(2)):
        tensors |= {
            f"{layer}.norm.weight": random(32, center=1.0),
            f"{layer}.mix.wq.weight": random(32, 32),
            f"{layer}.mix.wk.weight": random(16, 32),
            f"{layer}.mix.wv.weight": random(16, 32),
            f"{layer}.mix.wo.weight": random(32, 32),
            f"{layer}.grow.gate.weight": random(48, 32),
            f"{layer}.grow.up.weight": random(48, 32),
            f"{layer}.grow.down.weight": random(32, 48),
            f"{layer}.cache_hint": torch.zeros(1),
        }
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
