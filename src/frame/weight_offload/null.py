"""What a build asks of weight offload, and the null object, with which all weights stay on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

    from frame.core.interfaces.model import Model

M = TypeVar("M", bound="Model")


class NoOffload:
    """All weights stay on the device."""

    #: bytes of weights that are kept in host memory
    kept_bytes = 0
    #: bytes that the device has to hold less, because its memory for copied layers serves many
    saved_bytes = 0

    def layer(self, layer: nn.Module, count: int) -> nn.Module:
        """Called with each of the `count` layers of this pipeline stage when it is made; returns it."""
        del count
        return layer

    def finish(self, model: M) -> M:
        """Called once, when the model is made and before its weights are read; returns it."""
        return model


NO_OFFLOAD = NoOffload()


def moves_weights(model: nn.Module) -> bool:
    """Whether weights of the model are copied to the device in each step."""
    return getattr(model, "weight_ring", None) is not None
