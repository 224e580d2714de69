"""Drafts on the device: proposed after a step, part of the input of the next one, kept while the draws equal them.

A slot's drafts lie behind its known tokens in the token table, where the next step reads its input. The host plans with
upper bounds; how many tokens a slot really has is known here. Knows no sampling parameter and no way to guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...config.tree import FrameConfig
from ...interfaces.platform import Streams
from ...interfaces.setup import SpeculatorSetup
from ...interfaces.speculator import DraftContext, Speculator
from ...interfaces.step import NewRequest, StepPlan
from ...ops import Ops
from ...plugin_host.registry import Registry
from ..sample.draws import Ahead, CheckedDraws, Draws
from ..sample.sampled import Sampled, VerifiedTokens
from ..sample.sampler import Sampler
from .step_inputs import StepInputs


class NoSpeculation:
    """Every row that samples gets one token. `token_ids` int32 [R, width] is the table of every slot's tokens."""

    #: whether a step of one token a row is over when each slot has the token drawn for it
    draws_one = True

    def __init__(self, *, token_ids: Tensor, sampler: Sampler, ops: Ops) -> None:
        self.token_ids = token_ids
        self.sampler = sampler
        self.ops = ops

    def add(self, request: NewRequest) -> None:
        """A request takes its slot."""

    def remove(self, slot: int) -> None:
        """The request left its slot; an empty slot is fine."""

    def apply_staged_writes(self) -> None:
        """Sends what is pending to the device."""

    def correct(self, rows: Tensor) -> None:
        """Makes the plan's counts exact, in place: int32 [3, B] slots, tokens computed, tokens scheduled."""

    def draws(self, plan: StepPlan, inputs: StepInputs, masks: bytes) -> Draws:
        """The draws of a step."""
        del plan, masks
        return Draws(inputs.rows, inputs.host_slots, inputs.lengths)

    def keep(self, inputs: StepInputs, draws: Draws, sampled: Sampled) -> Sampled:
        """Decides which draws are tokens, and gives them to their slots; returns what the host is told."""
        del draws
        self.ops.advance(self.token_ids, inputs.slots, inputs.lengths, sampled.token_ids)
        return sampled

    def propose(self, plan: StepPlan, inputs: StepInputs, kept: VerifiedTokens) -> VerifiedTokens:
        """Puts the next drafts behind the tokens that were kept."""
        del plan, inputs
        return kept


@dataclass(frozen=True)
class _Layout:
    """Where the draws of S rows lie: `num_draws` and `starts` [S]; for each draw its row (`owner`) and place in it."""

    num_draws: np.ndarray
    starts: np.ndarray
    owner: np.ndarray
    offset: np.ndarray

    @classmethod
    def of(cls, num_draws: np.ndarray) -> _Layout:
        starts = np.cumsum(num_draws) - num_draws
        owner = np.repeat(np.arange(len(num_draws)), num_draws)
        return cls(num_draws, starts, owner, np.arange(len(owner)) - starts[owner])


