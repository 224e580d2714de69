"""Baichuan: query, key and value joined; the large model has ALiBi, the small one rotary positions, under one name.

Baichuan 2 scales each row of its head to length 1.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from frame.layers import Head

from .dense import DenseDecoder, Rope, Traits

#: The width of the 13B models.
ALIBI_WIDTH = 5120
#: Words of Baichuan 2; the first models have 64,000.
UNIT_HEAD_WORDS = 125696


class BaichuanForCausalLM(DenseDecoder):
    """Baichuan 7B and 13B, Baichuan 2."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        alibi = config.hidden_size >= ALIBI_WIDTH
        rope = None if alibi else Rope()
        return Traits(inputs=("W_pack",), rope=rope, alibi=alibi, activation=config.hidden_act)

    def finish_load(self) -> None:
        if self.config.vocab_size >= UNIT_HEAD_WORDS and isinstance(self.head, Head):
            self.head.table.unpack_weights()
            rows = self.head.table.weight
            rows.copy_(functional.normalize(rows.float()).to(rows.dtype))
        super().finish_load()
