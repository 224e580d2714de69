"""Requests go to the server that has the longest beginning of their prompt cached, as servers' KV events tell."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from frame.interfaces import Ask, KVChange, RouteRequest, RouteServer, Setup

from .cached_blocks import CachedBlocks, KnownTokens, Prompt
from .prefix_options import PrefixOptions
from .prompt_text import piece_keys, prompt_bytes, prompt_content
from .text_prefix import TextPrefixPolicy
from .tokenized_texts import TokenizedTexts
from .tokenizing import given_tokens, read_tokens, tokenize_body

#: Seconds for which a server that has not said the tokens of a prompt is not asked again.
_SHY_SECONDS = 10.0
#: Tokens of prompts that are remembered, of four bytes each.
_MOST_TOKENS = 4 << 20


class PrefixPolicy(TextPrefixPolicy):
    """Asks a server for the tokens of a prompt where it pays, and the index of blocks who has them.

    A prompt that for the most part is one that a server has tokenised is not sent to be tokenised again.
    Where tokens are not known, or no server tells what it has, what was sent before decides, as for `text-prefix`.
    """

    prepares = True

    def __init__(self, setup: Setup, options: Any = None) -> None:
        super().__init__(setup, options or PrefixOptions())
        self._blocks = CachedBlocks(self.options.max_blocks)
        self._tokenized = TokenizedTexts(_MOST_TOKENS)
        self._turn = 0
        self._known = WeakKeyDictionary[RouteRequest, KnownTokens]()
        self._shy: dict[str, float] = {}

    async def prepare(self, request: RouteRequest, servers: Sequence[RouteServer], ask: Ask) -> None:
        """Tokens that the client sent are taken as they are; texts are tokenised if any server tells what it has."""
        content = prompt_content(request)
        if request.tokens is not None or content is None:
            return
        request.tokens = given_tokens(content)
        if request.tokens is not None or len(request.body) < self.options.min_body_bytes or not len(self._blocks):
            return
        if len(servers) < 2:
            return
        data = prompt_bytes(content)
        keys = piece_keys(data)
        if (recalled := self._tokenized.recall(keys, len(data))) is not None:
            request.tokens, self._known[request] = recalled
        else:
            request.tokens = await self._asked(request.path, content, servers, ask)
            if request.tokens is not None:
                self._tokenized.remember(keys, len(data), request.tokens)

    async def _asked(
        self, path: str, content: dict[str, Any], servers: Sequence[RouteServer], ask: Ask
    ) -> Sequence[int] | None:
        """What one of the servers says, which take turns."""
        now = asyncio.get_running_loop().time()
        able = [server for server in servers if self._shy.get(server.url, now) <= now]
        if not able or (body := tokenize_body(path, content)) is None:
            return None
        self._turn += 1
        server = able[self._turn % len(able)]
        try:
            async with asyncio.timeout(self.options.tokenize_seconds):
                answer = await ask(server, "/tokenize", body)
        except TimeoutError:
            answer = None
        tokens = read_tokens(answer)
        if tokens is None:
            self._shy = {url: until for url, until in self._shy.items() if until > now}
            self._shy[server.url] = now + _SHY_SECONDS
        return tokens

    def weigh(self, request: RouteRequest, servers: Sequence[RouteServer]) -> tuple[RouteServer, float]:
        urls = [server.url for server in servers]
        if request.tokens is None or not self._blocks.tell(urls):
            return self.by_text(request, servers)
        content = request.content or {}
        tokens = request.tokens
        if not isinstance(tokens, array) or tokens.typecode != "I":
            tokens = array("I", tokens)
        prompt = Prompt(tokens, content.get("cache_salt"), content.get("model"), self._known.get(request))
        cached = self._blocks.cached(prompt, urls)
        chosen = self._weighing.choose(servers, lambda server: cached.get(server.url, 0))
        found = cached.get(chosen.url, 0)
        self._count(len(request.tokens), found)
        return chosen, len(request.tokens) - found

    def kv_changed(self, server: str, rank: int, change: KVChange) -> None:
        self._blocks.change(server, rank, change)

    def figures(self) -> Mapping[str, float]:
        """As for `text-prefix`, and the blocks of servers that are known."""
        return {**super().figures(), "cached_blocks": float(len(self._blocks))}
