"""What layers with a running state of each request share: their plan, and their tensors in a block of the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from frame.core.interfaces.attention import BlockFormat, GroupBatch
from frame.core.interfaces.connector import StateRun
from frame.core.interfaces.kv import StateKV
from frame.core.layers.cached import CachedLayer, Planner
from frame.core.layers.weights import WeightSlot
from frame.core.ops.states import StateRows

if TYPE_CHECKING:
    from frame.core.layers.build import Build

#: A tensor in a block: its shape and element type.
StatePart = tuple[tuple[int, ...], torch.dtype]
#: Rows that a rank has of those of all ranks: first, count, total.
Share = tuple[int, int, int]
#: Channels of a checkpoint tensor that a rank takes: (name, channels in all, first, count).
Run = tuple[str, int, int, int]


class StatePlanner:
    """Says where the rows of a step have their states, on the device alone, so that decode steps can be captured."""

    needs_python = False

    def plan(self, batch: GroupBatch) -> StateRows:
        """The rows of `batch`; what padding rows say of their block is not read."""
        blocks, lengths = batch.block_table[:, 0], batch.query_start.diff()
        used = batch.seq_lens > 0
        return StateRows(
            batch.query_start, torch.where(used, blocks, 0), batch.seq_lens == lengths, batch.max_query_len
        )


class StateLayer(CachedLayer):
    """A layer whose block of a request holds the tensors `parts`, by name, one behind the other.

    `states[name]` is [blocks, *shape] of each once the cache is bound. `runs[name]` says which rows of a tensor, along
    its first axis, are this rank's: (first, count, how many all ranks have) of each run of them. A connector moves
    states between engines of other tensor-parallel sizes where all tensors are told.
    """

    def __init__(
        self, build: Build, name: str, parts: Mapping[str, StatePart], runs: Mapping[str, Sequence[Share]] | None = None
    ) -> None:
        super().__init__(build, name)
        # the widest elements first, so that each tensor begins at a multiple of its own
        self.parts = dict(sorted(parts.items(), key=lambda item: -item[1][1].itemsize))
        self.states: dict[str, Tensor] = {}
        self.cache_parts = tuple((dtype, math.prod(shape) * dtype.itemsize) for shape, dtype in self.parts.values())
        if runs is not None:
            self.cache_runs = tuple(run for part in self.parts for run in self._runs(part, runs[part]))

    def _runs(self, part: str, shares: Sequence[Share]) -> Iterator[StateRun]:
        (rows, *others), dtype = self.parts[part]
        if sum(count for _, count, _ in shares) != rows:
            raise ValueError(f"{self.name}: the runs of {part!r} are not all of its {rows} rows")
        for first, count, total in shares:
            yield StateRun(dtype, math.prod(others) * dtype.itemsize, first, first + count, total)

    def kv_spec(self) -> StateKV:
        return StateKV(state_bytes=sum(size for _, size in self.cache_parts))

    def planner(self, backend: Planner | None) -> Planner:
        del backend
        return StatePlanner()

    def bind(self, cache: Tensor | None, block: BlockFormat | None, plan: int, planner: Planner) -> None:
        super().bind(cache, block, plan, planner)
        if self.kv_cache is None:
            return
        start = 0
        for name, (shape, dtype) in self.parts.items():
            size = math.prod(shape) * dtype.itemsize
            self.states[name] = self.kv_cache.narrow(1, start, size).view(dtype).unflatten(1, shape)
            start += size

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        """Of the subclass, with `plan` a `StateRows`."""
        raise NotImplementedError


class ChannelConv(nn.Module):
    """The weight [channels, 1, width] and the bias of a convolution of each channel, for `runs` of channels of a rank.

    The checkpoint has them as "NAME.weight" [total, 1, width] and "NAME.bias" [total]; a run is (name, total, first,
    count).
    """

    def __init__(self, build: Build, width: int, runs: Sequence[Run], *, bias: bool = False) -> None:
        super().__init__()
        self.width, self.runs = width, tuple(runs)
        self.channels = sum(count for *_, count in runs)
        self.weight = empty_tensor(build, build.dtype, self.channels, 1, width)
        self.bias = empty_tensor(build, build.dtype, self.channels) if bias else None

    def weight_slots(self) -> list[WeightSlot]:
        slots, offset = list[WeightSlot](), 0
        for name, total, first, count in self.runs:
            taken, region = (slice(first, first + count),), (slice(offset, offset + count),)
            offset += count
            slots.append(WeightSlot(f"{name}.weight", (total, 1, self.width), self.weight, taken, region))
            if self.bias is not None:
                slots.append(WeightSlot(f"{name}.bias", (total,), self.bias, taken, region))
        return slots

    @property
    def taps(self) -> Tensor:
        """[channels, width]: the factors of the inputs, of the newest one last."""
        return self.weight.squeeze(1)

    @property
    def window(self) -> StatePart:
        """What of a request's newest inputs the convolution needs."""
        return (self.channels, self.width - 1), self.weight.dtype

    @property
    def shares(self) -> list[Share]:
        """The channels of `window` that are this rank's."""
        return [(first, count, total) for _, total, first, count in self.runs]


class ConvState(StateLayer):
    """A convolution that is a layer by itself: [T, channels] → [T, channels], through silu if `silu`."""

    def __init__(self, build: Build, name: str, conv: ChannelConv, *, silu: bool) -> None:
        super().__init__(build, name, {"conv": conv.window}, {"conv": conv.shares})
        self.ops, self.conv, self.silu = build.ops, conv, silu

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        conv = self.conv
        return self.ops.causal_conv(tensors[0], conv.taps, conv.bias, self.states["conv"], plan, silu=self.silu)


class FloatWeights(nn.Module):
    """Small tensors that stay float32, by their names behind PREFIX: `mine` of the first axis of each on this rank."""

    def __init__(self, build: Build, prefix: str, shapes: Mapping[str, tuple[int, ...]], mine: slice) -> None:
        super().__init__()
        self.prefix, self.shapes, self.mine = prefix, dict(shapes), mine
        for name, (_, *others) in shapes.items():
            whole = empty_tensor(build, torch.float32, mine.stop - mine.start, *others)
            self.register_parameter(name.replace(".", "_"), whole)

    def __getitem__(self, name: str) -> nn.Parameter:
        """The tensor called `name` in the checkpoint."""
        return self.get_parameter(name.replace(".", "_"))

    def weight_slots(self) -> list[WeightSlot]:
        named = self.shapes.items()
        return [WeightSlot(f"{self.prefix}.{name}", shape, self[name], (self.mine,)) for name, shape in named]


def empty_tensor(build: Build, dtype: torch.dtype, *shape: int) -> nn.Parameter:
    """An uninitialised parameter of any type on the build's device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=build.device), requires_grad=False)
