"""Compiling grammars beside the step loop: tried in a child process first, then compiled on a thread, then kept.

Equal constraints are compiled once, and owners of requests take turns. What is kept is bounded in bytes, the least
recently used goes first. Knows no request.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import cast

import msgspec

from ...config.tree import FrameConfig
from ...interfaces.grammar import Grammar, GrammarBackend, Vocabulary
from ...interfaces.sampling import StructuredOutputsParams
from ...plugin_host.offers import PluginError
from ...plugin_host.registry import Registry
from ...plugin_host.setups import grammar_setup
from ..request import QueueFullError
from .fair_threads import FairThreads
from .trial import GrammarTrial

#: Grammars that are compiled at a time, each with a child process.
NUM_COMPILERS = 2
#: Grammars that may wait; beyond them each owner has room for an equal part (`FairThreads.is_full`), more are refused.
MAX_PENDING = 256
#: What a refusal takes in the cache.
_REFUSAL_BYTES = 1024
#: A grammar that has grown to more is compiled anew for the next request.
WORN_BYTES = 16 << 20


@dataclass(eq=False)
class _Entry:
    """A grammar that is kept or on its way, or the refusal of one; `fresh_bytes`: what it took once it was done."""

    future: Future[Grammar]
    fresh_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """What it takes now, 0 while it is on its way."""
        if self.fresh_bytes is None:
            return 0
        return _REFUSAL_BYTES if self.future.exception() is not None else self.future.result().num_bytes

    @property
    def worn(self) -> bool:
        """Whether it has grown so much with use that its outputs might come to its limits."""
        return self.num_bytes > max(WORN_BYTES, 2 * (self.fresh_bytes or 0))


class GrammarCompiler:
    """Called by the engine's thread. `build` makes the backend and `trial` a child, both when first needed.

    Where the engine has no grammars `build` raises `ValueError`, with which every constraint is then refused.
    """

    def __init__(
        self, build: Callable[[], GrammarBackend], trial: Callable[[], GrammarTrial], *, cache_bytes: int
    ) -> None:
        self._build = build
        self._make_trial = trial
        self.cache_bytes = cache_bytes
        self._threads = FairThreads(NUM_COMPILERS, "grammar")
        self._lock = threading.Lock()
        self._build_lock = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._idle: SimpleQueue[GrammarTrial] = SimpleQueue()
        self._trials: list[GrammarTrial] = []

    @property
    def kept_bytes(self) -> dict[bytes, int]:
        """Bytes of each grammar and refusal that is kept, the least recently used first; grammars grow with use."""
        entries = list(self._entries.items())
        return {key: entry.num_bytes for key, entry in entries if entry.fresh_bytes is not None}

    def compile(self, params: StructuredOutputsParams, *, owner: str = "", bounded: bool = True) -> Future[Grammar]:
        """The grammar of a constraint, compiled or on its way; its error is a `ValueError` when the caller is at fault.

        Where `bounded`, raises `QueueFullError` when too many of the request's `owner` wait.
        """
        key = _key(params)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.worn:
                del self._entries[key]
                entry = None
            if entry is not None:
                self._entries.move_to_end(key)
                known = entry.future
                if known.running() or known.done() or self._threads.waits(owner, known):
                    return known
            if bounded and self._threads.is_full(owner, MAX_PENDING):
                raise QueueFullError(f"{MAX_PENDING} grammars wait to be compiled; try again later")
            work = partial(self._compile, params)
            if entry is not None:  # it may stand far back in the line of another owner
                return self._threads.submit(owner, work, entry.future)
            future = self._threads.submit(owner, work)
            self._entries[key] = _Entry(future)
        future.add_done_callback(lambda done: self._keep(key, done))
        return future

    def backend(self) -> GrammarBackend:
        """The backend; raises `ValueError` when there is none for this checkpoint."""
        with self._build_lock:
            if self._backend is None:
                self._backend = self._build()
            return self._backend

    def close(self) -> None:
        """Ends threads and child processes."""
        self._threads.cancel()
        self._close_trials()  # which ends what the threads wait for
        self._threads.close()
        self._close_trials()  # and those that a thread started meanwhile
        if self._backend is not None:
            self._backend.close()

    def _close_trials(self) -> None:
        for trial in list(self._trials):
            trial.close()

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        backend = self.backend()
        trial = self._take_trial()
        try:
            text = trial.check(params)
        finally:
            self._idle.put(trial)
        return backend.compile(text)

    def _take_trial(self) -> GrammarTrial:
        try:
            return self._idle.get_nowait()
        except Empty:
            trial = self._make_trial()
            self._trials.append(trial)
            return trial

    def _keep(self, key: bytes, done: Future[Grammar]) -> None:
        """Counts a grammar or a refusal that is there now, and drops the least recently used until the rest fits."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.future is not done:
                return  # a newer one of the same
            error = None if done.cancelled() else done.exception()
            if done.cancelled() or (error is not None and not isinstance(error, ValueError)):
                del self._entries[key]  # the next request with it compiles it again
                return
            if error is not None:  # the frames of its traceback hold the whole constraint
                error.__traceback__ = error.__context__ = error.__cause__ = None
            entry.fresh_bytes = _REFUSAL_BYTES if error is not None else done.result().num_bytes
            kept = self.kept_bytes
            total = sum(kept.values())
            for old, num_bytes in kept.items():
                if total <= self.cache_bytes:
                    break
                total -= num_bytes
                del self._entries[old]


def _key(params: StructuredOutputsParams) -> bytes:
    own = msgspec.structs.replace(params, start_after=[], disable_fallback=False)
    return hashlib.blake2b(msgspec.json.encode(own), digest_size=32).digest()


def make_compiler(
    config: FrameConfig, registry: Registry, vocabulary: Callable[[], Vocabulary] | None
) -> GrammarCompiler:
    """The compiler of an engine; raises `PluginError` when a backend that was named is missing."""
    settings = config.structured_outputs
    against = ""
    try:
        provider = registry.select(
            "grammar", settings.structured_outputs_backend, lambda backend: cast("str | None", backend.supports())
        )
    except PluginError as error:
        if settings.structured_outputs_backend != "auto":
            raise
        against = str(error)
    choices = registry.choices(config)

    def build() -> GrammarBackend:
        if against or vocabulary is None or config.model.skip_tokenizer_init:
            raise ValueError(f"structured_outputs cannot be served: {against or 'the engine has no tokenizer'}")
        setup = grammar_setup(config, vocabulary())
        return cast("GrammarBackend", registry.make("grammar", provider, setup, config))

    return GrammarCompiler(build, lambda: GrammarTrial(config, choices), cache_bytes=settings.grammar_cache_bytes)
