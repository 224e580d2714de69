"""Token embedding and output head, sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..interfaces.collectives import ProcessGroup, SingleGroup
from ..interfaces.quantization import EmbeddingMethod, EmbeddingSpec
from .linear import MethodLayer, empty_parameter
from .weights import WeightSlot

if TYPE_CHECKING:
    from .build import Build


class VocabRows(MethodLayer):
    """A rank's rows of a [vocabulary, dim] table, padded so that every rank holds equally many."""

    weight: nn.Parameter  # from `PlainEmbedding`

    def __init__(
        self, build: Build, prefix: str, vocab_size: int, dim: int, group: ProcessGroup, *, head: bool = False
    ) -> None:
        super().__init__(build)
        self.prefix, self.vocab_size, self.dim, self.group = prefix, vocab_size, dim, group
        self.num_rows = -(-vocab_size // group.size)
        self.start = group.rank * self.num_rows
        self.num_used = max(0, min(vocab_size - self.start, self.num_rows))
        self.spec = EmbeddingSpec(vocab_size, dim, self.start, self.num_used, self.num_rows, head)
        self.method: EmbeddingMethod = build.methods.embedding(prefix, self.spec)
        #: whether a head multiplies by the rows
        self.is_tied = False
        # what that head reads in their place if that is quicker; no parameter: `pack` and `unpack` make and drop it
        self.register_buffer("packed", None, persistent=False)
        self._slots = self.method.create(self)

    def weight_slots(self) -> list[WeightSlot]:
        return self._slots


class VocabEmbedding(VocabRows):
    """Rows by id; with `shard` each rank looks up its own rows and the sum over the tensor group is the result."""

    def __init__(self, build: Build, prefix: str, num_embeddings: int, dim: int, *, shard: bool = True) -> None:
        super().__init__(build, prefix, num_embeddings, dim, build.groups.tensor if shard else SingleGroup())

    def forward(self, ids: Tensor) -> Tensor:
        """ids (any integer type) [T] → [T, dim]."""
        if self.group.size == 1:
            return self.method.rows(self, ids)
        local = ids - self.start
        mine = (local >= 0) & (local < self.num_used)
        rows = self.method.rows(self, torch.where(mine, local, torch.zeros_like(local)))
        return self.group.all_reduce(rows * mine.unsqueeze(-1).to(rows.dtype))


def tied_tables(model: nn.Module) -> list[VocabRows]:
    """The tables that both an embedding and a head read, and of which a packed copy may therefore be held."""
    return [one for one in model.modules() if isinstance(one, VocabRows) and one.is_tied and one.method.copies]


class Head(nn.Module):
    """Output projection to logits. With `tied` it multiplies by the embedding's rows and owns none."""

    def __init__(
        self,
        build: Build,
        prefix: str,
        hidden_size: int,
        vocab_size: int,
        *,
        tied: nn.Module | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        group = build.groups.tensor
        if tied is not None and not (isinstance(tied, VocabEmbedding) and tied.group.size == group.size):
            raise ValueError(f"{prefix} can only be tied to an embedding that is sharded like it, not to {tied}")
        self.prefix, self.vocab_size, self.group, self.ops = prefix, vocab_size, group, build.ops
        self._gathers = group.size > 1
        self.tied = tied is not None
        self.table: VocabRows = (
            tied
            if isinstance(tied, VocabEmbedding)
            else VocabRows(build, prefix, vocab_size, hidden_size, group, head=True)
        )
        self.table.is_tied = self.tied
        self.bias = empty_parameter(build, self.table.num_rows) if bias else None
        if self.bias is not None:
            self.bias.data[self.table.num_used :].zero_()

    @contextmanager
    def divided(self) -> Iterator[None]:
        """Within it `forward` gives [N, rows of this rank's table], its part of the vocabulary and padding."""
        gathered, self._gathers = self._gathers, False
        try:
            yield
        finally:
            self._gathers = gathered

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, vocab_size], the same on every rank."""
        logits = self.table.method.apply(self.table, hidden, self.bias)
        return self.gathered(logits) if self._gathers else logits

    def gathered(self, part: Tensor) -> Tensor:
        """Whole rows [N, vocab_size] of what `forward` gives each rank when it is `divided`."""
        return self.group.all_gather(part, dim=-1)[..., : self.vocab_size]

    def weight_slots(self) -> list[WeightSlot]:
        """Some checkpoints hold a copy of a tied weight, which is not read."""
        slots: list[WeightSlot] = []
        if self.tied:
            slots.append(WeightSlot(f"{self.prefix}.weight", (self.vocab_size, self.table.dim), None))
        if self.bias is not None:
            used = self.table.num_used
            rows = slice(self.table.start, self.table.start + used)
            slots.append(WeightSlot(f"{self.prefix}.bias", (self.vocab_size,), self.bias, (rows,), (slice(0, used),)))
        return slots
