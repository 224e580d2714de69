"""Chooses the engine of a request among data ranks: the one that has the least to compute with it.

That is the work that each has already, and the part of the prompt that is not in its prefix cache. All API processes of
a server share what they know: each writes the work that it gave to each engine, and any of them which engine last got a
prompt that begins like this one. Knows no engine: what it believes about prefix caches is a guess that costs no more
than a prompt.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Collection, Iterator

import numpy as np

from frame.core.interfaces.engine import EngineRequest
from frame.core.server.keys import MAX_PROCESSES

#: Tokens of the shortest beginning of a prompt that is remembered, and most beginnings of one prompt.
CHUNK = 256
MOST_CHUNKS = 128
#: Beginnings that are remembered; a new one takes the place of an older one.
NUM_PREFIXES = 1 << 16
#: What computing a token of a prompt costs, where 1 is to keep one in the KV cache while its request runs. By
#: arithmetic, not measured: an 8B model computes a token in some 30 µs of an H200, and reads the keys and values of one
#: in 27 ns a step, 7 µs in 256 steps.
PREFILL_COST = 4
#: Outputs are taken to be so long until requests have ended, and how much each of those counts.
_FIRST_LENGTH, _WEIGHT = 256, 0.02
#: An entry is 52 bits of a beginning's hash, and the rank + 1.
_RANK_BITS = 12


class RankChoice:
    """What one API process, number `process`, knows of `num_ranks` engines. `descriptor`: the memory that all share."""

    def __init__(self, num_ranks: int, descriptor: int | None = None, process: int = 0, *, cached: bool = True) -> None:
        descriptor = os.memfd_create("frame-ranks") if descriptor is None else descriptor
        num_loads = MAX_PROCESSES * num_ranks
        os.ftruncate(descriptor, 8 * (num_loads + NUM_PREFIXES))
        memory = mmap.mmap(descriptor, 8 * (num_loads + NUM_PREFIXES))
        self._loads = np.frombuffer(memory, np.float64, num_loads).reshape(MAX_PROCESSES, num_ranks)
        self._prefixes = np.frombuffer(memory, np.uint64, NUM_PREFIXES, 8 * num_loads)
        self._own = self._loads[process]
        self._own[:] = 0  # of the process in whose place this one is
        self._cached = cached
        self._length = float(_FIRST_LENGTH)
        self._last = process

    def cost(self, request: EngineRequest) -> float:
        """What an engine has to do for a request, in tokens that it keeps: prompts, and an output of usual length."""
        read = 0 if request.encoder_ids is None else len(request.encoder_ids)
        return read + len(request.prompt_ids) + min(request.max_tokens, self._length)

    def choose(self, request: EngineRequest, ranks: Collection[int]) -> int:
        """One of `ranks`, of which there is at least one; its engine will have the prompt in its prefix cache."""
        keys = list(_beginnings(request)) if self._cached else []
        held, length = self._held(keys), len(request.prompt_ids)
        loads = self._loads.sum(0)
        count = len(loads)

        def work(rank: int) -> tuple[float, int]:
            saved = min(held.get(rank, 0), length)
            return float(loads[rank]) - PREFILL_COST * saved, (rank - self._last - 1) % count

        rank = self._last = min(ranks, key=work)
        for _, key in keys:
            self._prefixes[key % NUM_PREFIXES] = key >> _RANK_BITS << _RANK_BITS | (rank + 1)
        return rank

    def begin(self, rank: int, cost: float) -> None:
        """The engine of this rank gets work."""
        self._own[rank] += cost

    def end(self, rank: int, cost: float, num_tokens: int | None = None) -> None:
        """It has less work again; `num_tokens` is the length of an output that ended by itself."""
        self._own[rank] = max(0.0, self._own[rank] - cost)
        if num_tokens is not None:
            self._length += _WEIGHT * (num_tokens - self._length)

    def forget(self) -> None:
        """Other engines take the place of these, and have no prompt in their caches."""
        self._prefixes[:] = 0

    def _held(self, keys: list[tuple[int, int]]) -> dict[int, int]:
        """Rank → tokens of the longest of these beginnings that its engine got last."""
        held: dict[int, int] = {}
        for length, key in keys:
            entry = int(self._prefixes[key % NUM_PREFIXES])
            if entry and entry >> _RANK_BITS == key >> _RANK_BITS:
                held[entry % (1 << _RANK_BITS) - 1] = length
        return held


def _beginnings(request: EngineRequest) -> Iterator[tuple[int, int]]:
    """(length, hash) of beginnings of the prompt, in equal distances, which are multiples of a shorter prompt's."""
    ids = request.prompt_ids
    step = CHUNK
    while step * MOST_CHUNKS < len(ids):
        step *= 2
    root = repr((request.salt, request.adapter, request.media_keys)).encode()
    digest = hashlib.blake2b(root, digest_size=8)
    if request.embeds is not None:
        digest.update(np.ascontiguousarray(request.embeds.rows).data)
    if request.encoder_ids is not None:
        digest.update(request.encoder_ids.astype(np.int32, copy=False).tobytes())
    for end in range(step, len(ids) + 1, step):
        digest.update(ids[end - step : end].astype(np.int32, copy=False).tobytes())
        yield end, int.from_bytes(digest.copy().digest(), "little")
