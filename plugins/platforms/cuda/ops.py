"""The ops for which this platform has kernels that are faster than torch's, or that do not wait for the device.

Knows no model and no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import SILU, Gating
from frame.kernels import (
    activation,
    adapters,
    coded_experts,
    coded_rows,
    convolution,
    delta,
    experts,
    filters,
    join,
    joined_adapters,
    latent_rotary,
    logits,
    logprobs,
    merge,
    nibble_rows,
    norm,
    norm_linear,
    quantized,
    rotary,
    routing,
    sampling,
    scans,
    step,
)
from frame.kernels.codebook import dequantize_table, fits
from frame.kernels.expert_adapters import adapted_experts
from frame.kernels.hopper import is_hopper
from frame.kernels.linear_invariant import hopper_product, linear_invariant, linear_silu_mul_invariant
from frame.kernels.nibbles import Nibbles
from frame.ops import (
    NO_BIASES,
    CodedWeights,
    ExpertAdapters,
    ExpertBiases,
    Norm,
    Ops,
    RowParts,
    StepBuffers,
    StepSizes,
)

from ..options import HopperProducts
from .products.choice import Products
from .products.halved import halved
from .products.rounded import product as rounded_product, ringed

#: Rows that other kernels than `ringed` do not round although they may, as that takes a launch more and saves no time.
_FEW_EXACT_ROWS = 16


class CudaOps(Ops):
    """The ops for which there are kernels that are faster, or that do not wait for the device."""

    def __init__(
        self,
        hopper_products: HopperProducts = "measured",
        hopper_experts: bool = True,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.products = Products(device or torch.device("cuda", 0))
        self._measures = hopper_products != "deterministic"
        self._always_ours = hopper_products == "all"
        self._groups = hopper_experts and self._measures

    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    silu_mul = staticmethod(activation.silu_mul)
    gelu_tanh_mul = staticmethod(activation.gelu_tanh_mul)
    norm_rotary = staticmethod(rotary.norm_rotary)  # before the function `rotary` hides the module
    rotary = staticmethod(rotary.rotary)
    latent_rotary = staticmethod(latent_rotary.latent_rotary)
    merge_parts = staticmethod(merge.merge_parts)
    route = staticmethod(routing.route)
    place_experts = staticmethod(routing.place_experts)
    causal_conv = staticmethod(convolution.causal_conv)
    ssd_scan = staticmethod(scans.ssd_scan)
    selective_scan = staticmethod(scans.selective_scan)
    gated_delta = staticmethod(delta.gated_delta)
    add_adapters = staticmethod(adapters.add_adapters)
    add_joined_adapters = staticmethod(joined_adapters.add_joined_adapters)
    spread_slots = staticmethod(adapters.spread_slots)
    write_rows = staticmethod(step.write_rows)
    write_values = staticmethod(step.write_values)
    advance = staticmethod(step.advance)
    greedy = staticmethod(sampling.greedy)
    draw = staticmethod(sampling.draw)
    best_of_part = staticmethod(sampling.best_of_part)
    join_parts = staticmethod(join.join_parts)
    keep_threshold = staticmethod(filters.keep_threshold)
    add_bias = staticmethod(logits.add_bias)
    apply_bitmask = staticmethod(logits.apply_bitmask)
    penalize = staticmethod(logits.penalize)
    count_tokens = staticmethod(logits.count_tokens)
    top_logprobs = staticmethod(logprobs.top_logprobs)

    @staticmethod
    def build_inputs(
        buffers: StepBuffers, token_ids: Tensor, tables: Sequence[Tensor], rows: Tensor, sizes: StepSizes
    ) -> None:
        """A launch for each KV group, the first of which does the rest; an encoder has no groups."""
        build = step.build_inputs if tables else Ops.build_inputs
        build(buffers, token_ids, tables, rows, sizes)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the quickest kernel for the shape; by one kernel for all where bits must not depend on the batch."""
        if self.invariant:
            return linear_invariant(x, weight, bias)
        if x.dim() != 2:
            return super().linear(x, weight, bias)
        return self._multiply(x, weight, bias, gated=False)

    def fused_experts(
        self, hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, *, of_all: int = 0,
        first: int = 0, parts: RowParts | None = None, gating: Gating = SILU, biases: ExpertBiases = NO_BIASES,
    ) -> Tensor:  # fmt: skip
        given, how = (hidden, gate_up, down, weights, ids), (gating, biases)
        if self.invariant:
            return experts.fused_experts_invariant(*given, first, *how)
        if self._groups and (out := experts.hopper_experts(*given, of_all, first, parts, *how)) is not None:
            return out
        return experts.fused_experts(*given, of_all=of_all, first=first, parts=parts, gating=gating, biases=biases)

    def adapted_experts(
        self, hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, adapters: ExpertAdapters,
        slots: Tensor, *, of_all: int = 0, first: int = 0, gating: Gating = SILU, biases: ExpertBiases = NO_BIASES,
    ) -> Tensor:  # fmt: skip
        return adapted_experts(
            hidden, gate_up, down, weights, ids, adapters, slots,
            of_all=of_all, first=first, gating=gating, biases=biases, invariant=self.invariant,
        )  # fmt: skip

    def coded_experts(
        self, hidden: Tensor, gate_up: CodedWeights, down: CodedWeights, weights: Tensor, ids: Tensor, *,
        of_all: int = 0, first: int = 0, parts: RowParts | None = None, gating: Gating = SILU,
        biases: ExpertBiases = NO_BIASES, rounds: bool = False,
    ) -> Tensor:  # fmt: skip
        """From the codes where the kernel takes them; of very many rows from weights that are put together before."""
        how: dict[str, Any] = {"of_all": of_all, "first": first, "parts": parts, "gating": gating, "biases": biases}
        given = hidden, gate_up, down, weights, ids
        several = coded_experts.many_rows(len(ids), ids.shape[1], max(of_all, len(gate_up.codes)))
        dequantizes = several and self._groups and not self.invariant and is_hopper(hidden.device)
        if dequantizes or not all(self._takes_codes(hidden, one) for one in (gate_up, down)):
            return super().coded_experts(*given, rounds=rounds, **how)
        rounded = rounds and torch.cuda.get_device_capability(hidden.device) >= (8, 9)
        return coded_experts.fused_experts(*given, **how, rounds=rounded, invariant=self.invariant)

    def _takes_codes(self, hidden: Tensor, weight: CodedWeights) -> bool:
        """Whether the experts' kernel multiplies `hidden` by the weight."""
        floats = any(one.dtype.itemsize == 1 and one.dtype.is_floating_point for one in (weight.codes, weight.scales))
        old = floats and torch.cuda.get_device_capability(hidden.device) < (8, 9)
        return not old and hidden.dtype.itemsize == 2 and hidden.stride(1) == 1 and coded_experts.fits(weight)

    def dequantize_table(
        self,
        packed: Tensor,
        scales: Tensor,
        table: Tensor,
        numbers: Tensor | None = None,
        dtype: torch.dtype | None = None,
        *,
        is_float4: bool = False,
    ) -> Tensor:
        """In one launch, where the chip has the type of the scales and the kernel takes their groups."""
        ours = not self._lacks(scales.dtype, packed.device) and packed.is_contiguous() and scales.is_contiguous()
        if not ours or not fits(packed.shape[-1] * 8 // scales.shape[-1]):
            return super().dequantize_table(packed, scales, table, numbers, dtype)
        return dequantize_table(packed, scales, table, numbers, dtype, is_float4=is_float4)

    def table_linear(
        self, x: Tensor, packed: Tensor, scales: Tensor, table: Tensor, numbers: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Of few rows from the nibbles, of many from the weight that is put together before."""
        weight = Nibbles(packed, scales, table, numbers)
        is_few = self._reads_codes(x) and len(x) <= nibble_rows.FEW_ROWS and nibble_rows.fits(weight)
        if is_few and not self._lacks(scales.dtype, packed.device):
            return nibble_rows.product(x, weight, bias)
        return super().table_linear(x, packed, scales, table, numbers, bias)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `linear`; the gate is in the product's kernel where that is quicker."""
        if x.dim() != 2:
            return super().linear_silu_mul(x, weight, bias)
        if self.invariant:
            return linear_silu_mul_invariant(x, weight, bias)
        return self._multiply(x, weight, bias, gated=True)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
        if self._always_ours and (out := hopper_product(x, weight, bias, gated=gated)) is not None:
            return out
        if self._measures or len(x) == 1:
            return self.products.multiply(x, weight, bias, gated=gated)
        return super().linear_silu_mul(x, weight, bias) if gated else super().linear(x, weight, bias)

    def norm_linear(
        self, x: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In one kernel for one row, unless bits must not depend on the batch."""
        fused = norm_linear.norm_linear if self._is_one_row(x) else super().norm_linear
        return fused(x, residual, norm, weight, bias)

    def norm_linear_silu_mul(
        self, x: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """In one kernel for one row, unless bits must not depend on the batch."""
        fused = norm_linear.norm_linear_silu_mul if self._is_one_row(x) else super().norm_linear_silu_mul
        return fused(x, residual, norm, weight, bias)

    def dequantize(
        self,
        codes: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        zeros: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """In one launch, where the chip has the type of the codes and the blocks fit its steps."""
        if not self._has_kernels(codes, scales, block):
            return super().dequantize(codes, scales, block, zeros, dtype)
        return quantized.dequantize(codes, scales, block, zeros, dtype or torch.float32)

    def dequantize_packed(
        self, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """As `dequantize`."""
        block = (1, packed.shape[-1] * 8 // scales.shape[-1])
        if not self._has_kernels(packed, scales, block):
            return super().dequantize_packed(packed, scales, zeros, dtype)
        return quantized.dequantize(packed, scales, block, zeros, dtype or torch.float32)

    def scaled_linear(
        self, x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None = None,
        zeros: Tensor | None = None, input_scale: Tensor | None = None, *, rounds: bool = False,
    ) -> Tensor:  # fmt: skip
        """Of few rows from the codes, of many with rounded rows, or from the weight that is put together before."""
        if self._reads_codes(x) and self._has_kernels(codes, scales, block):
            if rounds and zeros is None and (out := ringed(x, codes, scales, block, bias, input_scale)) is not None:
                return out
            if len(x) <= (_FEW_EXACT_ROWS if rounds else quantized.FEW_ROWS):
                return coded_rows.few_rows(x, codes, scales, block, zeros, bias)
            if len(x) <= quantized.FEW_ROWS:
                out = coded_rows.measured(x, codes, scales, block, zeros, bias)
                if out is not None:
                    return out
            if rounds and zeros is None:
                return rounded_product(x, codes, scales, block, bias, input_scale)
        return super().scaled_linear(x, codes, scales, block, bias, zeros, input_scale, rounds=rounds)

    def packed_linear(
        self, x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Of few rows from the nibbles, of many from the weight that is put together before."""
        block = (1, packed.shape[-1] * 8 // scales.shape[-1])
        is_few = self._reads_codes(x) and len(x) <= quantized.FEW_ROWS
        if is_few and self._has_kernels(packed, scales, block):
            if (out := halved(x, packed, scales, block, zeros, bias)) is not None:
                return out
            return coded_rows.few_rows(x, packed, scales, block, zeros, bias)
        return super().packed_linear(x, packed, scales, zeros, bias)

    def _reads_codes(self, x: Tensor) -> bool:
        """Whether the kernels that multiply by codes take x; what heeds no batch is multiplied as other weights are."""
        return not self.invariant and x.dim() == 2 and x.stride(1) == 1 and x.dtype.itemsize == 2 and len(x) > 0

    def _has_kernels(self, codes: Tensor, scales: Tensor, block: tuple[int, int]) -> bool:
        return not self._lacks(codes.dtype, codes.device) and bool(
            quantized.columns_of_step(block[1], codes.shape[-1], scales.shape[-1])
        )

    @staticmethod
    def _lacks(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the chip has no 8-bit floats and these are some."""
        floats = dtype.is_floating_point and dtype.itemsize == 1
        return floats and torch.cuda.get_device_capability(device) < (8, 9)

    def _is_one_row(self, x: Tensor) -> bool:
        return not self.invariant and x.dim() == 2 and x.shape[0] == 1 and x.shape[1] <= norm_linear.MAX_INPUTS
