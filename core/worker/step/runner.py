"""The runner: one list of phases for every model and platform.

finish → add → extend → shape → "writes": what other stages send, staged writes, rows → copies of states → connector
begin → "forward": inputs, attention plans, model → next stage → connector end | "draw": logits, sample, keep →
"drafts": propose → copy out. A step without tokens ends with the writes and the connector; one of an earlier pipeline
stage draws nothing. The platform runs what stands in quotes. Anything rarer than "every model" lives in a
collaborator with a null default. Where the plan says so, a shape is captured after all that. Knows no scheduling, no
text and no particular device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.expert_balance.null import NoBalance
from frame.transfers.untold import UntoldReports

from ...interfaces.connector import ConnectorWorker
from ...interfaces.kv import KVLayout
from ...interfaces.model import ForwardStep, LayerHooks, Model
from ...interfaces.platform_steps import NO_ROWS, StepShape
from ...interfaces.step import BlockCopy, StepPlan
from ...layers.cached import CachedLayer, Planner
from ...layers.experts import experts_of
from ...ops.step import StepBuffers
from ..adapters import NoAdapterSlots
from ..device import Device
from ..lockstep import Alone
from ..pooling.pooling import NullPooling
from ..sample.draws import Sampled, VerifiedTokens
from ..sample.plain_draw import PlainDraw
from ..sample.prompt_logprobs import PromptLogprobs
from ..sample.sampler import Sampler
from ..sample.shards import Rows
from .encoder import NoEncoder
from .forward_pass import CapturedInputs, ForwardPass
from .handover import WholeModel
from .prefix_tiles import PrefixTiles
from .prompt_embeds import NoPromptEmbeds
from .request_state import RequestTables
from .speculation import NoSpeculation
from .step_handle import PendingStep
from .step_inputs import InputBuilder, StepInputs

CONNECTOR = "connector"
#: The hooks of steps whose layers call no connector.
NO_HOOKS = LayerHooks()


#: Between the two calls of a step: what the forward pass left; None where the step has no tokens.
_Executed = tuple[PendingStep, StepShape, StepInputs | None, Tensor | None]


class Runner:
    """Runs steps of one model. `execute` and `sample` are called in turn, in step order, by one thread."""

    def __init__(
        self,
        *,
        device: Device,
        model: Model,
        layout: KVLayout,
        planners: Sequence[Planner],
        plan_groups: Sequence[int],
        tables: RequestTables,
        buffers: StepBuffers,
        sampler: Sampler,
        speculation: NoSpeculation,
        connector: ConnectorWorker,
        pooling: NullPooling,
        prefixes: PrefixTiles,
        stage: WholeModel,
        lockstep: Alone,
        embeds: NoPromptEmbeds,
        adapters: NoAdapterSlots | None = None,
        encoder: NoEncoder | None = None,
    ) -> None:
        self.device = device
        self.adapters = adapters or NoAdapterSlots()
        self.encoder = encoder or NoEncoder()
        self.model = model
        self.layout = layout
        self.planners = planners
        self.tables = tables
        self.inputs = InputBuilder(
            device,
            tables,
            buffers,
            correct=speculation.correct,
            exact=speculation.draws_one,
            groups=layout.groups,
            plan_groups=plan_groups,
            prefixes=prefixes,
            adapters=self.adapters,
            encoder=self.encoder,
        )
        self.sampler = sampler
        self.speculation = speculation
        self.caches = {one.name: one for one in model.modules() if isinstance(one, CachedLayer)}
        self.prompt_logprobs = PromptLogprobs(device, sampler.logprobs_mode)
        self.connector = connector
        self.pooling = pooling
        self.stage = stage
        self.lockstep = lockstep
        self.embeds = embeds
        self.balance = NoBalance()
        self.rows = Rows(model, sampler.vocabulary)
        self.plain_draw = PlainDraw(device, self.rows, sampler, tables.token_ids, buffers)
        others = {"token ids": tables.token_ids, **sampler.memory(), **stage.memory(), **embeds.memory()}
        others |= self.adapters.memory()
        others |= {f"block table of group {group}": table for group, table in enumerate(tables.blocks)}
        self.captured_inputs = CapturedInputs(model, buffers, prefixes, others)
        # each keeps state by slot and hears of requests that leave and come, in this order
        self._by_slot = (sampler, speculation, self.prompt_logprobs, pooling) if stage.draws else ()
        self._executed: _Executed | None = None
        self._untold = UntoldReports()
        self._pending: deque[PendingStep] = deque()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Applies the plan's state changes and runs the forward pass; `sample` must follow.

        A step that raises leaves the state changes in place and nothing to sample; its connector step is not ended.
        """
        self._executed = None
        has_rows = len(plan.slots) > 0
        agreed = self.lockstep.agree(self.device.shapes.choose(plan) if has_rows else NO_ROWS)
        shape = agreed.shape if has_rows else NO_ROWS
        self.stage.begin(plan, shape)
        try:
            self._executed = self._execute(plan, shape)
            self._executed[0].peers_busy = agreed.busy
            if agreed.busy and not has_rows:
                self._serve_peers(agreed.shape)
        except BaseException:
            self.stage.settle()
            self._capture(plan)
            raise

    def _execute(self, plan: StepPlan, shape: StepShape) -> _Executed:
        self._apply_changes(plan)
        inputs = self.device.graphs.run(shape, "writes", partial(self._write, plan, shape))
        self._copy_blocks(plan.copies)
        self._untold.begin(plan)
        self.connector.begin_step(plan.extras.get(CONNECTOR, b""))
        hidden = None
        if inputs is not None:
            self.device.ops.invariant = plan.deterministic or shape.deterministic or self.device.deterministic
            several = shape.max_query_len > 1 or self.connector.hooks.decode_steps
            hooks = self.connector.hooks if several else NO_HOOKS
            hidden = self._forward(inputs, shape, partial(self.pooling.segments, plan, inputs.positions), hooks)
            self.stage.hand_on(hidden)
        report = self.connector.end_step(plan.finished_ids)
        return PendingStep(plan, self._untold.told(plan, report, self.connector), self.sampler), shape, inputs, hidden

    @torch.inference_mode()
    def sample(self, masks: bytes = b"") -> PendingStep:
        """Draws the tokens of the step executed last and starts their copy to the host."""
        executed, self._executed = self._executed, None
        if executed is None:
            raise RuntimeError("there is no executed step to sample: the step before failed or was sampled already")
        step, shape, inputs, hidden = executed
        try:
            if inputs is not None and hidden is not None and self.stage.draws:
                self._sample_rows(step, shape, inputs, hidden, masks)
        except BaseException:
            self.stage.settle()
            raise
        finally:
            step.experts = self.balance.advance(dummy=inputs is None)
            self._capture(step.plan)
        step.wants_capture = self.wants_capture
        self._pending.append(step)
        while self._pending and self._pending[0].delivered:
            self._pending.popleft()
        return step

    def _capture(self, plan: StepPlan) -> None:
        """Called behind each step, also one that failed here: another stage may have ended it, and waits for all."""
        if plan.capture and self.lockstep.captures:
            self.device.graphs.capture(self.run_dummy)

    @property
    def wants_capture(self) -> bool:
        """Whether shapes are left to be captured between steps."""
        return self.lockstep.captures and self.device.graphs.wanted()

    def _apply_changes(self, plan: StepPlan) -> None:
        """Tells all that follows slots who left and who came. Raises the first error once all have been told."""
        self.tables.begin()
        self.adapters.begin(plan.adapters)
        told: list[tuple[Callable[[Any], None], Any]]
        told = [(one.remove, slot) for slot in plan.removed_slots.tolist() for one in self._by_slot]
        told += [(one.add, request) for request in plan.added for one in (self.tables, self.adapters, *self._by_slot)]
        told.append((self.tables.append, plan.appends))
        errors = list[Exception]()
        for tell, what in told:
            try:
                tell(what)
            except Exception as error:
                # the others must know: the step that is on its way already would take those who left for those who came
                errors.append(error)
        if errors:
            raise errors[0]

    def _write(self, plan: StepPlan, shape: StepShape) -> StepInputs | None:
        """Sends what changed to the device, and the rows of the step if it has some."""
        self.stage.receive()
        self.tables.apply_staged_writes()
        self.adapters.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.speculation.apply_staged_writes()
        self.embeds.write(plan)
        self.encoder.write(plan)
        return self.inputs.build(plan, shape) if len(plan.slots) else None

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            places = self.device.streams.stage(np.stack((copy.sources, copy.targets))).unbind(0)
            for name in self.layout.groups[copy.group].layers:
                cache = self.caches[name].kv_cache if name in self.caches else None
                if cache is not None:
                    self.device.ops.copy_blocks(cache, *places)

    def _forward(
        self,
        inputs: StepInputs,
        shape: StepShape,
        segments: Callable[[], Tensor | None] = lambda: None,
        hooks: LayerHooks = NO_HOOKS,
    ) -> Tensor:
        graphs = self.device.graphs
        self.adapters.choose(shape.adapted)
        if graphs.checks_inputs and graphs.captures(shape, "forward"):
            self.captured_inputs.check(shape)
        ranks = shape.tokens_per_rank
        given = self.stage, self.embeds, self.encoder
        forward = ForwardPass(self.model, self.planners, inputs, hooks, segments, *given, ranks)
        return graphs.run(shape, "forward", forward)

    def _serve_peers(self, shape: StepShape) -> None:
        """Does what other data ranks need of this one, which has no rows, in a step that they run."""
        if shape.padded_rows:
            self._forward_padding(shape)
            return
        self.device.ops.invariant = shape.deterministic or self.device.deterministic
        self.adapters.choose(False)
        self.model.running.step = ForwardStep((), (), tokens_per_rank=shape.tokens_per_rank)
        for layer in experts_of(self.model):
            layer.serve()

    def _forward_padding(self, shape: StepShape) -> Tensor:
        self.device.ops.invariant = shape.deterministic or self.device.deterministic
        inputs = self.device.graphs.run(shape, "writes", partial(self.inputs.padding, shape))
        return self._forward(inputs, shape)

    @torch.inference_mode()
    def run_dummy(self, shape: StepShape) -> None:
        """Runs a step of padding at the greatest length of `shape`: to capture CUDA graphs, and to warm kernels up.

        It writes no KV cache, and no request gets the tokens that it draws.
        """
        hidden, graphs = self._forward_padding(shape), self.device.graphs
        if not self.stage.draws:
            return
        if shape.padded_tokens == shape.padded_rows:
            self.plain_draw.run_dummy(shape, hidden)
        else:  # a step with prompts: what its rows draw is never captured
            rows = hidden[: shape.padded_samples or shape.padded_rows]
            graphs.run(shape, "draw", lambda: self.rows.draw(rows))

    def _sample_rows(
        self, step: PendingStep, shape: StepShape, inputs: StepInputs, hidden: Tensor, masks: bytes
    ) -> None:
        graphs, plan = self.device.graphs, step.plan
        graphs.run(shape, "draw", partial(self._read_prompts, step, hidden))
        if not len(inputs.host_slots):
            return
        if inputs.rows is None and not masks and self.speculation.draws_one and graphs.captures(shape, "draw"):
            drawn = self.plain_draw.run(shape, inputs.host_slots, hidden)
            if drawn is not None:
                self.stage.give_back(drawn.packed[0])
                step.start_copy(drawn, self.device.streams)
                return
        if self.sampler.needs_host_tokens(inputs.host_slots):
            for earlier in self._pending:
                earlier.result()
        sampled = graphs.run(shape, "draw", partial(self._draw, plan, inputs, hidden, masks))
        self.stage.give_back(sampled.token_ids)
        if isinstance(sampled, VerifiedTokens):
            sampled = graphs.run(shape, "drafts", partial(self.speculation.propose, plan, inputs, sampled))
        step.start_copy(sampled, self.device.streams)

    def _read_prompts(self, step: PendingStep, hidden: Tensor) -> None:
        """Collects what the step answers about prompt tokens: their log-probabilities and pooled rows."""
        token_ids = self.tables.token_ids
        step.prompt_logprobs = self.prompt_logprobs.collect(step.plan, hidden, token_ids, self.model.logits)
        step.pooled = self.pooling.collect(step.plan, hidden)

    def _draw(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, masks: bytes) -> Sampled:
        """Draws tokens for the rows that sample and appends them to the token table."""
        draws = self.speculation.draws(plan, inputs, masks)
        rows = draws.rows
        hidden = hidden[: len(draws.host_slots)] if rows is None else hidden.index_select(0, rows)
        logits = self.rows.logits(hidden)
        sampled = self.sampler.sample(logits, draws.host_slots, draws.lengths, masks, draws.ahead)
        return self.speculation.keep(inputs, draws, sampled)
