"""A KV connector: moves blocks between this engine and elsewhere (disk, host memory, another engine).

Two halves in two processes that talk through the step: the scheduler side decides, the worker side moves bytes. A
provider names the first as its target and the second as its tag "worker".
Messages are bytes, encoded as the connector likes (`frame.interfaces.encode`), never executable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, dtype

from .attention import BlockFormat
from .kv import KVLayout
from .model import LayerHooks
from .step import StepPlan, TransferReport

if TYPE_CHECKING:
    from .setup import ConnectorSetup, ConnectorWorkerSetup


@dataclass(frozen=True)
class RequestView:
    """What a connector may know of a request, as it was when the call was made.

    `token_ids` are prompt and output. `block_hashes` are hashes of the prompt, one for each full `grain` of the
    layout, each over its tokens and the hash before; they are equal in every process, and however the model is divided
    over ranks (see `KVLayout.model`). `params` are the request's `kv_transfer` parameters. `content` stands for all
    that the blocks depend on besides the tokens: model, salt, adapter, media, embeddings; unlike hashes it is equal
    whatever the block size. `finish_reason` is why it ended, in the call of `finished`.
    """

    request_id: str
    token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    prompt_len: int
    cache_salt: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    content: bytes = b""
    finish_reason: str = ""


class StateRun(NamedTuple):
    """Rows of a tensor in a block of states, which lie side by side and of which each has `row_bytes`.

    They are those from `first` to before `last` of `total` rows of all ranks, some of which may have the same ones: of
    heads or channels, say.
    """

    dtype: dtype
    row_bytes: int
    first: int
    last: int
    total: int


@dataclass(frozen=True)
class CacheView:
    """The KV cache of one layer: `bytes` uint8 [num_blocks, block_bytes]; each row is a block in one piece of memory.

    A connector that moves blocks to an equal engine needs only `bytes`. `format` says what lies in a block; `group` is
    the number of the layer's KV group in the layout, whose block ids are the rows of `bytes`. `heads` are those of the
    layer's `total_heads` KV heads that lie in a block here, from the first to before the second, on the format's axis
    `head_axis`; ranks may hold the same ones. None: every rank holds all that the layer keeps, as of latents, where
    `total_heads` is 0; else, as of states, a part that only the same rank of as many has. A block of states is raw
    bytes: the tensors of `parts`, each an element type and its bytes, one behind the other; () where they are not told.
    `runs` are the same bytes by what ranks divide; every rank has as many runs of a layer, in the same order.
    """

    bytes: Tensor
    format: BlockFormat
    group: int
    heads: tuple[int, int] | None = None
    total_heads: int = 0
    parts: tuple[tuple[dtype, int], ...] = ()
    runs: tuple[StateRun, ...] = ()


class ConnectorScheduler(ABC):
    """The half in the engine, called from the engine's loop. Built as `Class(setup, options)`. Defaults do nothing.

    Unless it `reads_hashes`, views have no `block_hashes`, and requests do not wait until a long prompt is hashed.
    """

    reads_hashes: bool = True

    def __init__(self, setup: ConnectorSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.layout: KVLayout = setup.layout

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        """Called once, before the first request, with what `ConnectorWorker.handshake` of each rank returned.

        Raises `ValueError` when the workers do not fit this half; that ends the start.
        """

    @abstractmethod
    def matched_tokens(self, request: RequestView, num_computed: int) -> tuple[int | None, bool]:
        """Returns (n, later): n tokens after `num_computed` can be loaded; `later`: the load goes on after the step.

        Called when a waiting request is about to be admitted, maybe several times, so it must have no side effects. n
        is a multiple of the layout's `grain`, or all tokens but the last one, which is always computed, where no group
        keeps states; None means that the scheduler shall ask again in a later step. `later` is False when n is 0.
        """

    def allocated(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """Called when a request was given `block_ids` [group][i] for its computed tokens, each time it is admitted.

        The connector must load the last `num_external` of these tokens; 0 where all that is needed of them is here, or
        nothing is elsewhere. Not called where `matched_tokens` was not asked. The blocks of a group hold as many tokens
        as its block size says; block id 0 stands where a window needs no block. The blocks for tokens that the step
        computes are in the plan's `added` and `appends`.
        """

    def build_message(self, plan: StepPlan) -> bytes:
        """Returns the message of this step for the worker side, and forgets what it held. Must not change `plan`."""
        del plan
        return b""

    def finished(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Called once a request, before its blocks are freed; returns (hold, parameters for its last output).

        Of states, `block_ids` name the copy behind the prompt's last grain that ends before its last token; 0: none is
        kept. With `hold` the blocks stay until each rank's worker side reported the request's id as sent, or `update`
        returns it. Until then no other request may have that id.
        """
        del request, block_ids
        return False, None

    def update(self, report: TransferReport) -> Iterable[str] | None:
        """Called after each step with the reports of all ranks, merged; may return ids of ended requests.

        Their blocks are given back at once, whichever ranks have reported them as sent: no rank may read them any more.
        Counters and gauges are read from the report afterwards, so this half may put its own into it.
        """

    def reset(self) -> bool:
        """Drops what it keeps, because the weights changed; returns whether it could."""
        return True

    def close(self) -> None:
        """Called once, when the engine ends."""


