"""The forward pass of one step, as a platform runs or records it. Knows no plan of a step and no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...interfaces.attention import AttentionBackend
from ...interfaces.model import ForwardStep, LayerHooks, Model
from .step_inputs import StepInputs


@dataclass(frozen=True)
class ForwardPass:
    """Implements `Forward` for inputs in the runner's buffers; `backends[g]` plans for group g of `inputs.batches()`.

    `segments` says which text of a pair each token is of, once the positions are there.
    """

    model: Model
    backends: Sequence[AttentionBackend]
    inputs: StepInputs
    hooks: LayerHooks
    segments: Callable[[], Tensor | None]

    def step(self) -> ForwardStep:
        self.inputs.fill()
        pairs = zip(self.backends, self.inputs.batches(), strict=True)
        plans = [backend.plan(batch) for backend, batch in pairs]
        return ForwardStep(plans=plans, hooks=self.hooks, segments=self.segments())

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        hidden: Tensor = self.model(self.inputs.input_ids, self.inputs.positions, step or self.step())
        return hidden
