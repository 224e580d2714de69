"""Models in GGUF files are served as transformers serves their dequantised twins, token for token."""

from __future__ import annotations

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.plugin_host.model_sources import fetch_model
from frame.core.plugin_host.registry import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, greedy, prompts, running
from frame.testing.model_suite import continue_greedily
from tests.gguf.files import write_gguf

NUM_TOKENS = 24
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 2}
FOURS = [(r"attn_v|ffn_down|output\.", "Q8_0"), (r"attn_|ffn_(up|gate|down)|token_embd", "Q4_0")]
MIXED_K = [(r"attn_v|ffn_down\.|token_embd", "Q6_K"), (r"attn_q|ffn_up", "Q4_K"), (r"attn_k", "Q5_K"),
           (r"ffn_gate\.", "Q3_K"), (r"attn_output", "Q2_K")]  # fmt: skip
FIVES = [(r"attn_|ffn_down", "Q5_1"), (r"ffn_up|output\.", "Q5_0"), (r"ffn_gate|token_embd", "Q4_1")]
TABLED = [(r"attn_q|ffn_down\.|token_embd", "IQ4_XS"), (r"attn_[kv]|ffn_up", "IQ4_NL"), (r"ffn_gate\.", "MXFP4"),
          (r"attn_output", "TQ1_0")]  # fmt: skip
FLOATS = [(r"_exps|token_embd", "MXFP4"), (r"attn_|_shexp", "IQ4_NL")]
LIBRARY = [(r"attn_q", "IQ2_XXS"), (r"attn_k", "IQ1_M"), (r"attn_v", "IQ4_XS"), (r"attn_output", "IQ3_XXS"),
           (r"ffn_up", "IQ2_S"), (r"ffn_gate\.", "IQ3_S"), (r"ffn_down", "IQ1_S"),
           (r"token_embd", "IQ2_XS")]  # fmt: skip
MIXED_EXPERTS = [(r"gate_exps|up_exps", "IQ2_XXS"), (r"down_exps", "Q6_K"), (r"_shexp", "IQ3_S"), (r"attn_", "Q8_0")]
HALVES = [(r"attn_|token_embd", "F16"), (r"ffn_", "BF16")]
MOE = {"moe_intermediate_size": 64, "mlp_only_layers": [], "shared_expert_intermediate_size": 32}
WIDE_MOE = {**MOE, **WIDE, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
#: Family of the table, types of the tensors, changes of the family's configuration.
CASES = {
    "llama, mixed K": ("llama-tied", MIXED_K, WIDE),
    "llama, tables": ("llama-tied", TABLED, WIDE),
    "llama, values of the library": ("llama-tied", LIBRARY, WIDE),
    "llama, biases": ("llama", FIVES, {}),
    "llama, halves": ("llama", HALVES, {}),
    "llama 3": ("llama-llama3", FOURS, {}),
    "mistral": ("mistral", FOURS, {"sliding_window": None}),
    "mixtral": ("mixtral", FOURS, {"intermediate_size": 64, "sliding_window": None}),
    "qwen2": ("qwen2", FOURS, {}),
    "qwen3": ("qwen3", FOURS, {}),
    "qwen2-moe": ("qwen2-moe", FOURS, MOE),
    "qwen3-moe": ("qwen3-moe", FIVES, MOE),
    "qwen2-moe, tables": ("qwen2-moe", FLOATS, MOE),
    "qwen2-moe, values of the library": ("qwen2-moe", MIXED_EXPERTS, WIDE_MOE),
    "gemma2": ("gemma2", FOURS, {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", FOURS, {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None}),
    "phi3": ("phi3", FOURS, {}),
}
LLAMA3 = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}  # fmt: skip


def served(model, cache, count=NUM_TOKENS, **settings):
    config = fetch_model(from_flat({**SMALL, "model": str(model), "download_dir": str(cache), **settings}))
    with running(config, Registry.load()) as engine:
        return greedy(engine, prompts(512), count)


def expected(folder, count=NUM_TOKENS):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [continue_greedily(model, prompt, count) for prompt in prompts(512)]


def test_weights_that_sleep_dropped_are_whole_again(tmp_path):
    plain = make_checkpoint(tmp_path / "plain", "qwen2-moe", **MOE)
    file = write_gguf(plain, tmp_path / "m.gguf", FLOATS)
    config = from_flat({**SMALL, "model": str(file), "download_dir": str(tmp_path / "cache")})
    with running(fetch_model(config), Registry.load()) as engine:
        want = greedy(engine, prompts(512), 8)
        engine.call("sleep", {"keep": []})
        engine.call("wake_up")
        assert greedy(engine, prompts(512), 8) == want


#: Of these `make test` shows each type of blocks, each order of rows and the experts once.
SHOWN = (
    "llama, mixed K",
    "llama, tables",
    "llama, values of the library",
    "llama, halves",
    "gemma2",
    "qwen3-moe",
    "phi3",
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SHOWN else pytest.mark.matrix) for case in CASES]
)
def test_tokens_are_those_of_the_dequantised_model(case, tmp_path):
    family, kinds, overrides = CASES[case]
    overrides = {**overrides, **(LLAMA3 if family == "llama-llama3" else {})}
    plain = make_checkpoint(tmp_path / "plain", family, **overrides)
    file = write_gguf(plain, tmp_path / "model-Q4_K_M.gguf", kinds)
    assert served(file, tmp_path / "cache") == expected(plain)
