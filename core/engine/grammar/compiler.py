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


class GrammarCompiler:
    """Called by the engine's thread. `build` makes the backend and `trial` a child, both when first needed."""

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
        self._futures: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._sizes: dict[bytes, int] = {}  # of all that is done
        self._grammars: dict[bytes, Grammar] = {}
        self._fresh_bytes: dict[bytes, int] = {}  # what they took when they were new
        self._idle: SimpleQueue[GrammarTrial] = SimpleQueue()
        self._trials: list[GrammarTrial] = []

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of the grammars and refusals that are kept; grammars grow while they are used."""
        with self._lock:
            return sum(
                size if key not in self._grammars else self._grammars[key].num_bytes
                for key, size in self._sizes.items()
            )

    @property
    def num_kept(self) -> int:
        """Grammars and refusals that are kept."""
        return len(self._sizes)

    def compile(self, params: StructuredOutputsParams, *, owner: str = "", bounded: bool = True) -> Future[Grammar]:
        """The grammar of a constraint, compiled or on its way; its error is a `ValueError` when the caller is at fault.

        Where `bounded`, raises `QueueFullError` when too many of the request's `owner` wait.
        """
        key = _key(params)
        with self._lock:
            known = self._futures.get(key)
            if known is not None and not self._worn(key):
                self._futures.move_to_end(key)
                if known.running() or known.done() or self._threads.waits(owner, known):
                    return known
            else:
                known = None
            if bounded and self._threads.is_full(owner, MAX_PENDING):
                raise QueueFullError(f"{MAX_PENDING} grammars wait to be compiled; try again later")
            if known is not None:  # it may stand far back in the line of another owner
                return self._threads.submit(owner, partial(self._compile, params), known)
            future = self._futures[key] = self._threads.submit(owner, partial(self._compile, params))
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
        with self._lock:
            trials = list(self._trials)
        for trial in trials:
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
            with self._lock:
                self._trials.append(trial)
            return trial

    def _keep(self, key: bytes, done: Future[Grammar]) -> None:
        with self._lock:
            error = None if done.cancelled() else done.exception()
            if done.cancelled() or (error is not None and not isinstance(error, ValueError)):
                self._futures.pop(key, None)  # the next request with it compiles it again
                return
            if self._futures.get(key) is not done:
                return  # a newer one of the same
            self._sizes[key] = _REFUSAL_BYTES
            if error is None:
                self._grammars[key] = done.result()
            else:  # the frames of its traceback hold the whole constraint
                error.__traceback__ = error.__context__ = error.__cause__ = None
            self._trim()

    def _worn(self, key: bytes) -> bool:
        """Drops a kept grammar that has grown so much with use that its outputs might come to its limits."""
        grammar = self._grammars.get(key)
        if grammar is None or grammar.num_bytes <= max(WORN_BYTES, self._fresh_bytes.get(key, 0) * 2):
            return False
        self._drop(key)
        return True

    def _trim(self) -> None:
        """Drops the least recently used until the rest fits; counts all anew, since grammars grow in use."""
        for key, grammar in self._grammars.items():
            self._sizes[key] = grammar.num_bytes
            self._fresh_bytes.setdefault(key, grammar.num_bytes)
        total = sum(self._sizes.values())
        for old in [old for old in self._futures if old in self._sizes]:
            if total <= self.cache_bytes:
                break
            total -= self._sizes[old]
            self._drop(old)

    def _drop(self, key: bytes) -> None:
        del self._futures[key], self._sizes[key]
        self._grammars.pop(key, None)
        self._fresh_bytes.pop(key, None)


def _key(params: StructuredOutputsParams) -> bytes:
    own = msgspec.structs.replace(params, start_after=[], disable_fallback=False)
    return hashlib.blake2b(msgspec.json.encode(own), digest_size=32).digest()


def make_compiler(
    config: FrameConfig, registry: Registry, vocabulary: Callable[[], Vocabulary] | None
) -> tuple[GrammarCompiler | None, str]:
    """The compiler of an engine, or None and why; raises `PluginError` when a backend that was named is missing."""
    settings = config.structured_outputs
    try:
        provider = registry.select(
            "grammar", settings.structured_outputs_backend, lambda backend: cast("str | None", backend.supports())
        )
    except PluginError as error:
        if settings.structured_outputs_backend != "auto":
            raise
        return None, str(error)
    if vocabulary is None or config.model.skip_tokenizer_init:
        return None, "the engine has no tokenizer"
    read: Callable[[], Vocabulary] = vocabulary

    def build() -> GrammarBackend:
        return cast("GrammarBackend", registry.make("grammar", provider, grammar_setup(config, read()), config))

    choices = registry.choices(config)
    compiler = GrammarCompiler(build, lambda: GrammarTrial(config, choices), cache_bytes=settings.grammar_cache_bytes)
    return compiler, ""
