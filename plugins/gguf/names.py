"""The names of tensors: those of GGUF files, and those that transformers gives them, by which layers know them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: What is done to a tensor on its way back: rows of heads put into the order of half-split rotary positions, or 1
#: taken from each value.
Change = Literal["", "queries", "keys", "minus one"]

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
#: Tensors that say how positions turn, which the description of the model holds.
IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PLAIN = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    **_PLAIN,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {**_PLAIN, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_MIXTRAL = {**_PLAIN, "ffn_gate_inp": "block_sparse_moe.gate"}
_QWEN_MOE = {
    **_PLAIN,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_PROJECTIONS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_W123 = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


@dataclass(frozen=True)
class NameTable:
    """The names of one model type, by transformers' name of it.

    `experts` are the stacked tensors of experts, of which each is "LAYER.`inside`.E.PART". `interleaved`: the converter
    permuted the rows of queries and keys. `shifted`: it added 1 to the weights of norms.
    """

    layer: Mapping[str, str]
    experts: Mapping[str, str] | None = None
    inside: str = "mlp.experts"
    interleaved: bool = False
    shifted: bool = False


TABLES: Mapping[str, NameTable] = {
    "llama": NameTable(_PLAIN, interleaved=True),
    "mixtral": NameTable(_MIXTRAL, _W123, "block_sparse_moe.experts", interleaved=True),
    "qwen2": NameTable(_PLAIN),
    "qwen3": NameTable(_PLAIN),
    "qwen2_moe": NameTable(_QWEN_MOE, _PROJECTIONS),
    "qwen3_moe": NameTable(_QWEN_MOE, _PROJECTIONS),
    "gemma": NameTable(_PLAIN, shifted=True),
    "gemma2": NameTable(_SANDWICH, shifted=True),
    "gemma3_text": NameTable(_SANDWICH, shifted=True),
    "phi3": NameTable(_PHI3),
}


@dataclass(frozen=True)
class Place:
    """Where a tensor of a file belongs: the name (without "weight") that layers know it by, and its end.

    `stacked` names the tensors of experts as "{}" with their number; `change` is what the tensor needs.
    """

    name: str
    end: str
    change: Change = ""
    stacked: bool = False


def place_of(name: str, table: NameTable) -> Place | None:
    """Where the tensor `name` belongs; None for one that is not read. Raises `ValueError` for an unknown one."""
    if IGNORED.fullmatch(name):
        return None
    part, _, end = name.rpartition(".")
    shifted: Change = "minus one" if table.shifted and part.endswith("norm") and end == "weight" else ""
    if part in _OUTER and end in ("weight", "bias"):
        return Place(_OUTER[part], end, shifted)
    match = _BLOCK.fullmatch(name)
    if match is not None:
        layer, part, end = match.groups()
        prefix = f"model.layers.{layer}"
        if table.experts and part in table.experts:
            return Place(f"{prefix}.{table.inside}.{{}}.{table.experts[part]}", end, stacked=True)
        if part in table.layer:
            turned: Mapping[str, Change] = {"attn_q": "queries", "attn_k": "keys"} if table.interleaved else {}
            return Place(f"{prefix}.{table.layer[part]}", end, turned.get(part, shifted))
    raise ValueError(f"tensor {name!r} has no place in a model of its architecture")
