"""A child process that answers one question at a time within bounds on time and memory.

When it hangs, crashes or exceeds its memory, only the question at hand fails; the next one starts the process again.
Does not know what the questions mean.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from .channel import Channel
from .python_command import python_command

#: Seconds that the process gets to start.
START_SECONDS = 120.0
_NICE = 5


class Ready(msgspec.Struct, tag=True):
    """Child to parent: it is ready for questions."""


class Refused(msgspec.Struct, tag=True):
    """Child to parent: why there is no answer to this question, or to any."""

    error: str
    param: str | None = None


class OutOfBoundsError(Exception):
    """There was no answer. `late`: it took too long; else the process died, as it does without memory."""

    def __init__(self, late: bool) -> None:
        super().__init__("late" if late else "died")
        self.late = late


class BoundedProcess:
    """`frame COMMAND FD`, started with the first question, and again after it was killed.

    `start` is what it reads from standard input, as JSON; `kind` is the union of its answers. The thread that asks
    first must live as long as the process.
    """

    def __init__(self, command: str, start: dict[str, Any], kind: Any) -> None:
        self._command = command
        self._start_message = start
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._closed = False

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer, or a `Refused`; raises `OutOfBoundsError`, and `RuntimeError` when it does not start."""
        channel = self._started()
        try:
            channel.send(question)
        except OSError:  # it died while it was idle
            self._kill()
            channel = self._started()
            channel.send(question)
        return self._receive(channel, seconds)

    def close(self) -> None:
        """Ends the process; from any thread, also while another one waits for an answer."""
        self._closed = True
        self._kill()

    def _started(self) -> Channel:
        if self._channel is not None:
            return self._channel
        if self._closed:
            raise RuntimeError("the process is closed")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = self._process = subprocess.Popen(
                python_command("frame", self._command, str(theirs.fileno())),
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        if process.stdin is not None:
            with suppress(OSError), process.stdin as stdin:  # a child that died already answers nothing below
                stdin.write(json.dumps(self._start_message).encode())
        channel = self._channel = Channel(ours, self._kind)
        try:
            answer = self._receive(channel, START_SECONDS)
        except OutOfBoundsError:
            raise RuntimeError(f"the process 'frame {self._command}' did not start; the log has the cause") from None
        if isinstance(answer, Refused):
            self._kill()
            raise ValueError(answer.error)
        return channel

    def _receive(self, channel: Channel, seconds: float) -> Any:
        try:
            late = not channel.readable(seconds)
            answer = None if late else channel.receive()
        except (OSError, ValueError):
            late, answer = False, None
        if answer is None:
            self._kill()
            raise OutOfBoundsError(late)
        return answer

    def _kill(self) -> None:
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if process is not None:
            process.kill()
            process.wait()
        if channel is not None:
            channel.close()


def serve_questions(
    descriptor: int,
    kind: Any,
    build: Callable[[dict[str, Any]], tuple[Callable[[Any], Any], int]],
    stack_bytes: int,
) -> int:
    """The child: reads its start message, then answers questions of `kind` until its socket closes.

    `build` returns the function that answers and the bytes that it may allocate; its `ValueError` is sent to the
    parent.
    """
    channel = Channel(socket.socket(fileno=descriptor), kind)
    try:
        answer, num_bytes = build(json.load(sys.stdin))
    except ValueError as error:
        channel.send(Refused(one_line(error)))
        return 1
    _limit(num_bytes)
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=_serve, args=(channel, answer))
    thread.start()
    thread.join()
    return 0


def _serve(channel: Channel, answer: Callable[[Any], Any]) -> None:
    channel.send(Ready())
    while (question := channel.receive()) is not None:
        channel.send(answer(question))


def _limit(num_bytes: int) -> None:
    """Limits the memory that may be allocated from here on; a crash writes no core file and no message."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        data = int(statm.read().split()[5]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (data + num_bytes, data + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)


def one_line(error: BaseException) -> str:
    """The message of an exception as one line of bounded length."""
    return " ".join(str(error).split())[:500].encode(errors="replace").decode() or type(error).__name__
