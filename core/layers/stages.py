"""Pipeline stages: which layers each computes, and what stands for the parts of other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from ..interfaces.collectives import ProcessGroup
from .weights import WeightSlot


class Stage(NamedTuple):
    """Whether a stage is the first, which embeds tokens, and the last, which has the final norm and the head."""

    first: bool = True
    last: bool = True


def split_layers(num_layers: int, num_stages: int, chosen: Sequence[int] = ()) -> list[range]:
    """The layers of each stage, in order: `chosen` many where given, else as many for each as for the others.

    Layers that are left over go to the stages before the last one, which has the head: 10 layers over 4 stages are
    2, 3, 3 and 2. Raises `ValueError` for a stage without a layer, and for counts that do not fit.
    """
    if num_stages > num_layers:
        raise ValueError(f"{num_layers} layers cannot be divided into {num_stages} pipeline stages; use {num_layers}")
    counts = list(chosen)
    if not counts:
        each, extra = divmod(num_layers, num_stages)
        last = num_stages - 1
        counts = [each + (last - extra <= stage < last) for stage in range(num_stages)]
    said = ",".join(map(str, counts))
    if len(counts) != num_stages:
        raise ValueError(f"{said} counts the layers of {len(counts)} pipeline stages, and there are {num_stages}")
    if min(counts) < 1:
        raise ValueError(f"{said} leaves a pipeline stage without a layer; each needs at least 1")
    if sum(counts) != num_layers:
        raise ValueError(f"{said} counts {sum(counts)} layers in all, and the model has {num_layers}")
    firsts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]


class Layers(nn.ModuleList):
    """Layers that a model only calls one after another: a warm-up may leave out those that repeat earlier ones.

    They keep their names, the numbers from `first` on. `absent` are the layers of other stages, on the meta device,
    which are no modules of the model: only their weight slots and KV specs are asked for.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), first: int = 0, absent: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.absent = tuple(absent)
        for index, module in enumerate(modules, first):
            self.add_module(str(index), module)


class AbsentLayer(nn.Module):
    """Stands for the embedding or head of another stage. `options` are what the part would have been made with.

    Its checkpoint tensors are known and not read.
    """

    def __init__(self, prefix: str, weight_slots: Callable[[], list[WeightSlot]], **options: Any) -> None:
        super().__init__()
        self.prefix, self.options, self._slots = prefix, options, weight_slots

    def weight_slots(self) -> list[WeightSlot]:
        return self._slots()

    def forward(self, *tensors: Any) -> NoReturn:
        """Raises `RuntimeError`: the model has to ask `build.stage` before it calls such a part."""
        raise RuntimeError(f"{self.prefix} belongs to another pipeline stage and cannot be called in this one")


class StageEnd(nn.Module):
    """Takes the place of the final norm in a stage that is not the last: gives the sum that the next stage starts from.

    What it is called with beside a residual is this rank's part of a sum over `group`. `norm` is on the meta device:
    its checkpoint tensors are known and not read.
    """

    def __init__(self, norm: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.absent = (norm,)
        self._group = group

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x, or with a residual (x + residual) twice, as a norm gives (normed, sum); all [T, hidden_size]."""
        if residual is None:
            return x
        total = (self._group.all_reduce(x) if self._group.size > 1 else x) + residual
        return total, total
