"""One request as the scheduler knows it: its ids, how far they are computed, its blocks. Knows no queue and no pool."""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ..interfaces.engine import EngineRequest
from ..interfaces.step import NewRequest
from .cache.request_parts import CachedBlocks, TransferState
from .schedule.turns import Share
from .told import Told

if TYPE_CHECKING:
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


class Request:
    """The state of one request. Only the scheduler's parts change it.

    `token_ids` (int32) holds the prompt and every output token that reached the host; tokens that were sampled but not
    answered yet are counted by the batch alone. `max_len` is the most tokens of prompt and output together. `cache` is
    changed by the KV cache alone, `transfer` and `told` by their own methods.
    """

    def __init__(self, source: EngineRequest, *, sequence: int, max_len: int, num_groups: int, root: bytes) -> None:
        self.source = source
        self.request_id = source.request_id
        self.params = source.params
        self.pools = source.pooling is not None  # it ends with its prefill, without a token
        self.priority = source.priority
        self.arrival = source.arrival
        self.share = Share(source.owner, 0.0)  # until it has its owner's
        self.turn = 0.0
        self.sequence = sequence  # order of arrival at this engine; breaks ties
        self.prompt_len = len(source.prompt_ids)
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
        self.told = Told(source.num_prompt_logprobs)

    @property
    def owner(self) -> str:
        """Whose it is: "" where nobody tells owners apart."""
        return self.source.owner

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

    def to_new_request(self, slot: int, num_computed: int) -> NewRequest:
        """What the worker needs to take the request into `slot`."""
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
        )