class ConnectorWorker(ABC):
    """The half beside the KV memory, called from its worker's thread. Built as `Class(setup, options)`.

    In each step the worker calls `begin_step(message)` before the forward pass, `hooks.before/after(layer, batch)`
    around the layers, and `end_step(finished)` after it; the first and last also in steps without tokens. `hooks` must
    be set when `register` returns, and stay: the worker reads then whether they let decode steps be captured.
    `rank` counts the workers of this engine, as the handshakes and notes that its scheduler side gets are numbered.
    Models whose layers keep states are served only if it `moves_states`: copies of them, see `StepPlan.copies`, which
    `begin_step` finds made. It loads a state into the one block that a request has in the group.
    """

    moves_states: bool = False

    def __init__(self, setup: ConnectorWorkerSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.layout: KVLayout = setup.layout
        self.rank: int = setup.placement.rank % setup.mesh.engine_size
        self.hooks = LayerHooks()

    @abstractmethod
    def register(self, caches: Mapping[str, CacheView]) -> None:
        """Called before the first step with the cache of each layer that keeps something, by layer name.

        Called with {} between steps when that memory is about to go, as for sleep: all access to it must have ended
        when it returns. Called with caches again when memory is back, perhaps elsewhere and without content.
        """

    def end_access(self) -> None:
        """Called between steps on all workers before `register({})` is called on any: ends what accesses the memory.

        Raises `RuntimeError` with what goes on where that cannot be ended. Then all workers keep their memory, and go
        on to report how transfers end. The default is for connectors whose `register({})` waits and does not refuse.
        """

    @abstractmethod
    def begin_step(self, message: bytes) -> None:
        """Starts the loads that the scheduler side's `message` asks for.

        A step that fails gets no `end_step`; what it would have saved must not be published.
        """

    @abstractmethod
    def end_step(self, finished: Sequence[str]) -> TransferReport:
        """Waits until blocks to be saved may be overwritten, and reports; `finished` are the requests that ended."""

    def pending_loads(self) -> Iterable[str] | None:
        """The requests whose loads it began, and has not reported as received; None: it cannot tell.

        Called behind `end_step` when an earlier step failed, which may have begun its loads or not. The blocks of those
        that are not named are given to others, so nothing may write to them any more. With None they stay out of use
        until the loads are reported, or for ten minutes.
        """
        return None

    def handshake(self) -> bytes:
        """Returns what `ConnectorScheduler.connect` needs of this worker; called once, after `register`."""
        return b""

    def close(self) -> None:
        """Called once, when the worker ends; waits for the transfers that are under way."""


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
