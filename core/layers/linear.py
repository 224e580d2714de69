"""Linear layers over this rank's shard of one or several checkpoint tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..interfaces.collectives import ProcessGroup
from .weights import WeightSlot

if TYPE_CHECKING:
    from .build import Build


def split_evenly(what: str, count: int, group: ProcessGroup) -> int:
    """`count` over the ranks of `group`; raises `ValueError` naming `what` when it does not divide."""
    if count % group.size:
        raise ValueError(f"{what}: {count} cannot be split over {group.size} ranks")
    return count // group.size


def empty_parameter(build: Build, *shape: int) -> nn.Parameter:
    """An uninitialised parameter on the build's device; nothing is computed for it."""
    return nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device), requires_grad=False)


@dataclass(frozen=True)
class Rows:
    """Output rows taken from the checkpoint tensor `name` (without suffix): `count` of its `total`, from `start`."""

    name: str
    total: int
    start: int
    count: int


class LinearShard(nn.Module):
    """W [Σ rows.count, columns] and b, put together from the rows of one or more checkpoint tensors.

    `columns` is the slice of the tensors' `in_features` columns that this rank holds.
    """

    def __init__(
        self,
        build: Build,
        rows: Sequence[Rows],
        in_features: int,
        columns: slice,
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.rows, self.in_features, self.columns, self.transposed = tuple(rows), in_features, columns, transposed
        self.ops, self.group = build.ops, build.groups.tensor
        out_features = sum(part.count for part in rows)
        self.weight = empty_parameter(build, out_features, columns.stop - columns.start)
        self.bias = empty_parameter(build, out_features) if bias else None

    def weight_slots(self) -> list[WeightSlot]:
        """One slot a run of rows, for the weight and for the bias."""
        slots: list[WeightSlot] = []
        offset = 0
        for part in self.rows:
            taken, region = slice(part.start, part.start + part.count), (slice(offset, offset + part.count),)
            offset += part.count
            shape, index = (part.total, self.in_features), (taken, self.columns)
            if self.transposed:
                shape, index = (shape[1], shape[0]), (index[1], index[0])
            slots.append(
                WeightSlot(f"{part.name}.weight", shape, self.weight, index, region, transposed=self.transposed)
            )
            if self.bias is not None:
                slots.append(WeightSlot(f"{part.name}.bias", (part.total,), self.bias, (taken,), region))
        return slots


class Linear(LinearShard):
    """y = x Wᵀ + b, with all inputs and the outputs of this rank."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] → [..., Σ rows.count]."""
        return self.ops.linear(x, self.weight, self.bias)

    def silu_mul(self, x: Tensor) -> Tensor:
        """[..., in_features] → [..., Σ rows.count / 2]: `forward`'s first half through silu, times its second."""
        return self.ops.linear_silu_mul(x, self.weight, self.bias)


class RowLinear(LinearShard):
    """Shards inputs: every rank multiplies its columns, the sum over the group is the result, then the bias.

    Without `reduces` the result is this rank's part of that sum, the first one's with the bias.
    """

    reduces = True

    def forward(self, x: Tensor) -> Tensor:
        """[..., this rank's inputs] → [..., out_features], the same on every rank unless it is a part of a sum."""
        if self.group.size == 1 or not self.reduces:
            bias = self.bias if self.group.rank == 0 else None
            parts = self._parts(x) if self.group.size > 1 and self.bias is None else []
            return self._begun(x, parts) if parts else self.ops.linear(x, self.weight, bias)
        y = self.group.all_reduce(self.ops.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def _parts(self, x: Tensor) -> list[slice]:
        if x.dim() != 2 or self.ops.invariant:
            return []
        return self.group.parts_of(len(x), len(self.weight) * x.dtype.itemsize, x.shape[1])

    def _begun(self, x: Tensor, parts: Sequence[slice]) -> Tensor:
        """The product, the sum of whose first parts has begun while the last one is computed."""
        y = x.new_empty(len(x), len(self.weight))
        for rows in parts:
            self.ops.linear_into(y[rows], x[rows], self.weight)
            self.group.begin_all_reduce(y, rows)
        return y


class AttentionInput(LinearShard):
    """Query, key and value projection in one product, sharded by heads.

    With fewer key/value heads than ranks, each head is held by several ranks.
    """

    def __init__(
        self,
        build: Build,
        prefix: str,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        names: Sequence[str],
        transposed: bool,
    ) -> None:
        group = build.groups.tensor
        heads = split_evenly(f"the attention heads of {prefix}", num_heads, group)
        kv_heads, first_kv = local_kv_heads(prefix, num_kv_heads, group)
        query, kv = (num_heads, group.rank * heads, heads), (num_kv_heads, first_kv, kv_heads)
        rows: list[Rows] = []
        base = 0
        fused_total = (num_heads + 2 * num_kv_heads) * head_dim
        for i, (total, first, count) in enumerate((query, kv, kv)):
            if len(names) == 1:
                rows.append(Rows(f"{prefix}.{names[0]}", fused_total, (base + first) * head_dim, count * head_dim))
                base += total
            else:
                rows.append(Rows(f"{prefix}.{names[i]}", total * head_dim, first * head_dim, count * head_dim))
        super().__init__(build, rows, hidden_size, slice(0, hidden_size), bias=bias, transposed=transposed)
        self.head_dim = head_dim
        self.sizes = [part.count for part in rows]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden_size] → query [T, heads, head_dim], key, value [T, kv_heads, head_dim]: views of one tensor."""
        return self.heads(self.ops.linear(x, self.weight, self.bias))

    def heads(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `forward` returns, of the product [T, Σ rows.count]."""
        query, key, value = joined.split(self.sizes, dim=-1)
        shape = (joined.shape[0], -1, self.head_dim)
        return query.view(shape), key.view(shape), value.view(shape)


def local_kv_heads(prefix: str, num_kv_heads: int, group: ProcessGroup) -> tuple[int, int]:
    """(number, first) of the key/value heads that this rank holds; heads are repeated over ranks when they are few."""
    if num_kv_heads < group.size and group.size % num_kv_heads == 0:
        return 1, group.rank * num_kv_heads // group.size
    count = split_evenly(f"the key/value heads of {prefix}", num_kv_heads, group)
    return count, group.rank * count
