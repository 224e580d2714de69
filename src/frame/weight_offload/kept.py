"""A layer whose weights are kept in host memory, and the methods of its parts while weights are loaded.

Weights are loaded, repacked and stored part by part, in the place on the device where steps read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from frame.core.layers.cached import CachedLayer
from frame.core.layers.linear import MethodLayer

from .host_bytes import HostBytes

if TYPE_CHECKING:
    from .ring import WeightRing

#: Parameters begin at multiples of this, as those that torch allocates do.
ALIGNMENT = 512


def parts_of(module: nn.Module) -> Iterator[MethodLayer]:
    """The parts of a layer whose weights can be kept in host memory.

    What belongs to a layer with a cache stays on the device, as other weights are made of it.
    """
    if isinstance(module, CachedLayer):
        return
    if isinstance(module, MethodLayer):
        yield module
    for child in module.children():
        yield from parts_of(child)


def own_parameters(part: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a part, without those of parts inside it."""
    yield from part.parameters(recurse=False)
    for child in part.children():
        if not isinstance(child, MethodLayer):
            yield from own_parameters(child)


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def layer_bytes(layer: nn.Module) -> int:
    """Bytes that the weights of a layer take in host memory, and in its place on the device."""
    return sum(aligned(one.nbytes) for part in dict.fromkeys(parts_of(layer)) for one in own_parameters(part))


@dataclass(frozen=True, eq=False)
class KeptPart:
    """A part of a layer, and the bytes of the layer's weights that are its own; `kept` is the layer's number."""

    part: MethodLayer
    kept: int
    start: int
    stop: int


class KeptLayer:
    """Number `index` of the layers whose weights are kept, with the content that they have now."""

    def __init__(self, layer: nn.Module, index: int, pinned: Callable[[int], Tensor]) -> None:
        self.layer = layer
        self.index = index
        self.parts: list[KeptPart] = []
        self.parameters: list[tuple[nn.Parameter, int]] = []  # with the first byte of each
        self.num_bytes = layer_bytes(layer)
        self.host = HostBytes(self.num_bytes, pinned)
        place = 0
        for part in dict.fromkeys(parts_of(layer)):
            start = place
            for parameter in own_parameters(part):
                self.host.put(place, parameter.data)
                self.parameters.append((parameter, place))
                place += aligned(parameter.nbytes)
            self.parts.append(KeptPart(part, index, start, place))

    def lay(self, memory: Tensor) -> None:
        """Has the parameters lie in `memory`, uint8 on the device."""
        for parameter, start in self.parameters:
            place = memory[start : start + parameter.nbytes]
            parameter.data = place.view(parameter.dtype).view(parameter.shape)

    def misplaced(self, memory: Tensor) -> bool:
        """Whether a parameter lies elsewhere than `lay` put it, as a method may have replaced it."""
        first = memory.data_ptr()
        return any(one.numel() and one.data_ptr() != first + start for one, start in self.parameters)


class KeptMethod:
    """The method of a part, `inner`, around whose loading the weights are fetched and stored again."""

    stages = True  # one part after the other

    def __init__(self, inner: Any, part: KeptPart, ring: WeightRing) -> None:
        self._inner, self._part, self._ring = inner, part, ring
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_load(self, layer: Any) -> None:
        """As that of the inner method; called again when another part has taken the place meanwhile."""
        self._ring.open(self._part)
        if not self._begun:
            self._begun = True
            self._inner.begin_load(layer)

    def finish_load(self, layer: Any) -> None:
        """Left to `pack`, which is also called for a part whose place was taken."""

    def pack(self, layer: Any) -> None:
        """Finishes a loading that has begun, and stores the weights; they are in no order but the inner method's."""
        if self._begun:
            self._begun = False
            self._ring.open(self._part)
            self._inner.finish_load(layer)
            self._ring.store(self._part)

    def unpack(self, layer: Any) -> None:
        """Nothing is packed."""