class Speculation(NoSpeculation):
    """Drafts of one speculator. Rows of a batch larger than `batch_limit` get none."""

    draws_one = False

    def __init__(
        self,
        speculator: Speculator,
        *,
        token_ids: Tensor,
        sampler: Sampler,
        ops: Ops,
        streams: Streams,
        batch_limit: int | None = None,
    ) -> None:
        super().__init__(token_ids=token_ids, sampler=sampler, ops=ops)
        self._speculator = speculator
        self._streams = streams
        self._batch_limit = batch_limit
        # by slot: tokens known, and drafts that stand behind them
        self._known, self._drafted = torch.zeros((2, len(token_ids)), dtype=torch.int32, device=token_ids.device)
        self._pending: dict[int, int] = {}

    def add(self, request: NewRequest) -> None:
        self._pending[request.slot] = len(request.token_ids)
        self._speculator.add(request)

    def remove(self, slot: int) -> None:
        self._pending.pop(slot, None)
        self._speculator.remove(slot)

    def apply_staged_writes(self) -> None:
        if not self._pending:
            return
        slots, known = self._streams.stage(np.array([list(self._pending), list(self._pending.values())], np.int32))
        self.ops.write_values(self._known, slots, known)
        self.ops.write_values(self._drafted, slots, torch.zeros_like(known))
        self._pending.clear()

    def correct(self, rows: Tensor) -> None:
        # a prompt's count is exact and below its length; where tokens were drawn, the newest is all that is to compute
        torch.minimum(rows[1], self._known[rows[0].long()] - 1, out=rows[1])

    def draws(self, plan: StepPlan, inputs: StepInputs, masks: bytes) -> CheckedDraws:
        """The last token of each row that samples, and each draft that it has, except where rows must draw alone."""
        sampling = np.flatnonzero(plan.samples)
        planned = plan.num_drafts[sampling]
        alone = self.sampler.draws_alone(inputs.host_slots, masks)
        layout = _Layout.of(np.where(alone, 0, planned) + 1)
        owner, offset = layout.owner, layout.offset
        first = np.cumsum(plan.num_scheduled)[sampling] - 1 - planned
        packed = np.concatenate((owner, offset, first[owner] + offset, first, layout.starts, layout.num_draws - 1))
        staged = self._streams.stage(packed.astype(np.int64))
        count, rows = len(owner), len(sampling)
        owners, offsets, tokens = staged[: 3 * count].view(3, count)
        first_tokens, starts, limits = staged[3 * count :].view(3, rows)
        slots = inputs.slots[:rows].long()
        known, device = self._known[slots], slots.device
        places = torch.arange(int(layout.num_draws.max()), device=device)
        last = len(inputs.input_ids) - 1
        drafts = inputs.input_ids[(first_tokens[:, None] + 1 + places[:-1]).clamp(max=last)]
        before = drafts[owners].masked_fill(places[:-1] >= offsets[:, None], -1)
        return CheckedDraws(
            rows=tokens,
            host_slots=inputs.host_slots[owner],
            lengths=known[owners] + offsets,
            ahead=Ahead(before, offsets),
            slots=inputs.slots[:rows],
            known=known,
            places=(starts[:, None] + places).clamp(max=count - 1),
            drafts=drafts,
            limits=torch.minimum(limits, self._drafted[slots]),
            num_draws=layout.num_draws,
            alone=alone,
        )

    def keep(self, inputs: StepInputs, draws: Draws, sampled: Sampled) -> VerifiedTokens:
        if not isinstance(draws, CheckedDraws):
            raise TypeError("these draws were made without speculation")
        tokens, counts = self.ops.accept_drafts(sampled.token_ids[draws.places], draws.drafts, draws.limits)
        self._append(draws.slots, draws.known, tokens)
        known = draws.known + counts
        self.ops.write_values(self._known, draws.slots, known)
        self.sampler.remember(tokens, counts, inputs.host_slots)
        return VerifiedTokens(
            token_ids=tokens,
            drawn=sampled.drawn[draws.places],
            logprobs=sampled.logprobs,
            counts=counts,
            num_drafts=draws.limits,
            known=known,
            num_draws=draws.num_draws,
            alone=draws.alone,
        )

    def propose(self, plan: StepPlan, inputs: StepInputs, kept: VerifiedTokens) -> VerifiedTokens:
        known, slots = kept.known, inputs.slots[: len(kept.known)]
        if self._batch_limit is not None and len(plan.slots) > self._batch_limit:
            drafted = torch.zeros_like(known)
        else:
            bounds = (plan.num_computed + plan.num_scheduled)[plan.samples]
            longest = min(int(bounds.max()) + 1, self.token_ids.shape[1])
            found = self._speculator.propose(DraftContext(self.token_ids, slots, known, longest))
            drafted = torch.minimum(found.counts, (self.token_ids.shape[1] - known).clamp(min=0))
            places = torch.arange(found.token_ids.shape[1], device=known.device)
            self._append(slots, known, found.token_ids.masked_fill(places >= drafted[:, None], -1))
        self.ops.write_values(self._drafted, slots, drafted)
        return replace(kept, num_next_drafts=drafted)

    def _append(self, slots: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Writes `tokens` [S, n] behind the first `lengths` [S] of their slots, but those that are -1."""
        width = tokens.shape[1]
        places = lengths[:, None] + torch.arange(width, dtype=lengths.dtype, device=lengths.device)
        self.ops.advance(self.token_ids, slots.repeat_interleave(width), places.flatten(), tokens.flatten())


def make_speculation(
    config: FrameConfig,
    registry: Registry,
    sampler: Sampler,
    token_ids: Tensor,
    *,
    ops: Ops,
    streams: Streams,
    device: torch.device,
) -> NoSpeculation:
    """With the configured speculator, or none."""
    settings = config.speculation
    if settings.speculator is None:
        return NoSpeculation(token_ids=token_ids, sampler=sampler, ops=ops)
    speculator: Speculator = registry.make(
        "speculator", settings.speculator, SpeculatorSetup(settings.num_speculative_tokens, ops, device), config
    )
    return Speculation(
        speculator,
        token_ids=token_ids,
        sampler=sampler,
        ops=ops,
        streams=streams,
        batch_limit=settings.disable_by_batch_size,
    )
