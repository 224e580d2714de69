"""Renders chat templates of clients in child processes with bounds on time and memory.

A template is a program: the sandbox keeps it from reading data, but not from running for ever. Holds the parent's side,
the child's side and their messages. Knows no model and no request.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np

from ..config.tree import FrameConfig
from ..interfaces.errors import RequestError
from ..interfaces.tokenizer import ChatOptions
from ..plugin_host.registry import Choice, Registry
from ..processes.bounded_process import BoundedProcess, OutOfBoundsError, Ready, Refused, one_line, serve_questions
from .prompts import InvalidRequest, ParsedPrompt
from .template import ChatTemplateError, render_chat

#: Most chats that are rendered at a time, each by a process of its own.
_NUM_PROCESSES = 2
#: Most chats that may wait; more are refused.
_MAX_PENDING = 64
_STACK_BYTES = 8 << 20


class Render(msgspec.Struct, tag=True):
    """Parent to child: the chat as JSON (messages, `ChatOptions`), and the most characters of the prompt."""

    chat: str
    longest: int


class Rendered(msgspec.Struct, tag=True):
    """Child to parent: the prompt. token_ids: [n]."""

    text: str
    token_ids: np.ndarray


class TemplateProcesses:
    """Renders chats in child processes, which start when they are first needed."""

    def __init__(self, config: FrameConfig, choices: Sequence[Choice]) -> None:
        self._seconds = config.server.chat_template_seconds
        self._bytes = config.server.chat_template_bytes
        self._start = {
            "config": config.model_dump(mode="json", exclude={"model": {"logits_processors"}}),
            "plugins": [list(choice) for choice in choices if choice.kind == "tokenizer"],
        }
        self._pool = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="template")
        self._idle: SimpleQueue[BoundedProcess] = SimpleQueue()
        self._processes: list[BoundedProcess] = []
        self._pending = 0

    async def render(self, messages: Sequence[Any], options: ChatOptions, longest: int) -> ParsedPrompt:
        """One conversation as a prompt; raises `InvalidRequest`, and `RequestError` 429 when too many wait."""
        if self._pending >= _MAX_PENDING:
            raise RequestError(429, f"{_MAX_PENDING} chats with templates of their own wait already", retry_after=5)
        question = Render(json.dumps([list(messages), asdict(options)]), longest)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._render, question)
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Ends the processes, busy ones too."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()
        self._pool.shutdown(wait=True)

    def _render(self, question: Render) -> ParsedPrompt:
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = BoundedProcess("template", self._start, Ready | Rendered | Refused)
            self._processes.append(process)
        try:
            answer = process.ask(question, self._seconds)
        except OutOfBoundsError as error:
            raise ChatTemplateError(self._excess(error.late), "chat_template") from None
        finally:
            self._idle.put(process)
        if isinstance(answer, Refused):
            raise ChatTemplateError(answer.error, answer.param)
        return ParsedPrompt(text=answer.text, token_ids=answer.token_ids)

    def _excess(self, late: bool) -> str:
        if late:
            return f"the chat template takes more than {self._seconds:g} seconds to render (--chat-template-seconds)"
        return f"the chat template takes more than {self._bytes} bytes of memory to render (--chat-template-bytes)"


def serve_renderings(descriptor: int) -> int:
    """The child process: loads the tokenizer, then renders chats until its socket closes."""

    def prepare(start: dict[str, Any]) -> tuple[Callable[[Any], Any], int]:
        from ..config.checkpoint import read_checkpoint
        from .tokenizer import TokenizerSource

        config = FrameConfig.model_validate(start["config"])
        tokenizer = TokenizerSource(config, read_checkpoint(config), Registry.load(start["plugins"])).get()
        render_chat(tokenizer, [{"role": "user", "content": "x"}], ChatOptions(chat_template="{{ messages }}"))
        return lambda question: _answer(tokenizer, question), config.server.chat_template_bytes

    return serve_questions(descriptor, Render, prepare, _STACK_BYTES)


def _answer(tokenizer: Any, question: Render) -> Rendered | Refused:
    def check(text: str) -> None:
        if len(text) > question.longest:
            raise InvalidRequest(
                f"the chat template makes {len(text)} characters of these messages; at most {question.longest} are "
                "read",
                "chat_template",
            )

    messages, options = json.loads(question.chat)
    try:
        prompt = render_chat(tokenizer, messages, ChatOptions(**options), check)
    except InvalidRequest as error:
        if isinstance(error.__cause__, MemoryError):
            os._exit(1)  # the process may be in any state
        return Refused(one_line(error), error.param)
    except MemoryError:
        os._exit(1)
    return Rendered(prompt.text or "", np.asarray(prompt.token_ids, np.int64))
