"""The forward pass of one step, as a platform runs or records it. Knows no plan of a step and no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...interfaces.attention import AttentionBackend
from ...interfaces.model import ForwardStep, LayerHooks, Model, ModelInputs
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
        batches = self.inputs.batches()
        plans = [backend.plan(batch) for backend, batch in zip(self.backends, batches, strict=True)]
        return ForwardStep(plans=plans, batches=batches, hooks=self.hooks)

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        step = step or self.step()
        inputs = ModelInputs(self.inputs.positions[None], self.inputs.input_ids, segments=self.segments())
        hidden: Tensor = self.model(inputs, step)
        return hidden
