"""What a pipeline stage is given by the stage before, hands on to the next, and the drawn tokens that go back.

Each stage runs every step in the same order: it receives, computes and sends. The last one draws, and sends the tokens
to the first, which takes them when it plans those rows again. `WholeModel` is the null object for one stage, and
`OwnTokens` stands where ranks with the whole model divide the tokens of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...interfaces.collectives import Groups, ProcessGroup
from ...interfaces.platform_steps import StepShape
from ...interfaces.step import StepPlan
from ...layers.context import own_tokens
from ..device import Device


class WholeModel:
    """The model has one stage: nothing comes and nothing goes."""

    #: whether this stage has the head, so that it draws
    draws = True

    def begin(self, plan: StepPlan, shape: StepShape) -> None:
        """A step begins; whatever fails in it, `settle` must be called."""

    def receive(self) -> None:
        """Takes what is there for the step that has begun."""

    def given(self, num_tokens: int) -> Mapping[str, Tensor]:
        """What the model gets as `ModelInputs.stage`: views of memory that never moves, each [num_tokens, H]."""
        del num_tokens
        return {}

    def own(self, tensor: Tensor) -> Tensor:
        """What this rank computes of a tensor [T, ...] over the tokens of a step; the same memory where T allows."""
        return tensor

    def packed(self, out: Tensor | dict[str, Tensor], num_tokens: int) -> Tensor:
        """What the model returned for a step of `num_tokens`, as one tensor."""
        del num_tokens
        if isinstance(out, dict):
            raise TypeError(f"a model returned {sorted(out)} where its hidden states are asked for")
        return out

    def hand_on(self, out: Tensor) -> None:
        """Sends what `packed` gave to the next stage."""

    def give_back(self, token_ids: Tensor) -> None:
        """Sends the tokens drawn for the rows that sample, int32 [S] or more, to the first stage."""

    def settle(self) -> None:
        """Sends and takes what other stages wait for in a step that failed here, so that they need not wait."""

    def memory(self) -> dict[str, Tensor]:
        """The tensors that captured steps read, by name."""
        return {}

    def connect(self) -> None:
        """Called once by all stages before the first step."""


class OwnTokens(WholeModel):
    """The ranks of `group` divide the tokens of each step among themselves, and all get the hidden states of all."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def own(self, tensor: Tensor) -> Tensor:
        return own_tokens(tensor, self._group)

    def packed(self, out: Tensor | dict[str, Tensor], num_tokens: int) -> Tensor:
        return self._group.all_gather(super().packed(out, num_tokens).contiguous(), 0)[:num_tokens]


class PipelineStage(WholeModel):
    """One of several stages. `names` are the model's `stage_tensors`, `token_ids` the table of every slot's tokens."""

    def __init__(
        self,
        groups: Groups,
        device: Device,
        token_ids: Tensor,
        names: Sequence[str],
        *,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._stages, self._back = groups.pipeline, groups.drawn
        self._device, self._token_ids = device, token_ids
        self._names = tuple(names)
        self._rank, self._last = self._stages.rank, self._stages.size - 1
        self.draws = self._rank == self._last
        self._hidden_size = hidden_size
        # zeros: captures and rehearsals compute with what lies here
        self._came = torch.zeros(len(self._names) * max_tokens * hidden_size, dtype=dtype, device=device.device)
        self._drawn = torch.zeros(len(token_ids), dtype=torch.int32, device=device.device)
        self._waited_for = deque[np.ndarray]()  # steps whose tokens are on their way: int32 [2, S] slots and lengths
        self._plan: StepPlan | None = None
        self._num_tokens = 0
        # what others wait for in this step
        self._receives = self._sends = self._returns = False

    def connect(self) -> None:
        """Exchanges a message with each neighbour, so that none waits for another to be reached later."""
        message = {"drawn": self._drawn}
        if self._rank > 0:
            self._stages.receive(message, self._rank - 1)
        if not self.draws:
            self._stages.send(message, self._rank + 1)
        if self.draws:
            self._back.send(message, 0)
        elif self._rank == 0:
            self._back.receive(message, self._last)

    def begin(self, plan: StepPlan, shape: StepShape) -> None:
        self._num_tokens = shape.padded_tokens if len(plan.slots) else 0
        self._receives = self._num_tokens > 0 and self._rank > 0
        self._sends = self._num_tokens > 0 and not self.draws
        self._returns = self.draws and bool(np.count_nonzero(plan.samples))
        self._plan = plan if self._rank == 0 else None

    def receive(self) -> None:
        if self._receives:
            self._receives = False
            self._stages.receive({"stage": self._part(self._num_tokens)}, self._rank - 1)
        if (plan := self._plan) is not None:
            self._take_drawn(plan)
            self._note_drawn(plan)
            self._plan = None

    def given(self, num_tokens: int) -> Mapping[str, Tensor]:
        if self._rank == 0:
            return {}
        parts = self._part(num_tokens).view(len(self._names), num_tokens, self._hidden_size)
        return dict(zip(self._names, parts, strict=True))

    def packed(self, out: Tensor | dict[str, Tensor], num_tokens: int) -> Tensor:
        if self.draws:
            return super().packed(out, num_tokens)
        named = out if isinstance(out, dict) else {"hidden": out}
        if set(named) != set(self._names):
            raise TypeError(f"a model returned {sorted(named)}, and its stage_tensors are {sorted(self._names)}")
        return torch.stack([named[name] for name in self._names]) if len(named) > 1 else named[self._names[0]]

    def hand_on(self, out: Tensor) -> None:
        if self._sends:
            self._sends = False
            self._stages.send({"stage": out.contiguous()}, self._rank + 1)

    def give_back(self, token_ids: Tensor) -> None:
        if self._returns:
            self._returns = False
            count = min(len(token_ids), len(self._drawn))
            self._drawn[:count] = token_ids[:count]
            self._back.send({"drawn": self._drawn}, 0)

    def settle(self) -> None:
        self.receive()
        if self._sends:
            self.hand_on(torch.zeros_like(self._part(self._num_tokens)))
        if self._returns:
            self.give_back(torch.full_like(self._drawn, -1))

    def memory(self) -> dict[str, Tensor]:
        return {"what the stage before hands on": self._came}

    def _part(self, num_tokens: int) -> Tensor:
        return self._came[: len(self._names) * num_tokens * self._hidden_size]

    def _take_drawn(self, plan: StepPlan) -> None:
        """Puts drawn tokens into the table, up to the newest step that drew for a slot of this plan."""
        if not self._waited_for:
            return
        slots = np.concatenate((plan.slots, np.array([new.slot for new in plan.added], np.int32)))
        places = [place for place, one in enumerate(self._waited_for, 1) if np.isin(one[0], slots).any()]
        # of rows that are never planned again no more is left than the stages are behind one another
        for _ in range(max([*places, len(self._waited_for) - self._last])):
            waited = self._waited_for.popleft()
            padded = np.full((2, len(self._drawn)), -1, np.int32)
            padded[:, : waited.shape[1]] = waited
            self._back.receive({"drawn": self._drawn}, self._last)
            rows, lengths = self._device.streams.stage(padded).unbind(0)
            self._device.ops.advance(self._token_ids, rows, lengths, self._drawn)

    def _note_drawn(self, plan: StepPlan) -> None:
        if np.count_nonzero(plan.samples):
            known = plan.num_computed + plan.num_scheduled
            self._waited_for.append(np.stack((plan.slots[plan.samples], known[plan.samples])))
