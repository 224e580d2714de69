"""One request as the scheduler sees it: its ids, how far they are computed, its blocks, what was reported of it."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ..interfaces.engine import EngineOutput, EngineRequest
from ..interfaces.step import NewRequest
from .schedule.turns import Share

if TYPE_CHECKING:
    from .adapters import Adapter
    from .grammar.progress import GrammarProgress
    from .schedule.batch import Batch


class QueueFullError(RuntimeError):
    """As many requests wait as `max_queue` allows; try again later."""


class RequestState(Enum):
    """Where a request is. A preempted one is WAITING again; LOADING waits for a connector's asynchronous load.

    COMPILING waits for its grammar before it is queued for the first time.
    """

    COMPILING = "compiling"
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Reported:
    """What a request's outputs have reported so far, so that each fact is reported once. Changed by its methods only.

    `num_cached`: prompt tokens found in the cache; None until the request was first admitted, at `scheduled` in seconds
    of time.time. `plain`: the first output has gone and no grammar follows the tokens, so that of a later token that
    ends nothing only the id is reported. `num_prompt_logprobs`: prompt positions whose log-probabilities are out.
    """

    num_prompt_logprobs: int
    num_cached: int | None = None
    scheduled: float | None = None
    plain: bool = False
    _begun: bool = False

    def admit(self, num_cached: int) -> None:
        """Called when the request is admitted for the first time, with so many prompt tokens found in the cache."""
        self.num_cached, self.scheduled = num_cached, time.time()

    def lose(self, first: int) -> None:
        """Called when only the prompt tokens before `first` were there after all."""
        if self.num_cached is not None:
            self.num_cached = min(self.num_cached, first)

    def begin(self, output: EngineOutput, *, constrained: bool) -> None:
        """Adds to the first output with a token what is reported once; `constrained`: the output follows a grammar."""
        if not self._begun:
            self._begun, self.plain = True, not constrained
            output.num_cached, output.scheduled = self.num_cached, self.scheduled

    def add_prompt(self, count: int) -> None:
        """Counts prompt positions whose log-probabilities were reported."""
        self.num_prompt_logprobs += count


@dataclass(slots=True)
class CachedBlocks:
    """The blocks of one request; `KVCache` alone changes them.

    `blocks[g]` are the block ids of KV group g in order, 0 where a block fell out of the window; before `first_live[g]`
    all are 0. `hashes` chain from `root`, one for each `block_size` tokens of the layout; the blocks of the first
    `num_published` hashes are in the prefix cache, or could not be put there. The blocks of its first `num_seen` tokens
    were found when it was admitted, whether or not their states were.
    """

    root: bytes
    blocks: list[list[int]]
    first_live: list[int]
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_seen: int = 0

    @classmethod
    def none(cls, num_groups: int, root: bytes) -> CachedBlocks:
        """No block in any group."""
        return cls(root, [[] for _ in range(num_groups)], [0] * num_groups)


@dataclass(slots=True)
class TransferState:
    """What a KV connector does with the blocks of one request; changed by its own methods only.

    `asks`: the connector is asked for its blocks. `loading`: it writes to them. `held`: it reads them after the
    request's end, so they are kept. `unconfirmed`: a launched step, which was not answered yet, fills some of them.
    `num_loaded`: computed tokens whose blocks the request holds while it has no slot; the batch counts those of a
    request with one. `num_good`: tokens before the first block that failed to load; None where none did.
    """

    asks: bool
    loading: bool = False
    held: bool = False
    unconfirmed: bool = False
    num_loaded: int = 0
    num_good: int | None = None

    def give_up(self) -> None:
        """Has the request computed without the connector."""
        self.asks = False

    def load(self, loading: bool) -> None:
        """Notes whether the connector writes to the request's blocks."""
        self.loading = loading

    def hold(self, held: bool) -> None:
        """Notes whether the connector reads the request's blocks, which are then kept after its end."""
        self.held = held

    def hold_loaded(self, num_tokens: int) -> None:
        """Notes the computed tokens of a request without a slot; 0 once it has one, whose batch counts them."""
        self.num_loaded = num_tokens

    def await_step(self, fills: bool) -> None:
        """Notes whether a launched step, which has no result yet, fills some of the request's blocks."""
        self.unconfirmed = fills

    def forget(self) -> None:
        """Called when the request has given up its blocks."""
        self.num_loaded, self.unconfirmed = 0, False

    def lose(self, first: int) -> None:
        """Notes that the block which begins with token `first` failed to load."""
        self.num_good = first if self.num_good is None else min(first, self.num_good)

    def take_losses(self) -> int | None:
        """Returns, once, the number of tokens before the first block that failed to load; None where none did."""
        found, self.num_good = self.num_good, None
        return found


