"""Tiny random checkpoints of every class that transformers generates with, and whether frame gives its tokens."""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

#: What sizes are called in configurations → the tiny value.
_SIZES: Mapping[int, str] = {
    64: "hidden_size d_model n_embd dim model_dim embedding_size emb_dim word_embed_proj_dim",
    96: "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim d_inner "
    "intermediate_size_mlp feed_forward_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_key_value_heads multi_query_group_num num_experts_per_tok top_k moe_k num_experts_per_token moe_topk "
    "num_encoder_layers moe_top_k experts_per_token top_k_experts",
    4: "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_decoder_attention_heads "
    "num_encoder_attention_heads",
    16: "head_dim v_head_dim qk_nope_head_dim swa_head_dim swa_v_head_dim d_kv attention_head_dim global_head_dim",
    8: "qk_rope_head_dim rotary_dim num_experts num_local_experts n_routed_experts moe_num_experts",
    24: "sliding_window attention_window_size local_attention",
    32: "q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "expert_ffn_hidden_size moe_shared_expert_intermediate_size",
    256: "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_sequence_length max_target_positions",
    512: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    1: "n_group topk_group num_expert_group first_k_dense_replace n_shared_experts moe_num_shared_experts",
}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
#: Model type → what its tiny configuration sets besides, and what it leaves as the class has it (None).
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_TWEAKS: Mapping[str, Mapping[str, Any]] = {
    "axk1": {"head_dim": ...},
    "axk2": {"head_dim": ...},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "deepseek_v2": _ROUTED,
    "dots1": _ROUTED,
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gemma3n_text": {
        **_GEMMA3N, "intermediate_size": 96, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": {**_GEMMA3N, "hidden_size_per_layer_input": 16, "global_head_dim": 32},
    "gemma4_unified_text": {**_GEMMA3N, "hidden_size_per_layer_input": 16, "global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 24},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "tie_word_embeddings": False},
    "reformer": {
        "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16], "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16, "num_buckets": 4, "attention_head_size": 16,
    },
    "zamba": {
        "num_hidden_layers": 5, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8, "attention_head_dim": 32, "attention_hidden_size": 128,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_ngroups": 1, "n_mamba_heads": 8,
        "mamba_headdim": 16, "mamba_d_state": 8, "chunk_size": 8, "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
#: Tokens of the prompts, and how many each is continued with.
_PROMPTS = (33, 1, 17, 40)
_NUM_TOKENS = 12


def causal_classes() -> Iterator[tuple[str, str]]:
    """(class, model type) of every class that `AutoModelForCausalLM` may give, each once."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    seen = dict[str, str]()
    for model_type, found in names.items():
        for name in (found,) if isinstance(found, str) else found:
            if name not in seen or name.lower().startswith(model_type.replace("_", "")) or model_type.endswith("_text"):
                seen[name] = model_type
    yield from seen.items()


def tiny_config(model_type: str) -> Any:
    """The configuration of a model of a few thousand parameters."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    tweaks = dict(_TWEAKS.get(model_type, {}))
    known = _defaults(kind, tweaks)
    values = {**_tiny(known), "initializer_range": 0.2, **tweaks}
    return kind(**{name: value for name, value in values.items() if value is not ...})


def _tiny(known: Mapping[str, Any]) -> dict[str, Any]:
    """Tiny values for what a configuration says of sizes, also of the parts in it."""
    values: dict[str, Any] = dict(_TOKENS)
    for size, names in _SIZES.items():
        values |= {name: size for name in names.split() if isinstance(known.get(name), int)}
    if "num_key_value_heads" in known:
        values["num_key_value_heads"] = 4 if "kv_lora_rank" in known else 2
    if "head_dim" in known:
        values["head_dim"] = 8 if "qk_rope_head_dim" in known else 16
    if "is_decoder" in known:
        values["is_decoder"] = True
    for name, value in known.items():
        if isinstance(value, dict) and name.endswith("_config") and name != "per_layer_config":
            values[name] = {**value, **_tiny(value)}
            for key in ("layer_types", "mlp_layer_types", "head_dim"):
                if values[name].get(key) is not None and key not in _tiny(value):
                    del values[name][key]
    return values


def _defaults(kind: Any, tweaks: Mapping[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return dict(kind().to_dict())
    return dict(kind(**{name: value for name, value in tweaks.items() if value is not ...}).to_dict())


def write_checkpoint(folder: Path, name: str, model_type: str) -> Path:
    """A random checkpoint of the class, as transformers writes it; raises what the class raises."""
    import transformers

    from frame.testing.checkpoints import roughen

    config = tiny_config(model_type)
    config.architectures = [name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, name)._from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and float(parameter.std()) < 0.1:
                    parameter.normal_(0.0, 0.2)
        roughen(model, 1.0)
    model.save_pretrained(folder)
    return folder


def make_prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [draw.choices(range(3, 500), k=length) for length in _PROMPTS]


def reference(folder: Path, name: str) -> list[list[int]]:
    """What transformers continues each prompt with."""
    import transformers

    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in make_prompts():
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(_NUM_TOKENS):
                out = model(input_ids=torch.tensor([ids]), use_cache=False)
                ids.append(int(out.logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def generated(folder: Path, **settings: Any) -> tuple[list[list[int]], str]:
    """(what frame continues each prompt with, the name of the plugin that served the class)"""
    from frame import LLM, SamplingParams
    from frame.core.config.checkpoint import read_checkpoint
    from frame.core.plugin_host.model_choice import model_provider
    from frame.core.plugin_host.registry import Registry

    settings = {"max_model_len": 64, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 48, **settings}
    llm = LLM(model=str(folder), dtype="float32", skip_tokenizer_init=True, **settings)
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in make_prompts()],
            SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        config = llm.llm_engine.config
        name = model_provider(read_checkpoint(config), Registry.load()).name
        return [list(output.outputs[0].token_ids) for output in outputs], name
    finally:
        llm.close()


#: What the names of plugins mean in the table.
_HOW = {"*": "wrapped", "*recomputed": "recomputed"}
#: The table that the measure writes: class, model type, how frame runs it, and why not otherwise.
TABLE = Path(__file__).parents[2] / "docs" / "data" / "any_class.tsv"


def read_table() -> list[tuple[str, str, str, str]]:
    """(class, model type, "wrapped", "recomputed", "refused" or "not made", why) of each class."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [tuple((line + "\t\t\t").split("\t")[:4]) for line in lines]  # type: ignore[misc]


def measure(name: str, model_type: str) -> tuple[str, str]:
    """(how frame runs the class, why not otherwise), by a tiny checkpoint; "wrong" where its tokens differ."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_checkpoint(Path(folder), name, model_type)
            wanted = reference(Path(folder), name)
        except Exception as error:  # a class's own
            return "not made", _line(error)
        try:
            found, plugin = generated(Path(folder), model_impl="transformers")
        except Exception as error:  # frame's, which is what the table tells
            return "refused", _line(error)
        return _HOW[plugin] if found == wanted else "wrong", ""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def main(names: list[str]) -> None:
    """Measures the classes `names`, or all, and writes the table."""
    rows = {row[0]: row for row in read_table()} if TABLE.exists() else {}
    for name, model_type in causal_classes():
        if not names or name in names:
            how, why = measure(name, model_type)
            rows[name] = (name, model_type, how, why)
            print(name, how, why, flush=True)
            ordered = [rows[key] for key, _ in causal_classes() if key in rows]
            TABLE.write_text("".join("\t".join(row).rstrip() + "\n" for row in ordered), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
