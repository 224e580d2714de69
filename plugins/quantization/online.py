"""Formats that weights get while they load: int8 and int4. Of a checkpoint that is not quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from frame.interfaces import ExpertMethod, ExpertSpec, LinearMethod, LinearSpec, Quantization

from .experts import RoundedExperts
from .packed import RoundedPacked
from .scaled import RoundedLinear

#: Columns that share a scale of 4-bit weights.
GROUP = 128
#: Layers with fewer outputs are gates and scores: quick anyway, and not to be rounded.
LEAST_OUTPUTS = 16


def is_rounded(spec: LinearSpec) -> bool:
    """Whether a layer's weights are worth rounding."""
    return not spec.exact and min(part.total for part in spec.rows) >= LEAST_OUTPUTS


def group_for(*widths: int) -> int:
    """The largest group of columns, up to `GROUP`, that divides all `widths`; 0 where not even 8 columns do."""
    return next((size for size in (GROUP, 64, 32, 16, 8) if all(width % size == 0 for width in widths)), 0)


class Int8(Quantization):
    """Eight bits with a scale for each row."""

    online = True

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        del quantization_config
        return False

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return RoundedLinear(torch.int8) if is_rounded(spec) else None

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return RoundedExperts(torch.int8)

    @property
    def numerics(self) -> str:
        return "int8 weights by rows"


class Int4(Quantization):
    """Four bits with a scale for each group of 128 columns, or of as many as divide a rank's share."""

    online = True

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        del quantization_config
        return False

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        group = group_for(spec.width)
        return RoundedPacked(group) if group and is_rounded(spec) else None

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return RoundedExperts(None)

    @property
    def numerics(self) -> str:
        return "int4 weights by groups"
