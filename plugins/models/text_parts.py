"""Text parts of models that also see, and whose text parts are those of other families but for names and positions.

Positions have three axes (M-RoPE), which are equal in text. The tensors of the part that sees are not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from .dense import Rope, Traits
from .glm import Glm4ForCausalLM
from .glm4_moe import Glm4MoeForCausalLM
from .qwen2 import Qwen2ForCausalLM
from .qwen3 import Qwen3ForCausalLM

_RENAMES = ((r"^model\.language_model\.", "model."), (r"^language_model\.", ""))
_SEES = r"(model\.)?visual\..*"


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2-VL and Qwen2.5-VL: the frequencies of each axis lie together."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (*_RENAMES, *Qwen2ForCausalLM.renames)
    ignores: ClassVar[Sequence[str]] = (*Qwen2ForCausalLM.ignores, _SEES)


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3-VL: the frequencies of the axes take turns."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (*_RENAMES, *Qwen3ForCausalLM.renames)
    ignores: ClassVar[Sequence[str]] = (*Qwen3ForCausalLM.ignores, _SEES)


class Glm4vForConditionalGeneration(Glm4ForCausalLM):
    """GLM-4.1V: pairs of neighbours, the frequencies of each axis together."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (*_RENAMES, *Glm4ForCausalLM.renames)
    ignores: ClassVar[Sequence[str]] = (*Glm4ForCausalLM.ignores, _SEES)

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        return replace(super().traits(config, index), rope=Rope(interleaved=True))


class Glm4vMoeForConditionalGeneration(Glm4MoeForCausalLM):
    """GLM-4.5V and 4.6V: halves of heads, the frequencies of each axis together."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (*_RENAMES, *Glm4MoeForCausalLM.renames)
    ignores: ClassVar[Sequence[str]] = (*Glm4MoeForCausalLM.ignores, _SEES)
