"""The forward pass of one step, as a platform runs or captures it, and where everything lies that a CUDA graph reads.

Knows no plan of a step and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...interfaces.model import ForwardStep, LayerHooks, Model, ModelInputs
from ...interfaces.platform_steps import StepShape
from ...layers.cached import CachedLayer, Planner
from ...ops.step import StepBuffers
from .encoder import NoEncoder
from .handover import WholeModel
from .prefix_tiles import PrefixTiles
from .prompt_embeds import NoPromptEmbeds
from .step_inputs import StepInputs


@dataclass(frozen=True)
class ForwardPass:
    """Implements `Forward` for inputs in the runner's buffers; `planners[i]` plans for number i of `inputs.batches()`.

    `segments` says which text of a pair each token is of, once the positions are there. `stage` is this pipeline stage.
    `embeds` are embeddings in the place of tokens, `encoder` is what the encoder reads. `tokens_per_rank` are
    the tokens of each data rank, () where all have as many.
    """

    model: Model
    planners: Sequence[Planner]
    inputs: StepInputs
    hooks: LayerHooks
    segments: Callable[[], Tensor | None]
    stage: WholeModel
    embeds: NoPromptEmbeds
    encoder: NoEncoder
    tokens_per_rank: tuple[int, ...] = ()

    def step(self) -> ForwardStep:
        self.inputs.fill()
        batches = self.inputs.batches()
        plans = [planner.plan(batch) for planner, batch in zip(self.planners, batches, strict=True)]
        return ForwardStep(plans, batches, self.hooks, tokens_per_rank=self.tokens_per_rank)

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        step = step or self.step()
        self.model.running.step = step
        num_tokens, stage = len(self.inputs.positions), self.stage
        positions, ids = stage.own(self.inputs.positions), stage.own(self.inputs.input_ids)
        if (segments := self.segments()) is not None:
            segments = stage.own(segments)
        positions = positions.expand(self.model.position_axes, -1)
        inputs = ModelInputs(positions, ids, segments=segments, stage=stage.given(num_tokens))
        if (given := self.embeds.given(num_tokens)) is not None:
            inputs = replace(inputs, embeds=stage.own(given[0]), given=stage.own(given[1]))
        if (read := self.encoder.given()) is not None:
            inputs = replace(inputs, encoder_ids=read[0], encoder_positions=read[1])
        return stage.packed(self.model(inputs, step), num_tokens)


class CapturedInputs:
    """The inputs of one runner's steps: its buffers, the KV cache, the weights, and others that have no other name."""

    def __init__(self, model: Model, buffers: StepBuffers, prefixes: PrefixTiles, others: Mapping[str, Tensor]) -> None:
        self._model = model
        self._others = others
        self._buffers = buffers
        self._prefixes = prefixes
        self._captured: dict[StepShape, dict[str, int]] = {}

    def addresses(self) -> dict[str, int]:
        """Each input's address by its name; a weight that the host has packed has none."""
        return {name: tensor.data_ptr() for name, tensor in self._tensors() if not tensor.is_mkldnn}

    def check(self, shape: StepShape) -> None:
        """Called before each run of a captured step, the first of which captures it; raises when an input moved."""
        now = self.addresses()
        then = self._captured.setdefault(shape, now)
        moved = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        if moved:
            raise RuntimeError(
                f"the captured step of {shape.padded_tokens} tokens would read {moved[0]!r} where it lay when it was "
                f"captured, but it has moved, with {len(moved) - 1} other inputs; whoever moves tensors must drop the "
                "graphs"
            )

    def forget(self) -> None:
        """The graphs were dropped."""
        self._captured.clear()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self._buffers).items():
            if isinstance(value, Tensor):
                yield f"buffer {name}", value
            else:
                yield from ((f"buffer {name}, group {group}", tensor) for group, tensor in enumerate(value))
        yield "buffer prefixes", self._prefixes.memory
        yield from self._others.items()
        for name, module in self._model.named_modules():
            if isinstance(module, CachedLayer) and module.kv_cache is not None:
                yield f"KV cache of {name}", module.kv_cache
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
