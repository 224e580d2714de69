"""BitNet b1.58 with weights in full: a norm before the last product of each part, relu² as the gate."""

from __future__ import annotations

from typing import Any

from .dense import DenseDecoder, Traits


class BitNetForCausalLM(DenseDecoder):
    """BitNet 2B in 16 bits."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            activation=config.hidden_act,
            sub_norms=("attn_sub_norm", "ffn_sub_norm"),
        )
