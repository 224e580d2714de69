"""Drafts on the device: proposed after a step, computed by the next step, kept as long as its draws equal them.

A slot's drafts lie behind its known tokens in the token table, where the next step reads its input. The host plans with
upper bounds of a slot's number of tokens; the exact number is kept on the device, here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...config.tree import FrameConfig
from ...interfaces.setup import SpeculatorSetup
from ...interfaces.speculator import DraftContext, Speculator
from ...interfaces.step import NewRequest, StepPlan
from ...plugin_host.registry import Registry
from ..device import Device
from ..sample.draws import Ahead, CheckedDraws, Draws, Sampled, VerifiedTokens
from ..sample.sampler import Sampler
from .step_inputs import StepInputs


class NoSpeculation:
    """Every row that samples gets one token. `token_ids` int32 [R, width] is the table of every slot's tokens."""

    #: whether a step of one token a row is over when each slot has the token drawn for it
    draws_one = True

    def __init__(self, device: Device, sampler: Sampler, token_ids: Tensor) -> None:
        self.device = device
        self.sampler = sampler
        self.token_ids = token_ids

    def add(self, request: NewRequest) -> None:
        """A request takes its slot."""

    def remove(self, slot: int) -> None:
        """The request left its slot; an empty slot is fine."""

    def apply_staged_writes(self) -> None:
        """Sends what is pending to the device."""

    def correct(self, rows: Tensor) -> None:
        """Makes the plan's counts exact, in place: int32 [3, padded rows] slots, tokens computed, tokens scheduled."""

    def draws(self, plan: StepPlan, inputs: StepInputs, masks: bytes) -> Draws:
        """The draws of a step."""
        del plan, masks
        return Draws(inputs.rows, inputs.host_slots, inputs.lengths)

    def keep(self, inputs: StepInputs, draws: Draws, sampled: Sampled) -> Sampled:
        """Decides which draws are tokens, and gives them to their slots; returns what the host is told."""
        del draws
        self.device.ops.advance(self.token_ids, inputs.slots, inputs.lengths, sampled.token_ids)
        return sampled

    def propose(self, plan: StepPlan, inputs: StepInputs, kept: VerifiedTokens) -> VerifiedTokens:
        """Puts the next drafts behind the tokens that were kept."""
        del plan, inputs
        return kept


