"""Linear layers over this rank's shard of one or several checkpoint tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..interfaces.collectives import ProcessGroup
from ..interfaces.quantization import LinearMethod, LinearSpec, Rows as Rows
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


class MethodLayer(nn.Module):
    """A layer whose weights belong to its `method`, which makes them by `empty`."""

    method: Any

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.ops, self.dtype, self.device = build.ops, build.dtype, build.device
        self.loading = False

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter where the layer computes, of the model's dtype unless another is given."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)

    @property
    def stages(self) -> bool:
        """Whether loading takes memory from `begin_load` to `finish_load`."""
        return bool(self.method.stages)

    def begin_load(self) -> None:
        """Called before the first of the layer's tensors arrives; further calls do nothing."""
        if not self.loading:
            self.loading = True
            self.unpack_weights()
            self.method.begin_load(self)

    def finish_load(self) -> None:
        """Called when the last of them has arrived, and after each loading of other layers."""
        if self.loading:
            self.loading = False
            self.method.finish_load(self)
        self.method.pack(self)

    def unpack_weights(self) -> None:
        """Puts what `finish_load` has packed back into the order that it was loaded in."""
        self.method.unpack(self)


class LinearShard(MethodLayer):
    """W [Σ rows.count, columns] and b, put together from the rows of one or more checkpoint tensors.

    `columns` is the slice of the tensors' `in_features` columns that this rank holds.
    """

    weight: nn.Parameter  # from `PlainLinear`

    def __init__(
        self,
        build: Build,
        rows: Sequence[Rows],
        in_features: int,
        columns: slice,
        *,
        bias: bool = False,
        transposed: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__(build)
        self.spec = LinearSpec(tuple(rows), columns, in_features, bias, transposed, exact)
        self.group = build.groups.tensor
        self.method: LinearMethod = build.methods.linear(self.spec)
        self._slots = self.method.create(self)
        self.bias = self.empty(self.spec.out_features) if bias else None
        if self.bias is not None:
            self._slots += WeightSlot.sharded("bias", self.bias, self.spec, columns_per=None)

    def weight_slots(self) -> list[WeightSlot]:
        """Those of the method, and one for each run of rows of the bias."""
        return self._slots


class Linear(LinearShard):
    """y = x Wᵀ + b, with all inputs and the outputs of this rank."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] → [..., Σ rows.count]."""
        return self.method.apply(self, x, self.bias)

    def silu_mul(self, x: Tensor) -> Tensor:
        """[..., in_features] → [..., Σ rows.count / 2]: `forward`'s first half through silu, times its second."""
        return self.method.apply_gated(self, x, self.bias)


class RowLinear(LinearShard):
    """Shards inputs: every rank multiplies its columns, the sum over the group is the result, then the bias.

    Without `reduces` the result is this rank's part of that sum, the first one's with the bias. Of one that `begins`
    the sum may have begun: it must go to the norm that completes it as it is.
    """

    reduces = True
    begins = True

    def forward(self, x: Tensor) -> Tensor:
        """[..., this rank's inputs] → [..., out_features], the same on every rank unless it is a part of a sum."""
        if self.group.size == 1 or not self.reduces:
            bias = self.bias if self.group.rank == 0 else None
            parts = self._parts(x) if self.group.size > 1 and self.bias is None else []
            return self._begun(x, parts) if parts else self.method.apply(self, x, bias)
        y = self.group.all_reduce(self.method.apply(self, x, None))
        return y if self.bias is None else y + self.bias

    def _parts(self, x: Tensor) -> list[slice]:
        if x.dim() != 2 or self.ops.invariant or not (self.begins and self.method.takes_parts):
            return []
        return self.group.parts_of(len(x), self.spec.out_features * x.dtype.itemsize, x.shape[1])

    def _begun(self, x: Tensor, parts: Sequence[slice]) -> Tensor:
        """The product, the sum of whose first parts has begun while the last one is computed."""
        y = x.new_empty(len(x), self.spec.out_features)
        for rows in parts:
            self.method.apply_into(self, y[rows], x[rows])
            self.group.begin_all_reduce(y, rows)
        return y


def _joined_rows(
    name: str, parts: dict[str, tuple[int, int, int]], head_dim: int, groups: int, order: str
) -> list[Rows]:
    """The runs of rows of a tensor that joins queries, keys and values (`Build.attention_input`).

    `parts` are (heads of the model, the first of this rank, how many it has) by q, k and v, in the order of the result.
    """
    if sorted(order) != sorted(parts):
        raise ValueError(f"{name}: the order {order!r} must have each of {', '.join(parts)} once")
    if odd := [heads for heads, _, _ in parts.values() if heads % groups]:
        raise ValueError(f"{name}: {odd[0]} heads do not divide into {groups} groups")
    in_group = sum(heads for heads, _, _ in parts.values()) // groups
    total, rows = in_group * groups * head_dim, list[Rows]()
    for kind, (heads, first, count) in parts.items():
        each, before = heads // groups, sum(parts[other][0] // groups for other in order[: order.index(kind)])
        for index in range(groups):
            start, stop = max(first, index * each), min(first + count, (index + 1) * each)
            if start < stop:
                head = index * in_group + before + start - index * each
                rows.append(Rows(name, total, head * head_dim, (stop - start) * head_dim))
    return rows


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
        groups: int = 1,
        order: str = "qkv",
    ) -> None:
        group = build.groups.tensor
        heads = split_evenly(f"the attention heads of {prefix}", num_heads, group)
        kv_heads, first_kv = local_kv_heads(prefix, num_kv_heads, group)
        query, kv = (num_heads, group.rank * heads, heads), (num_kv_heads, first_kv, kv_heads)
        parts = {"q": query, "k": kv, "v": kv}
        if len(names) == 1:
            rows = _joined_rows(f"{prefix}.{names[0]}", parts, head_dim, groups, order)
        else:
            rows = [
                Rows(f"{prefix}.{name}", total * head_dim, first * head_dim, count * head_dim)
                for name, (total, first, count) in zip(names, parts.values(), strict=True)
            ]
        super().__init__(build, rows, hidden_size, slice(0, hidden_size), bias=bias, transposed=transposed)
        self.head_dim = head_dim
        self.sizes = [count * head_dim for _, _, count in parts.values()]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden_size] → query [T, heads, head_dim], key, value [T, kv_heads, head_dim]: views of one tensor."""
        return self.heads(self.method.apply(self, x, self.bias))

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
