"""Tiny random checkpoints of every class that transformers generates with, and whether frame gives its tokens."""

from __future__ import annotations

import contextlib
import random
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
    8: "qk_rope_head_dim num_experts num_local_experts n_routed_experts moe_num_experts",
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
_TWEAKS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
}
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
    values: dict[str, Any] = {}
    for size, names in _SIZES.items():
        values |= {
            name: size for name in names.split() if isinstance(known.get(name), int) or name == "head_dim" in known
        }
    values |= {
        name: token
        for name, token in _TOKENS.items()
        if name in known or name in ("pad_token_id", "eos_token_id", "bos_token_id")
    }
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        values[name] = None if isinstance(known.get(name), list) else known.get(name)
        if values[name] is None:
            del values[name]
    if "is_decoder" in known:
        values["is_decoder"] = True
    values |= {"initializer_range": 0.2, **tweaks}
    return kind(**{name: value for name, value in values.items() if value is not ...})


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