class Speculation(NoSpeculation):
    """Drafts of one speculator. Rows of a batch larger than `batch_limit` get none."""

    draws_one = False

    def __init__(
        self,
        device: Device,
        sampler: Sampler,
        token_ids: Tensor,
        speculator: Speculator,
        batch_limit: int | None = None,
    ) -> None:
        super().__init__(device, sampler, token_ids)
        self._speculator = speculator
        self._batch_limit = batch_limit
        # by slot, and at the end, -1, of nobody: tokens known, never below 1, and drafts that stand behind them
        self._known = device.zeros(len(token_ids) + 1, dtype=torch.int32).fill_(1)
        self._drafted = torch.zeros_like(self._known)
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
        pending = np.array([list(self._pending), list(self._pending.values())], np.int32)
        slots, known = self.device.stage_padded("runs", pending, -1)
        self.device.ops.write_values(self._known, slots, known)
        self.device.ops.write_values(self._drafted, slots, torch.zeros_like(known))
        self._pending.clear()

    def correct(self, rows: Tensor) -> None:
        # a prompt's count is exact and below its length; where tokens were drawn, the newest is all that is to compute
        torch.minimum(rows[1], self._known[rows[0].long()] - 1, out=rows[1])

    def draws(self, plan: StepPlan, inputs: StepInputs, masks: bytes) -> CheckedDraws:
        """The last token of each row that samples, and each draft that it has, except where rows must draw alone."""
        sampling = np.flatnonzero(plan.samples)
        planned = plan.num_drafts[sampling]
        alone = self.sampler.draws_alone(inputs.host_slots, masks)
        num_draws = np.where(alone, 0, planned) + 1
        starts = np.cumsum(num_draws) - num_draws
        owner = np.repeat(np.arange(len(sampling)), num_draws)
        offset = np.arange(len(owner)) - starts[owner]
        first = np.cumsum(plan.num_scheduled)[sampling] - 1 - planned
        of_draws = self.device.padded("rows", np.stack((owner, offset, first[owner] + offset)), 0)
        of_rows = np.zeros((3, len(inputs.slots)), np.int64)
        of_rows[:, : len(sampling)] = first, starts, num_draws - 1
        staged = self.device.streams.stage(np.concatenate((of_draws.ravel(), of_rows.ravel())))
        owners, offsets, tokens = staged[: of_draws.size].view(3, -1)
        first_tokens, row_starts, limits = staged[of_draws.size :].view(3, -1)
        slots = inputs.slots.long()
        known = self._known[slots]
        width = self.device.pad("drafts", int(num_draws.max()) - 1, self._speculator.num_drafts)
        places = torch.arange(width + 1, device=known.device)
        last = len(inputs.input_ids) - 1
        drafts = inputs.input_ids[(first_tokens[:, None] + 1 + places[:-1]).clamp(max=last)]
        before = drafts[owners].masked_fill(places[:-1] >= offsets[:, None], -1)
        return CheckedDraws(
            rows=tokens,
            host_slots=inputs.host_slots[owner],
            lengths=known[owners] + offsets,
            ahead=Ahead(before, offsets),
            slots=inputs.slots,
            known=known,
            places=(row_starts[:, None] + places).clamp(max=len(owners) - 1),
            drafts=drafts,
            limits=torch.minimum(limits, self._drafted[slots]),
            num_draws=num_draws,
            alone=alone,
        )

    def keep(self, inputs: StepInputs, draws: Draws, sampled: Sampled) -> VerifiedTokens:
        if not isinstance(draws, CheckedDraws):
            raise TypeError("these draws were made without speculation")
        tokens, counts = self.device.ops.accept_drafts(sampled.token_ids[draws.places], draws.drafts, draws.limits)
        self._append(draws.slots, draws.known, tokens)
        known = draws.known + counts
        self.device.ops.write_values(self._known, draws.slots, known)
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
        known, slots, width = kept.known, inputs.slots, self.token_ids.shape[1]
        if self._batch_limit is not None and len(plan.slots) > self._batch_limit:
            drafted = torch.zeros_like(known)
        else:
            bounds = (plan.num_computed + plan.num_scheduled)[plan.samples]
            longest = self.device.pad("tokens", int(bounds.max()) + 1, width)
            found = self._speculator.propose(DraftContext(self.token_ids, slots, known, longest))
            drafted = torch.minimum(found.counts, (width - known).clamp(min=0))
            places = torch.arange(found.token_ids.shape[1], device=known.device)
            self._append(slots, known, found.token_ids.masked_fill(places >= drafted[:, None], -1))
        self.device.ops.write_values(self._drafted, slots, drafted)
        return replace(kept, num_next_drafts=drafted)

    def _append(self, slots: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Writes `tokens` [S, n] behind the first `lengths` [S] of their slots, but those that are -1."""
        width = tokens.shape[1]
        places = lengths[:, None] + torch.arange(width, dtype=lengths.dtype, device=lengths.device)
        self.device.ops.advance(self.token_ids, slots.repeat_interleave(width), places.flatten(), tokens.flatten())


def make_speculation(
    config: FrameConfig, registry: Registry, device: Device, sampler: Sampler, token_ids: Tensor
) -> NoSpeculation:
    """With the configured speculator, or none."""
    settings = config.speculation
    if settings.speculator is None:
        return NoSpeculation(device, sampler, token_ids)
    setup = SpeculatorSetup(settings.num_speculative_tokens, device.ops, device.device)
    speculator: Speculator = registry.make("speculator", settings.speculator, setup, config)
    return Speculation(device, sampler, token_ids, speculator, settings.disable_by_batch_size)
