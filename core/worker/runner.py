"""The runner: one list of phases for every model and platform.

finish → add → extend → staged writes → (no tokens: connector only) → shape → inputs and attention plans → connector
begin → forward → connector end | logits → sample → keep and propose drafts → copy out → advance. Anything rarer than
"every model" lives in a collaborator with a null default. Where the plan says so, a shape is recorded after all that.
Knows no scheduling, no text and no particular device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..interfaces.attention import AttentionBackend
from ..interfaces.connector import ConnectorWorker
from ..interfaces.kv import KVLayout
from ..interfaces.model import Model
from ..interfaces.platform import Graphs, StepShape, Streams
from ..interfaces.step import StepPlan, TransferReport
from ..ops import Ops
from ..ops.step import StepBuffers
from .forward_pass import ForwardPass
from .pooling import NullPooling
from .prompt_logprobs import PromptLogprobs
from .recorded_inputs import RecordedInputs
from .request_state import BlockTables, RequestState
from .sampler import Sampler
from .shared_prefixes import PrefixTiles
from .speculation import NoSpeculation
from .step_handle import PendingStep
from .step_inputs import InputBuilder, StepInputs

CONNECTOR = "connector"


@dataclass
class Device:
    """What the runner uses of a platform. `deterministic`: every step is, not only those that hold such a request."""

    ops: Ops
    streams: Streams
    graphs: Graphs
    device: torch.device
    deterministic: bool = False


@dataclass
class _Executed:
    """Between the two calls of a step: what the forward pass left."""

    plan: StepPlan
    inputs: StepInputs | None
    hidden: Tensor | None
    transfer: TransferReport


class Runner:
    """Runs steps of one model. `execute` and `sample` are called in turn, in step order, by one thread."""

    def __init__(
        self,
        *,
        device: Device,
        model: Model,
        layout: KVLayout,
        backends: Sequence[AttentionBackend],
        state: RequestState,
        tables: BlockTables,
        buffers: StepBuffers,
        sampler: Sampler,
        speculation: NoSpeculation,
        connector: ConnectorWorker,
        pooling: NullPooling,
        prefixes: PrefixTiles,
    ) -> None:
        self.device = device
        self.model = model
        self.layout = layout
        self.backends = backends
        self.state = state
        self.tables = tables
        self.inputs = InputBuilder(
            state,
            tables,
            correct=speculation.correct,
            buffers=buffers,
            block_size=layout.block_size,
            ops=device.ops,
            streams=device.streams,
            num_cacheless=len(backends) - len(layout.groups),
            prefixes=prefixes,
        )
        self.sampler = sampler
        self.speculation = speculation
        self.prompt_logprobs = PromptLogprobs(ops=device.ops, logprobs_mode=sampler.logprobs_mode)
        self.connector = connector
        self.pooling = pooling
        self.recorded_inputs = RecordedInputs(model, buffers, prefixes)
        self._executed: _Executed | None = None
        self._pending: deque[PendingStep] = deque()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Applies the plan's state changes and runs the forward pass; `sample` must follow.

        A step that raises leaves the state changes in place and nothing to sample; its connector step is not ended.
        """
        self._executed = None
        self._apply_changes(plan)
        self.connector.begin_step(plan.extras.get(CONNECTOR, b""))
        inputs = hidden = None
        if len(plan.slots):
            shape = self.device.graphs.shape(plan)
            self.device.ops.invariant = plan.deterministic or self.device.deterministic
            inputs = self.inputs.build(plan, shape)
            hidden = self._forward(inputs, shape, self.pooling.segments(plan, inputs.positions))
        self._executed = _Executed(plan, inputs, hidden, self.connector.end_step(plan.finished_ids))

    @torch.inference_mode()
    def sample(self, masks: bytes = b"") -> PendingStep:
        """Draws the tokens of the step executed last and starts their copy to the host."""
        executed, self._executed = self._executed, None
        if executed is None:
            raise RuntimeError("there is no executed step to sample: the step before failed or was sampled already")
        step = PendingStep(executed.plan, executed.transfer, self.sampler)
        if executed.inputs is not None and executed.hidden is not None:
            self._sample_rows(step, executed.inputs, executed.hidden, masks)
        self._pending.append(step)
        while self._pending and self._pending[0].delivered:
            self._pending.popleft()
        if executed.plan.capture:
            self.device.graphs.capture(self.run_dummy)
        step.records = self.device.graphs.wanted()
        return step

    def _apply_changes(self, plan: StepPlan) -> None:
        for slot in plan.removed_slots.tolist():
            self.state.remove(slot)
            self.sampler.remove(slot)
            self.speculation.remove(slot)
            self.prompt_logprobs.remove(slot)
            self.pooling.remove(slot)
        for request in plan.added:
            self.state.add(request)
            self.tables.add(request)
            self.sampler.add(request)
            self.speculation.add(request)
            self.prompt_logprobs.add(request)
            self.pooling.add(request)
        self.tables.append(plan.appends)
        self.state.apply_staged_writes()
        self.tables.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.speculation.apply_staged_writes()

    def _forward(self, inputs: StepInputs, shape: StepShape, segments: Tensor | None = None) -> Tensor:
        forward = ForwardPass(self.model, self.backends, inputs, self.connector.hooks, segments)
        if shape.graph is not None and self.device.graphs.checks_inputs:
            self.recorded_inputs.check(shape.graph)
        return self.device.graphs.run(shape, forward)

    @torch.inference_mode()
    def run_dummy(self, shape: StepShape) -> None:
        """Runs a step of padding as long as any step can be: for recording graphs, and to warm kernels up.

        Rows read the null block only and nothing is stored. One token a row.
        """
        rows, longest = shape.padded_rows, self.state.token_ids.shape[1]
        self.device.ops.invariant = shape.deterministic or self.device.deterministic
        buffers = self.inputs.buffers
        for zeroed in (buffers.input_ids, buffers.positions, *buffers.tables):
            zeroed.zero_()
        for mapping in buffers.slot_mapping:
            mapping.fill_(-1)
        buffers.query_start.copy_(torch.arange(len(buffers.query_start), dtype=torch.int32).clamp_(max=rows))
        buffers.seq_lens.fill_(1)
        batches = self.inputs.batches(
            shape,
            np.ones(rows, np.int32),
            np.full(rows, longest, np.int32),
            buffers.tables[0].shape[1],
            shape.deterministic,
        )
        nothing = buffers.query_start[:0]
        inputs = StepInputs(
            input_ids=buffers.input_ids[: shape.padded_tokens],
            positions=buffers.positions[: shape.padded_tokens],
            batches=batches,
            rows=nothing,
            slots=nothing,
            lengths=nothing,
            host_slots=np.zeros(0, np.int32),
        )
        hidden = self._forward(inputs, shape)
        self.device.ops.greedy(self.model.logits(hidden))

    def _sample_rows(self, step: PendingStep, inputs: StepInputs, hidden: Tensor, masks: bytes) -> None:
        step.prompt_logprobs = self.prompt_logprobs.collect(
            step.plan, hidden, self.state.token_ids, self.model.logits, self.device.streams
        )
        step.pooled = self.pooling.collect(step.plan, hidden)
        if not len(inputs.host_slots):
            return
        draws = self.speculation.draws(step.plan, inputs, masks)
        rows = draws.rows
        logits = self.model.logits(hidden[: len(inputs.host_slots)] if rows is None else hidden.index_select(0, rows))
        if self.sampler.needs_host_tokens(inputs.host_slots):
            for earlier in self._pending:
                earlier.deliver()
        sampled = self.sampler.sample(logits, draws.host_slots, draws.lengths, masks, draws.ahead)
        step.start_copy(self.speculation.keep(step.plan, inputs, draws, sampled), self.device.streams)
        self.speculation.advance(inputs, sampled)
