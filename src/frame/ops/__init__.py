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
    from frame.core.ops.adapters import (
        AdapterWeights as AdapterWeights,
        ExpertAdapters as ExpertAdapters,
        SlotGroups as SlotGroups,
    )
    from frame.core.ops.attention import (
        dequantize_kv as dequantize_kv,
        quantize_kv as quantize_kv,
    )
    from frame.core.ops.layers import (
        NO_BIASES as NO_BIASES,
        ExpertBiases as ExpertBiases,
        Norm as Norm,
        Positions as Positions,
        RowParts as RowParts,
        gated as gated,
    )
    from frame.core.ops.quantized import (
        CodedWeights as CodedWeights,
        quantize_rows as quantize_rows,
        unpack_nibbles as unpack_nibbles,
    )
    from frame.core.ops.states import (
        ScanWeights as ScanWeights,
        StateRows as StateRows,
    )
    from frame.core.ops.step import (
        StepBuffers as StepBuffers,
        StepSizes as StepSizes,
    )
    from frame.ops.chunked import (
        gated_delta_chunked as gated_delta_chunked,
        ssd_scan_chunked as ssd_scan_chunked,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
