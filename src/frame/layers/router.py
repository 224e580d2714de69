"""A router: which experts compute a token, and with what weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from frame.core.interfaces.experts import RouterSpec, Routing
from frame.core.layers.build import Build
from frame.core.layers.linear import Linear
from frame.core.layers.methods import PlainLinear
from frame.core.layers.weights import WeightSlot

from .normed import normed_linear, plain_norm


class Router(nn.Module):
    """Logits for all experts from a linear layer, and `choose`, which `spec` describes; the same on every rank.

    `linear` maps [T, hidden_size] to [T, num_experts]; call it through `normed`, so that one op may norm as well. A
    `wide` router keeps its weight, and multiplies, in float32. A `corrected` one reads its bias from the tensor
    `correction`, by default "PREFIX.e_score_correction_bias", and keeps it in float32; its shape may have ones before
    the experts, in number `correction_axes`.
    """

    def __init__(
        self,
        build: Build,
        prefix: str,
        hidden_size: int,
        spec: RouterSpec,
        *,
        bias: bool = False,
        correction: str | None = None,
        correction_axes: int = 1,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.ops = spec, build.ops
        self.linear = build.linear(prefix, hidden_size, spec.num_experts, bias=bias, exact=True)
        self.widens = wide and build.dtype != torch.float32
        if self.widens:
            self.linear.float()
        self._shape = (*(1,) * (correction_axes - 1), spec.num_experts)
        self.correction: nn.Parameter | None = None
        self._correction_name = correction or f"{prefix}.e_score_correction_bias"
        if spec.corrected:
            empty = torch.empty(spec.num_experts, dtype=torch.float32, device=build.device)
            self.correction = nn.Parameter(empty, requires_grad=False)

    def choose(self, logits: Tensor) -> Routing:
        """The experts of each token from its logits [T, num_experts]."""
        return Routing(*self.ops.route(logits, self.spec, self.correction))

    def normed(self, norm: nn.Module, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, normed, total), where norm(hidden, residual) gives (normed, total); see `normed_linear`."""
        if not self.widens:
            return normed_linear(norm, self.linear, hidden, residual)
        normed, total = (norm(hidden), hidden) if residual is None else norm(hidden, residual)
        return self.linear(normed.float()), normed, total

    def normed_choice(self, norm: nn.Module, hidden: Tensor, residual: Tensor | None) -> tuple[Routing, Tensor, Tensor]:
        """(the experts of each token, normed, total): `choose` of what `normed` gives, in one op where one does all."""
        linear, given = self.linear, None if self.widens else plain_norm(norm, self.linear)
        if residual is not None and given is not None and isinstance(linear, Linear) and _is_stored_plain(linear):
            chosen = linear.weight, linear.bias, self.spec, self.correction
            weights, ids, normed, total = self.ops.norm_route(hidden, residual, given, *chosen)
            return Routing(weights, ids), normed, total
        logits, normed, total = self.normed(norm, hidden, residual)
        return self.choose(logits), normed, total

    def forward(self, hidden: Tensor) -> Routing:
        """hidden [T, hidden_size] → the experts of each token."""
        return self.choose(self.linear(hidden.float() if self.widens else hidden))

    def weight_slots(self) -> list[WeightSlot]:
        if self.correction is None:
            return []
        return [WeightSlot(self._correction_name, self._shape, self.correction.view(self._shape))]


def _is_stored_plain(linear: Linear) -> bool:
    """Whether the weight is of the activations' type, and nothing is added to the product."""
    return type(linear.method) is PlainLinear