class Request:
    """The state of one request. Only the scheduler's parts change it.

    `token_ids` (int32) holds the prompt and every output token that reached the host; tokens that were sampled but not
    answered yet are counted by the batch alone. `max_len` is the most tokens of prompt and output together.
    """

    def __init__(
        self,
        source: EngineRequest,
        *,
        sequence: int,
        max_len: int,
        num_groups: int,
        root: bytes,
        adapter: Adapter | None = None,
    ) -> None:
        self.source, self.adapter = source, adapter
        self.request_id = source.request_id
        self.params = source.params
        self.pools = source.pooling is not None  # it ends with its prefill, without a token
        self.priority = source.priority
        self.arrival = source.arrival
        self.owner = source.owner  # the key or client that it counts for; "" where owners are not told apart
        self.share = Share(source.owner, 0.0)  # until it has its owner's
        self.turn = 0.0
        self.sequence = sequence  # order of arrival at this engine; breaks ties
        self.prompt_len = len(source.prompt_ids)
        self.num_encoded = 0 if source.encoder_ids is None else len(source.encoder_ids)  # tokens of its encoder
        self.max_len = max_len
        self.token_ids = array("i", np.asarray(source.prompt_ids, np.int32).tobytes())
        self.token_ids.extend(source.output_ids)
        self.eos_ids = frozenset(() if source.params.ignore_eos else source.eos_token_ids)
        stop_ids = source.params.stop_token_ids
        self.stop_ids = self.eos_ids.union(stop_ids) if stop_ids else self.eos_ids
        self.min_len = self.prompt_len + source.params.min_tokens

        self.grammar: GrammarProgress | None = None  # set before it is queued, and never again
        self.state = RequestState.WAITING
        self.queue_key: tuple[Any, ...] = ()
        self.batch: Batch | None = None
        self.slot = -1
        self.num_unanswered = 0  # launched rows that must be answered before it may resume
        self.num_preemptions = 0

        self.cache = CachedBlocks.none(num_groups, root)
        self.transfer = TransferState(asks=self.reads_cache)
        self.reported = Reported(source.num_prompt_logprobs)

    @property
    def owner_running(self) -> int:
        """Requests of its owner that hold a slot."""
        return self.share.num_running

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output that reached the host."""
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are, or will be after the launched steps, in its blocks."""
        return self.transfer.num_loaded if self.batch is None else int(self.batch.num_computed[self.slot])

    @property
    def reads_cache(self) -> bool:
        """Whether prefix-cache hits may be used: prompt log-probabilities need every prompt position computed.

        So do some poolers.
        """
        pooling = self.source.pooling
        return self.params.prompt_logprobs is None and (pooling is None or pooling.reads_cache)

    def to_new_request(self, slot: int, num_computed: int, adapter: int = 0) -> NewRequest:
        """What the worker needs to take the request into `slot`, with the adapter in the slot `adapter` of adapters."""
        source = self.source
        return NewRequest(
            slot=slot,
            request_id=self.request_id,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            prompt_len=self.prompt_len,
            num_computed=num_computed,
            block_ids=[np.array(blocks, dtype=np.int32) for blocks in self.cache.blocks],
            params=self.params,
            seed=source.seed,
            eos_token_ids=source.eos_token_ids,
            pooling=source.pooling,
            adapter=adapter,
            encoder_ids=source.encoder_ids,
        )
