"""A KV connector: moves blocks between this engine and elsewhere (disk, host memory, another engine).

Two halves in two processes that talk through the step: the scheduler side decides, the worker side moves bytes. A
provider names the first as its target and the second as its tag "worker".
Messages are bytes, encoded as the connector likes (`frame.interfaces.encode`), never executable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .attention import BlockFormat
from .kv import KVLayout
from .model import LayerHooks
from .step import StepPlan, TransferReport

if TYPE_CHECKING:
    from .setup import ConnectorSetup, ConnectorWorkerSetup


@dataclass(frozen=True)
class RequestView:
    """What a connector may know of a request; a snapshot.

    `token_ids` are prompt and output; `block_hashes` the chained hashes of its prompt, one for each full `grain` of the
    layout (canonical, the same in every process and for every division of the model over ranks, see `KVLayout.model`);
    `params` is the free `kv_transfer` dictionary of the request.
    """

    request_id: str
    token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    prompt_len: int
    cache_salt: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheView:
    """The cache of one layer: `bytes` uint8 [num_blocks, block_bytes], a block being one piece of memory.

    Who moves blocks to an equal engine needs no more. `format` says what lies in a block, `group` is the number of the
    layer's KV group in the layout, whose block ids are rows of `bytes`.
    """

    bytes: Tensor
    format: BlockFormat
    group: int


class ConnectorScheduler(ABC):
    """The half in the engine. Built as `Class(setup, options)`. All defaults do nothing."""

    def __init__(self, setup: ConnectorSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.layout: KVLayout = setup.layout

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        """Called once, before the first request: what `ConnectorWorker.handshake` of each rank gave.

        Raises `ValueError` when the workers do not fit this half; that ends the start.
        """

    @abstractmethod
    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        """(n, later): n tokens past `num_computed` that can be loaded, and whether the load outlasts the step.

        n is a multiple of the layout's `grain`; None asks to be asked again in a later step; `later` is False when n is
        0.
        No side effects: may be called repeatedly. At least one prompt token is always left to compute.
        """

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """Blocks [group][i] now hold the request's computed tokens, the last `num_external` of which are to be loaded.

        Those of a group hold as many tokens as its block size says; block 0 stands where a window needs none. Blocks
        for the tokens that the step computes are not among them: the plan's `added` and `appends` name those.
        """

    def build_message(self, plan: StepPlan) -> bytes:
        """The message for the worker side for this step; must not change `plan`; resets per-step state."""
        del plan
        return b""

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Called once, before blocks are freed: (hold, parameters for the response).

        With `hold` the blocks stay until the worker side reports the id as sent.
        """
        del request, block_ids
        return False, None

    def update(self, report: TransferReport) -> None:
        """What the worker sides reported, merged over ranks."""

    def reset(self) -> bool:
        """Drops cached content (weights changed); returns whether it could."""
        return True

    def close(self) -> None:
        """The engine ends."""


class ConnectorWorker(ABC):
    """The half beside the KV memory. Built as `Class(setup, options)`; `rank` is the worker's.

    Per step: `begin_step(message)` before the forward pass, `hooks.before/after(layer, batch)` around the layers,
    `end_step(finished)` after it. `begin_step` and `end_step` are also called for steps without tokens. `hooks` are
    there when `register` returns, and stay: by what they say then steps are recorded or not.
    """

    def __init__(self, setup: ConnectorWorkerSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.layout: KVLayout = setup.layout
        self.rank: int = setup.placement.rank
        self.hooks = LayerHooks()

    @abstractmethod
    def register(self, caches: Mapping[str, CacheView]) -> None:
        """Layer name → its cache, of each layer that keeps something. Called once, before the first step."""

    @abstractmethod
    def begin_step(self, message: bytes) -> None:
        """Starts loads and whatever else the scheduler side asked for.

        A step that failed has no `end_step`; what it would have saved must not be published.
        """

    @abstractmethod
    def end_step(self, finished: Sequence[str]) -> TransferReport:
        """Waits for saves that must not be overwritten; reports. `finished` are request ids that ended this step."""

    def handshake(self) -> bytes:
        """What the scheduler side must know of this worker, once `register` was called (see `connect`)."""
        return b""

    def close(self) -> None:
        """Drains what is under way."""


class NullConnectorScheduler(ConnectorScheduler):
    """No connector: nothing is ever found elsewhere."""

    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        del request, num_computed
        return 0, False


class NullConnectorWorker(ConnectorWorker):
    """No connector: nothing moves."""

    def register(self, caches: Mapping[str, CacheView]) -> None:
        del caches

    def begin_step(self, message: bytes) -> None:
        del message

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        del finished
        return TransferReport()
