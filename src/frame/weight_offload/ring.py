"""The places on the device that layers in host memory take in turn, and the copies that fill them ahead of their use.

With S places, layer n lies in place n mod S, so that its weights have fixed addresses. When it has been computed,
layer n + S is copied there on a side queue, or, at the end of a step, the layer with which the next step begins.
Between steps the first S layers lie in their places and no copy is under way, so that a step can be captured as a graph
with its copies: it begins and ends like that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from frame.core.interfaces.model import Model
from frame.core.interfaces.platform import Mark, SideQueue

from .kept import KeptLayer, KeptMethod, KeptPart


class WeightRing(nn.Module):
    """`num_places` places for `layers`, of which there are more. A part of the model whose layers they are.

    `first` is memory on the device for the largest layer, which is one of the places. `queue` makes the copies.
    """

    def __init__(self, layers: Sequence[KeptLayer], num_places: int, first: Tensor, queue: SideQueue) -> None:
        super().__init__()
        self._layers = list(layers)
        self._queue = queue
        for number in range(num_places):
            place = torch.empty_like(first) if number else first
            self.register_buffer(f"place{number}", place, persistent=False)
        self.num_places = num_places
        self.num_bytes = len(first) * num_places
        self._forget()
        self._holds: list[int | None]  # the layer that is there, or on its way; None where nobody knows
        self._arrivals: list[Mark | None]  # of a copy that the main queue has not waited for
        self._open: list[KeptPart | None] = [None] * num_places  # what is being loaded there
        for layer in layers:
            layer.lay(self._place(layer.index))
            for part in layer.parts:
                part.part.method = KeptMethod(part.part.method, part, self)
            layer.layer.register_forward_pre_hook(partial(self._before, layer.index))
            layer.layer.register_forward_hook(partial(self._after, layer.index))

    def watch(self, model: Model) -> None:
        """Has the ring put in order at the end of each forward pass of `model`, also of one that raises."""
        model.register_forward_hook(self._end, always_call=True)

    def _place(self, index: int) -> Tensor:
        return self.get_buffer(f"place{index % self.num_places}")

    # steps

    def _before(self, index: int, *_: Any) -> None:
        """Called before layer `index` computes: its weights have arrived then."""
        place = index % self.num_places
        if self._holds[place] != index:  # a step that leaves layers out
            self._fetch(index)
        self._wait(place)

    def _after(self, index: int, *_: Any) -> None:
        """Called when layer `index` has been launched: its place is free behind that."""
        following = index + self.num_places
        self._fetch(following if following < len(self._layers) else index % self.num_places)

    def _end(self, model: nn.Module, given: Any, result: Any) -> None:
        """Called at the end of a forward pass; without a result it has raised, and nobody knows what it launched.

        A capture that has failed takes no more copies, and has made none: then all is as it was before.
        """
        if result is None:
            self._forget()
        try:
            for place in range(self.num_places):
                if self._holds[place] != place:
                    self._fetch(place)
                self._wait(place)
        except Exception:
            self._forget()
            if result is not None:
                raise

    def _forget(self) -> None:
        self._holds = [None] * self.num_places
        self._arrivals = [None] * self.num_places

    def _fetch(self, index: int) -> None:
        """Has the weights of layer `index` copied to their place, behind what the main queue holds now."""
        layer, place = self._layers[index], self._place(index)
        self._queue.run(partial(layer.host.copy_to, place, 0, layer.num_bytes))
        number = index % self.num_places
        self._arrivals[number] = self._queue.mark()
        self._holds[number] = index

    def _wait(self, place: int) -> None:
        arrival, self._arrivals[place] = self._arrivals[place], None
        if arrival is not None:
            arrival.before_main()

    # loading

    def open(self, part: KeptPart) -> None:
        """Puts the weights of a part into their place, to be changed there; stores those of another that lie there."""
        place = part.kept % self.num_places
        other = self._open[place]
        if other is part:
            return
        if other is not None:
            self.store(other)
            other.part.loading = False  # so that its method hears of its next tensor
        self._layers[part.kept].host.copy_to(self._place(part.kept), part.start, part.stop)
        self._open[place], self._holds[place] = part, None

    def store(self, part: KeptPart) -> None:
        """Keeps the weights of an open part as they are now in host memory."""
        layer, memory = self._layers[part.kept], self._place(part.kept)
        if layer.misplaced(memory):
            raise RuntimeError(
                f"{type(part.part).__name__} {part.part.spec} has moved a weight while it was loaded, which therefore "
                "cannot be kept in host memory; leave cpu_offload_gb out"
            )
        layer.host.copy_from(memory, part.start, part.stop)
        self._open[part.kept % self.num_places] = None

    def finish_load(self) -> None:
        """Called when all layers have finished their loading: the first ones lie in their places again."""
        for index in range(self.num_places):
            layer = self._layers[index]
            layer.host.copy_to(self._place(index), 0, layer.num_bytes)
            self._holds[index], self._arrivals[index] = index, None
