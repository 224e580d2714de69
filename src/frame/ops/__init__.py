"""The ops that a platform may override, and the references that its own ones are made of.

The imports below are the list of names; each is done on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.lazy import lazy_names

if TYPE_CHECKING:
    from frame.core.ops import (
        Ops as Ops,
    )
    from frame.core.ops.attention import (
        dequantize_kv as dequantize_kv,
        quantize_kv as quantize_kv,
    )
    from frame.core.ops.experts import (
        fused_experts_invariant as fused_experts_invariant,
    )
    from frame.core.ops.linear import (
        linear_invariant as linear_invariant,
        rows_are_alike as rows_are_alike,
    )
    from frame.core.ops.norm import (
        Norm as Norm,
    )
    from frame.core.ops.rows import (
        each_row as each_row,
    )
    from frame.core.ops.step import (
        StepBuffers as StepBuffers,
        StepSizes as StepSizes,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
