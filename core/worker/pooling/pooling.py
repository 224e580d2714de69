"""Pooling for the runner: which rows of a step end a prompt, and the vectors that answer them.

Poolers, which are plugins, turn hidden states into rows. A generating engine has `NullPooling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ...config.pooling import Activation
from ...interfaces.model import Model
from ...interfaces.platform import HostCopy, Streams
from ...interfaces.pooling import Pooler, PoolerRows
from ...interfaces.pooling_params import PoolingFacts, PoolingParams
from ...interfaces.step import NewRequest, StepPlan
from ...ops import Ops
from .dense import DenseLayers

NOT_FINITE = "the model produced values that are not finite"


class PooledRows:
    """The answers to the pooling requests of a step, on their way to the host."""

    def __init__(self) -> None:
        self._parts: list[tuple[list[int], list[int], HostCopy]] = []

    def put(self, rows: list[int], counts: list[int], copy: HostCopy) -> None:
        """`rows` of the plan own counts[i] rows each of the copy's "values", one after the other."""
        self._parts.append((rows, counts, copy))

    def ready(self) -> bool:
        """Whether `rows` would return at once."""
        return all(copy.ready() for _, _, copy in self._parts)

    def rows(self) -> tuple[dict[int, np.ndarray], dict[int, str]]:
        """(float32 [n, size] by row of the plan, why a row failed); waits for the copies."""
        pooled: dict[int, np.ndarray] = {}
        failed: dict[int, str] = {}
        for rows, counts, copy in self._parts:
            values = copy.wait()["values"]
            sound = np.isfinite(values).all(-1)
            ends = np.cumsum(counts).tolist()
            for row, count, end in zip(rows, counts, ends, strict=True):
                if sound[end - count : end].all():
                    pooled[row] = values[end - count : end]
                else:
                    failed[row] = NOT_FINITE
        return pooled, failed


@dataclass(frozen=True)
class PooledHead:
    """What follows pooling: an embedding is cut and normalised, a score is biased and made a probability.

    A request whose field is None gets the value that is set here.
    """

    model: Model
    ops: Ops
    kind: Literal["embedding", "scores"]
    normalize: bool
    dimensions: int | None
    use_activation: bool
    activation: Activation
    dense: DenseLayers
    bias: float | None = None
    returned: tuple[int, ...] = ()

    def key(self, params: PoolingParams) -> tuple[bool | int | None, ...]:
        """Equal for requests whose rows `finish` may take together."""
        return params.normalize, params.dimensions, params.use_activation

    def finish(self, rows: Tensor, params: PoolingParams) -> Tensor:
        """float32 [N, size] for pooled rows [N, hidden_size]."""
        return self._embedding(rows, params) if self.kind == "embedding" else self._scores(rows, params)

    def _embedding(self, rows: Tensor, params: PoolingParams) -> Tensor:
        if not params.per_token:
            rows = self.dense(rows)
        size = self.dimensions if params.dimensions is None else params.dimensions
        if size is not None:
            rows = rows[:, :size]
        normalize = self.normalize if params.normalize is None else params.normalize
        return self.ops.unit(rows.float()) if normalize else rows.float().clone()

    def _scores(self, rows: Tensor, params: PoolingParams) -> Tensor:
        logits = self.model.logits(rows.to(next(self.model.parameters()).dtype)).float()
        if self.returned:
            logits = logits[:, list(self.returned)]
        if self.bias is not None:
            logits = logits - self.bias
        wanted = self.use_activation if params.use_activation is None else params.use_activation
        if not wanted or self.activation == "identity":
            return logits
        return torch.sigmoid(logits) if self.activation == "sigmoid" else logits.softmax(-1)


class NullPooling:
    """For models that generate."""

    def add(self, request: NewRequest) -> None:
        """A request takes its slot."""

    def remove(self, slot: int) -> None:
        """The request left its slot; an empty slot is fine."""

    def kinds(self) -> list[PoolingParams]:
        """A request of each kind that the model can pool; none for models that generate."""
        return []

    def segments(self, plan: StepPlan, positions: Tensor) -> Tensor | None:
        """int64 [T]: the text of a pair that each token belongs to; None when no row holds a pair."""
        del plan, positions
        return None

    def collect(self, plan: StepPlan, hidden: Tensor) -> PooledRows | None:
        """Pools `hidden` [T, hidden_size] of a step; None when no prompt ends with it."""
        del plan, hidden
        return None


