"""Requests go to the server that got the longest beginning of their prompt before, whatever it has kept of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from frame.interfaces import Route, RoutePolicy, RouteRequest, RouteServer, Setup

from .prefix_index import Bits, PrefixIndex
from .prompt_text import PIECE_BYTES, TOKEN_BYTES, piece_keys, prompt_bytes, prompt_content
from .text_prefix_options import TextPrefixOptions
from .weighing import Weighing

#: Servers that are remembered.
_MOST_SERVERS = 256


class TextPrefixPolicy(RoutePolicy):
    """Remembers which pieces of prompts each server got last, as many as its cache may hold."""

    def __init__(self, setup: Setup, options: Any = None) -> None:
        super().__init__(setup, options or TextPrefixOptions())
        self._weighing = Weighing(self.options.load_tokens)
        self._texts = SentTexts(self.options.server_tokens * TOKEN_BYTES // PIECE_BYTES)
        self._prompt_tokens = self._known_tokens = 0.0

    def choose(self, request: RouteRequest, servers: Sequence[RouteServer]) -> RouteServer:
        return self.weigh(request, servers)[0]

    def route(self, request: RouteRequest, servers: Sequence[RouteServer], prefills: Sequence[RouteServer]) -> Route:
        """A prompt of which little is left to compute is computed where it is answered."""
        server, lacking = self.weigh(request, servers)
        if not prefills or lacking < self.options.min_prefill_tokens:
            return Route(server)
        return Route(server, self.choose(request, prefills))

    def weigh(self, request: RouteRequest, servers: Sequence[RouteServer]) -> tuple[RouteServer, float]:
        """A server, and how many tokens of the prompt it lacks, as far as is known."""
        return self.by_text(request, servers)

    def by_text(self, request: RouteRequest, servers: Sequence[RouteServer]) -> tuple[RouteServer, float]:
        """Weighs by what was sent before, and remembers this."""
        data = prompt_bytes(prompt_content(request))
        keys = piece_keys(data)
        known = self._texts.known(keys, [server.url for server in servers])
        tokens = PIECE_BYTES / TOKEN_BYTES
        chosen = self._weighing.choose(servers, lambda server: tokens * known.get(server.url, 0))
        if not keys:
            return chosen, len(data or request.body) / TOKEN_BYTES
        found = tokens * known.get(chosen.url, 0)
        self._texts.sent(keys, chosen.url)
        self._count(len(data) / TOKEN_BYTES, found)
        return chosen, len(data) / TOKEN_BYTES - found

    def _count(self, prompt_tokens: float, known_tokens: float) -> None:
        self._prompt_tokens += prompt_tokens
        self._known_tokens += known_tokens

    def figures(self) -> Mapping[str, float]:
        """Tokens of prompts (four bytes each), those of them that the chosen server was known to have, and pieces."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "known_tokens": self._known_tokens,
            "text_pieces": float(len(self._texts)),
        }


class SentTexts:
    """The keys that each server got, the newest `most` of each."""

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._index = PrefixIndex()
        self._bits = Bits()
        self._servers: OrderedDict[str, tuple[int, OrderedDict[int, None]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._index)

    def known(self, keys: Sequence[int], urls: Iterable[str]) -> dict[str, int]:
        """How many of the keys each of these servers got."""
        there = {found[0]: url for url in urls if (found := self._servers.get(url)) is not None}
        depths = self._index.depths([keys], sum(there))
        return {there[bit]: depth for bit, depth in depths.items()}

    def sent(self, keys: Sequence[int], url: str) -> None:
        """The server gets them now."""
        bit, recent = self._server(url)
        # from the last to the first, so that the beginnings of prompts, which others share, are forgotten last
        for key in reversed(keys[: self._most]):
            if key in recent:
                recent.move_to_end(key)
            else:
                recent[key] = None
                self._index.add(key, bit)
        while len(recent) > self._most:
            self._index.remove(recent.popitem(last=False)[0], bit)

    def _server(self, url: str) -> tuple[int, OrderedDict[int, None]]:
        if url not in self._servers:
            while len(self._servers) >= _MOST_SERVERS:
                bit, recent = self._servers.popitem(last=False)[1]
                for key in recent:
                    self._index.remove(key, bit)
                self._bits.give_back(bit)
            self._servers[url] = self._bits.take(), OrderedDict()
        self._servers.move_to_end(url)
        return self._servers[url]
