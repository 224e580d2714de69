"""EXAONE 3: Llama under other names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .dense import DenseDecoder, Traits


class ExaoneForCausalLM(DenseDecoder):
    """EXAONE 3 and 3.5."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.ln_f\.", "model.norm."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.out_proj\.", ".o_proj."),
        (r"\.c_fc_0\.", ".gate_proj."),
        (r"\.c_fc_1\.", ".up_proj."),
        (r"\.c_proj\.", ".down_proj."),
    )
    ignores: ClassVar[Sequence[str]] = (r".*rotary.*\.inv_freq", r".*\.attn\.attention\.(bias|masked_bias)")

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(activation=config.hidden_act)
