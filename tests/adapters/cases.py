"""PEFT adapters of tiny models, and the tokens that PEFT's merged weights give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

#: What engines of these tests are made with.
SMALL = {
    "dtype": "float32",
    "num_gpu_blocks_override": 200,
    "max_model_len": 128,
    "enable_lora": True,
    "max_lora_rank": 16,
    "max_num_batched_tokens": 64,
}


def make_adapter(
    base: Path, folder: Path, *, seed: int, strength: float = 0.2, kind: str = "CausalLM", **settings: Any
) -> Path:
    """Writes an adapter of random matrices, large enough to change the tokens."""
    import transformers
    from peft import LoraConfig, get_peft_model

    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(base, dtype=torch.float32)
    settings = {"target_modules": "all-linear", "r": 8, "lora_alpha": 16, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(**settings))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, strength)
    adapted.save_pretrained(folder)
    return folder


def merged_tokens(base: Path, adapter: Path | None, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The greedy tokens of transformers' model, with the adapter merged into its weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(made[0, len(prompt) :].tolist())
    return found
