"""Adapters: small additions to the weights of a model, of which each request may have another.

An `Adapters` plugin wraps the linear layers of a model. A *slot* is a place for one adapter on the device, numbered
from 1; 0 is the model without one. Knows no request: it is told which slot each token of a step has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from .experts import ExpertMethod, ExpertSpec
    from .quantization import LinearMethod, LinearSpec
    from .setup import AdapterResolverSetup


class AdapterSource(msgspec.Struct, frozen=True):
    """The name by which requests choose an adapter, and the folder that holds it."""

    name: str
    path: str


class AdapterLoad(msgspec.Struct, kw_only=True):
    """Before the step, `slot` takes the adapter that was read under the number `key`."""

    slot: int
    key: int


class ReadAdapter(NamedTuple):
    """An adapter in host memory: `digest` of its files' bytes, equal on all ranks; `tensors` are this rank's share.

    `tensors` holds what the plugin that read it wants, by layer.
    """

    digest: str
    tensors: Mapping[str, Any]


class Adapters(ABC):
    """The adapters that a worker holds. Built as `Class(setup, options)`, once for a model.

    `linear` and `experts` are called while the model is built; the other calls come from the worker's thread between
    steps, but for `read`, which another thread makes.
    """

    #: how many adapters a step may have
    max_adapters: int = 0
    #: whether the step that runs has tokens with an adapter; set by the runner before each forward pass, constant for
    #: all steps of one shape
    active: bool = False
    #: whether the layers that are made now compute the tokens that an encoder reads (see `frame.layers.over_encoder`)
    reads: bool = False

    @property
    @abstractmethod
    def slots(self) -> Tensor:
        """The slot of each token of a step, int32 [max_num_batched_tokens], always at the same address."""

    @abstractmethod
    def linear(self, prefix: str, spec: LinearSpec, inner: LinearMethod) -> LinearMethod:
        """Returns what adds to the products of `inner`, the method of the layer `prefix`; or `inner` itself."""

    def experts(self, prefix: str, spec: ExpertSpec, inner: ExpertMethod) -> ExpertMethod:
        """As `linear`, for the routed experts "PREFIX.0", "PREFIX.1", …; without an answer of its own, `inner`."""
        del prefix, spec
        return inner

    @abstractmethod
    def read(self, folder: Path) -> ReadAdapter:
        """Reads and checks an adapter; raises `ValueError`, one sentence, for one that does not fit the model."""

    @abstractmethod
    def load(self, slot: int, adapter: ReadAdapter) -> None:
        """Copies an adapter to the device. Whatever the slot held is gone."""

    @abstractmethod
    def prepare(self, num_tokens: int) -> None:
        """Called in an `active` step once `slots` are filled; launches the same for every step of so many tokens."""

    def prepare_read(self, slots: Tensor) -> None:
        """Called behind `prepare` with the slots int32 [E] of the tokens that an encoder reads; never captured.

        Without an answer of its own, no model with an encoder and a decoder takes these adapters.
        """


class NoAdapters(Adapters):
    """No layer is wrapped. The null object."""

    def __init__(self) -> None:
        """There is nothing to set up."""

    @property
    def slots(self) -> Tensor:
        raise RuntimeError("there are no adapters")

    def linear(self, prefix: str, spec: LinearSpec, inner: LinearMethod) -> LinearMethod:
        return inner

    def read(self, folder: Path) -> ReadAdapter:
        raise ValueError("adapters are off: start with enable_lora")

    def load(self, slot: int, adapter: ReadAdapter) -> None:
        raise RuntimeError("there are no adapters")

    def prepare(self, num_tokens: int) -> None:
        raise RuntimeError("there are no adapters")


class AdapterResolver(ABC):
    """Finds adapters that requests name and nobody loaded. Built as `Class(setup, options)` in each API process."""

    def __init__(self, setup: AdapterResolverSetup, options: Any = None) -> None:
        self.setup, self.options = setup, options

    @abstractmethod
    def resolve(self, name: str) -> Path | None:
        """Returns the folder of the adapter `name`, or None where it knows none; called in a thread.

        Requests that name one adapter at the same time share a call, and None is remembered for some seconds.
        """