@dataclass
class _Slot:
    """The pooling request of a slot."""

    params: PoolingParams
    prompt_len: int


@dataclass
class Pooling(NullPooling):
    """Serves all requests of a pooling engine. `poolers` by whether they give a row a token."""

    facts: PoolingFacts
    poolers: Mapping[bool, Pooler]
    head: PooledHead
    streams: Streams
    _slots: dict[int, _Slot] = field(default_factory=dict)

    def add(self, request: NewRequest) -> None:
        self.remove(request.slot)
        if request.pooling is None:
            raise ValueError(f"request {request.request_id!r} asks for tokens, but the model pools")
        self._slots[request.slot] = _Slot(request.pooling, len(request.token_ids))
        self.poolers[request.pooling.per_token].add(request.slot, request.token_ids)

    def remove(self, slot: int) -> None:
        known = self._slots.pop(slot, None)
        if known is not None:
            self.poolers[known.params.per_token].remove(slot)

    def kinds(self) -> list[PoolingParams]:
        return [PoolingParams(per_token=per_token) for per_token in self.poolers]

    def segments(self, plan: StepPlan, positions: Tensor) -> Tensor | None:
        if not self.facts.segments:
            return None
        seconds = [self._slots[slot].params.second_segment for slot in plan.slots.tolist()]
        if max(seconds) < 0:
            return None
        first = [second if second >= 0 else np.iinfo(np.int64).max for second in seconds]
        borders = np.full(len(positions), np.iinfo(np.int64).max)  # of padding, which follows: no second text
        borders[: plan.num_tokens] = np.repeat(np.array(first, np.int64), plan.num_scheduled)
        return (positions >= self.streams.stage(borders)).long()

    @torch.inference_mode()
    def collect(self, plan: StepPlan, hidden: Tensor) -> PooledRows | None:
        slots = [self._slots[slot] for slot in plan.slots.tolist()]
        rows = PoolerRows(
            slots=plan.slots,
            starts=np.cumsum(plan.num_scheduled) - plan.num_scheduled,
            counts=plan.num_scheduled,
            positions=plan.num_computed,
            last=plan.num_computed + plan.num_scheduled >= np.array([slot.prompt_len for slot in slots]),
        )
        pooled = PooledRows()
        per_token = np.array([slot.params.per_token for slot in slots])
        for kind, pooler in self.poolers.items():
            mine = np.flatnonzero(per_token == kind)
            if len(mine):
                self._pool(pooled, pooler, hidden, rows, mine, slots)
        return pooled if rows.last.any() else None

    def _pool(
        self,
        pooled: PooledRows,
        pooler: Pooler,
        hidden: Tensor,
        rows: PoolerRows,
        mine: np.ndarray,
        slots: list[_Slot],
    ) -> None:
        """Lets one pooler see its rows (`mine`), and finishes those whose prompt ends, by what they asked for."""
        if len(mine) < len(rows.slots):
            rows = PoolerRows(**{name: values[mine] for name, values in vars(rows).items()})
        vectors, counts = pooler.pool(hidden, rows)
        ended = mine[rows.last].tolist()
        kinds: dict[tuple[bool | int | None, ...], list[int]] = {}
        for place, row in enumerate(ended):
            kinds.setdefault(self.head.key(slots[row].params), []).append(place)
        starts = np.cumsum(counts) - counts
        for places in kinds.values():
            chosen = vectors
            if len(kinds) > 1:
                index = np.concatenate([np.arange(starts[place], starts[place] + counts[place]) for place in places])
                chosen = vectors.index_select(0, self.streams.stage(index))
            values = self.head.finish(chosen, slots[ended[places[0]]].params)
            copy = self.streams.copy_out({"values": values})
            pooled.put([ended[place] for place in places], [counts[place] for place in places], copy)
