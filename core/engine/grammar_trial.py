"""Trying grammars in a process of their own: one that hangs, crashes or eats memory there costs one request an error.

Parent side, child side, and what they tell each other. Knows no request.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from ..channel import Channel
from ..config.tree import FrameConfig
from ..interfaces.grammar import GrammarBackend
from ..interfaces.sampling import StructuredOutputsParams
from ..registry import Choice

#: Seconds that the process gets to start: it reads the vocabulary.
START_SECONDS = 120.0
#: Half of the least that a thread of the engine may have: a grammar that recurses too deeply must fail here, not there.
_STACK_BYTES = 1 << 20
_NICE = 5


class Try(msgspec.Struct, tag=True):
    """Engine to child: compile this."""

    params: StructuredOutputsParams


class Ready(msgspec.Struct, tag=True):
    """Child to engine: the backend is built."""


class Tried(msgspec.Struct, tag=True):
    """Child to engine: it compiles; `text` is the normal form."""

    text: str


class Refused(msgspec.Struct, tag=True):
    """Child to engine: it does not, or the backend cannot be built."""

    error: str


class GrammarTrial:
    """A child process that tries one grammar at a time. It starts with the first, and again after it was killed."""

    def __init__(self, config: FrameConfig, choices: Sequence[Choice]) -> None:
        self._settings = config.structured_outputs
        self._start_message = {
            "config": config.model_dump(mode="json"),
            "plugins": [list(choice) for choice in choices if choice.kind == "grammar"],
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def check(self, params: StructuredOutputsParams) -> str:
        """The normal form of a constraint that compiles within its bounds; raises `ValueError` for any other."""
        name = f"structured_outputs.{params.constraint}"
        channel = self._start()
        channel.send(Try(params))
        answer = self._receive(self._settings.grammar_compile_seconds)
        if isinstance(answer, Tried):
            return answer.text
        if isinstance(answer, Refused):
            raise ValueError(f"{name}: {answer.error}")
        self._kill()
        if answer is None:
            raise ValueError(
                f"{name} nests too deeply, or takes more than {self._settings.grammar_compile_bytes} bytes of memory "
                "to compile (grammar_compile_bytes)"
            )
        raise ValueError(
            f"{name} takes more than {self._settings.grammar_compile_seconds:g} seconds to compile "
            "(grammar_compile_seconds)"
        )

    def close(self) -> None:
        """Ends the process; from any thread, also while another one waits for an answer."""
        self._closed = True
        self._kill()

    def _start(self) -> Channel:
        if self._channel is not None:
            return self._channel
        if self._closed:
            raise RuntimeError("the engine is closed")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "frame", "grammar", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        if process.stdin is not None:
            with process.stdin as stdin:
                stdin.write(json.dumps(self._start_message).encode())
        channel = self._channel = Channel(self._socket, Ready | Tried | Refused)
        answer = self._receive(START_SECONDS)
        if isinstance(answer, Ready):
            return channel
        self._kill()
        if isinstance(answer, Refused):
            raise ValueError(answer.error)
        raise RuntimeError("the process that tries grammars did not start; the log has the cause")

    def _receive(self, seconds: float) -> Ready | Tried | Refused | bool | None:
        """The child's answer; None when it died, False when there is none in time."""
        channel, connection = self._channel, self._socket
        if channel is None or connection is None:
            return None
        try:
            if not select.select([connection], [], [], seconds)[0]:
                return False
            answer: Ready | Tried | Refused | None = channel.receive()
            return answer
        except (OSError, ValueError):
            return None

    def _kill(self) -> None:
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if process is not None:
            process.kill()
            process.wait()
        if channel is not None:
            channel.close()


def serve_trials(descriptor: int, build: Callable[[FrameConfig, list[Any]], GrammarBackend]) -> int:
    """The child process: reads its configuration from standard input, then tries grammars until its socket closes."""
    start = json.load(sys.stdin)
    channel = Channel(socket.socket(fileno=descriptor), Try)
    config = FrameConfig.model_validate(start["config"])
    try:
        backend = build(config, start["plugins"])
    except ValueError as error:
        channel.send(Refused(_one_line(error)))
        return 1
    _limit(config.structured_outputs.grammar_compile_bytes)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(channel, backend))
    thread.start()
    thread.join()
    return 0


def _serve(channel: Channel, backend: GrammarBackend) -> None:
    channel.send(Ready())
    while (message := channel.receive()) is not None:
        channel.send(_try(backend, message.params))


def _try(backend: GrammarBackend, params: StructuredOutputsParams) -> Tried | Refused:
    """Compiles, and fills the first mask, which shows a grammar that allows nothing at all."""
    try:
        text = backend.normalize(params)
        matcher = backend.compile(text).matcher()
        backend.fill_masks([matcher], np.zeros((1, -(-backend.vocabulary.size // 32)), np.int32))
    except (ValueError, RecursionError) as error:
        return Refused(_one_line(error))
    except MemoryError:
        return Refused("it takes more memory to compile than grammar_compile_bytes")
    if matcher.error is not None:
        return Refused(f"no output can satisfy it, or the first token is too hard to find: {matcher.error}")
    return Tried(text)


def _limit(num_bytes: int) -> None:
    """Bounds the memory that is allocated from now on; a crash writes no core file and no message."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        data = int(statm.read().split()[5]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (data + num_bytes, data + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
