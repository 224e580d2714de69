"""PEFT's adapters of parameters that hold all experts of a layer (`target_parameters`), taken apart by expert.

Such a parameter has one A and one B for E experts: A [E · r, inputs], whose row e · r + k is row k of expert e, and B
[outputs, E · r], whose column k · E + e is column k of expert e. Before PEFT 0.20 inputs and outputs were exchanged for
parameters [E, outputs, inputs], which is the other product: W += (A_eᵀ) (B_eᵀ).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from frame.interfaces import ExpertSpec

from .peft_config import PeftConfig

#: The first version that writes A with the inputs and B with the outputs of every such parameter.
_IN_ORDER = (0, 20)


@dataclass(frozen=True)
class JoinedExperts:
    """The experts of one layer, with the layer's name in checkpoints."""

    prefix: str
    spec: ExpertSpec

    @property
    def parameters(self) -> dict[str, tuple[int, int]]:
        """By transformers' name of each parameter: inputs and outputs of one expert."""
        hidden, inner = self.spec.hidden_size, self.spec.intermediate_size
        halves = len(self.spec.names) - 1
        return {"gate_up_proj" if halves == 2 else "up_proj": (hidden, halves * inner), "down_proj": (inner, hidden)}

    def parameter_of(self, module: str, shapes: Sequence[Sequence[int]], config: PeftConfig) -> tuple[str, bool]:
        """(name of the parameter, whether A and B are exchanged) from the shapes of A and B.

        Raises `ValueError` where they fit none, or more than one.
        """
        are_matrices = all(len(shape) == 2 for shape in shapes)
        (rows, width), (height, columns) = shapes if are_matrices else ((0, 0), (0, 0))  # which fit none
        fits = []
        for (name, (inputs, outputs)), exchanged in product(self.parameters.items(), (False, True)):
            pairs = config.rank_of(f"{module}.{name}") * self.spec.num_experts
            wanted = (outputs, inputs) if exchanged else (inputs, outputs)
            if (width, height) == wanted and rows == columns == pairs:
                fits.append((name, exchanged))
        if len(fits) > 1 and config.version >= _IN_ORDER:
            fits = [one for one in fits if not one[1]]
        if len(fits) == 1:
            return fits[0]
        given = f"the matrices of {module} have the shapes {list(shapes[0])} and {list(shapes[1])}"
        if fits:
            raise ValueError(
                f"{given}, which may belong to several parameters; save the adapter with PEFT 0.20 or later"
            )
        ranks = {name: config.rank_of(f"{module}.{name}") for name in self.parameters}
        wanted_shapes = " or ".join(
            f"{[rank * self.spec.num_experts, inputs]} and {[outputs, rank * self.spec.num_experts]} ({name})"
            for (name, (inputs, outputs)), rank in zip(self.parameters.items(), ranks.values(), strict=True)
        )
        raise ValueError(f"{given}; {self.spec.num_experts} experts take {wanted_shapes}")

    def apart(self, parameter: str, a: Tensor, b: Tensor, *, exchanged: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """By each expert's tensor: A [r, inputs] and B [outputs, r]."""
        count = self.spec.num_experts
        of_experts = a.unflatten(0, (count, -1)), b.unflatten(1, (-1, count)).permute(2, 0, 1)
        downs, ups = of_experts if not exchanged else (of_experts[1].mT, of_experts[0].mT)
        *first, last = self.spec.names
        names = [last] if parameter == "down_proj" else first
        found = {}
        for place, name in enumerate(names):
            size = ups.shape[1] // len(names)
            rows = slice(place, None, len(names)) if self.spec.interleaved else slice(place * size, (place + 1) * size)
            for expert in range(count):
                found[f"{self.prefix}.{expert}.{name}"] = downs[expert], ups[expert, rows]
        return found


def experts_named(module: str, layers: Mapping[str, JoinedExperts]) -> JoinedExperts | None:
    """The experts that PEFT calls `module`, None where it is something else.

    transformers may call the part that holds them otherwise than the checkpoint: ….mlp.experts is
    ….block_sparse_moe.experts in files of Mixtral, and ….block_sparse_moe.experts has no part of its own in Granite's.
    """
    for name in (module, module.removesuffix(".experts")):
        if name in layers:
            return layers[name]
    outer = _without_part(module)
    found = [one for name, one in layers.items() if outer is not None and _without_part(name) == outer]
    return found[0] if len(found) == 1 else None


def _without_part(name: str) -> str | None:
    match = re.fullmatch(r"(.+\.\d+)\.[^.]+\.(experts)", name)
    return None if match is None else f"{match[1]}.{match[2]}"
