"""Which blocks servers have in their prefix caches, from their KV events, and how much of a prompt that is.

Servers name blocks by hashes of their own. The index has keys of this process for them, made of the tokens that events
tell: a key stands for all tokens up to a block's end, the adapter, and what else decides the content.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice
from struct import Struct
from typing import NamedTuple

from frame.interfaces import KVChange, KVCleared, KVRemoved, KVStored

from .prefix_index import Bits, PrefixIndex

#: Media (places of blocks: GPU, CPU, …) of one data rank, and adapters whose names are known of it.
_MOST_MEDIA, _MOST_ADAPTERS = 8, 4096
#: Blocks whose keys are made, and looked up, at a time.
_RUN_BLOCKS = 64
#: Keys of known tokens are kept of blocks of so many or more, where each takes the room of two tokens, and for so many
#: kinds of blocks: servers' sizes and adapters.
LEAST_KEPT, MOST_KEPT = 4, 2


class KnownTokens(NamedTuple):
    """The first `num_tokens` tokens of a prompt were seen before: keys of their blocks, by what decides them."""

    block_keys: dict[Hashable, array[int]]
    num_tokens: int = 0

    def up_to(self, num_tokens: int) -> KnownTokens:
        """As many of the same tokens."""
        return self._replace(num_tokens=num_tokens)


class Prompt(NamedTuple):
    """What decides the blocks of a prompt, as a request says it."""

    tokens: array[int]
    salt: object = None
    model: object = None
    known: KnownTokens | None = None


class _Rank:
    """What one data rank of a server has: by medium, its names of blocks → keys."""

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.media: dict[str, dict[int | bytes, int]] = {}
        self.block_size = 0
        self.adapters: set[str] = set()

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.media.values()))

    def key(self, name: int | bytes) -> int | None:
        """The key of a block in any medium."""
        return next((table[name] for table in self.media.values() if name in table), None)


class CachedBlocks:
    """At most `most` blocks, of which each rank has an equal share; more are not noted.

    `change` is called by one thread, all else by another one. Counts blocks, or knows less than there is, never more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._index = PrefixIndex()
        self._bits = Bits()
        # replaced, never changed, since the other thread reads it
        self._ranks: dict[tuple[str, int], _Rank] = {}

    def __len__(self) -> int:
        return len(self._index)

    def tell(self, urls: Sequence[str]) -> bool:
        """Whether any of these servers tells what it has."""
        there = {url for url, _ in self._ranks}
        return any(url in there for url in urls)

    def cached(self, prompt: Prompt, urls: Sequence[str]) -> dict[str, int]:
        """The tokens at the beginning of a prompt that each of these servers has; of several ranks, the most."""
        found: dict[str, int] = {}
        wanted = set(urls)
        ranks = {rank.bit: (url, rank) for (url, _), rank in self._ranks.items() if url in wanted and rank.block_size}
        alike: dict[tuple[int, str | None], int] = {}
        for bit, (_, rank) in ranks.items():
            adapter = prompt.model if isinstance(prompt.model, str) and prompt.model in rank.adapters else None
            alike[rank.block_size, adapter] = alike.get((rank.block_size, adapter), 0) | bit
        for (size, adapter), holders in alike.items():
            for bit, depth in self._index.depths(_keys(prompt, size, adapter), holders).items():
                url = ranks[bit][0]
                found[url] = max(found.get(url, 0), depth * size)
        return found

    def change(self, url: str, number: int, change: KVChange) -> None:
        """A rank has gained or lost blocks."""
        rank = self._ranks.get((url, number))
        if isinstance(change, KVCleared):
            if rank is not None:
                self._forget(url, number, rank)
            return
        if rank is None:
            if isinstance(change, KVRemoved):
                return
            rank = _Rank(self._bits.take())
            self._ranks = {**self._ranks, (url, number): rank}
        if isinstance(change, KVRemoved):
            self._removed(rank, change)
        elif change.block_size:
            self._stored(rank, change)
        else:
            self._copied(rank, change)

    def _forget(self, url: str, number: int, rank: _Rank) -> None:
        self._ranks = {key: one for key, one in self._ranks.items() if key != (url, number)}
        for table in rank.media.values():
            for key in table.values():
                self._index.remove(key, rank.bit)
        self._bits.give_back(rank.bit)

    def _table(self, rank: _Rank, medium: str) -> dict[int | bytes, int] | None:
        if medium not in rank.media and len(rank.media) >= _MOST_MEDIA:
            return None
        return rank.media.setdefault(medium, {})

    def _room(self, rank: _Rank) -> int:
        left = self._most - sum(one.num_blocks for one in self._ranks.values())
        return max(0, min(left, self._most // len(self._ranks) - rank.num_blocks))

    def _stored(self, rank: _Rank, change: KVStored) -> None:
        table = self._table(rank, change.medium)
        size = change.block_size
        if rank.block_size not in (0, size):  # no engine has two: it is another one now, or these events are wrong
            return
        key = _root(change.adapter) if change.parent is None else rank.key(change.parent)
        if table is None or key is None:  # what stands before is not known, and so neither what these are
            return
        rank.block_size = size
        if change.adapter is not None and len(rank.adapters) < _MOST_ADAPTERS:
            rank.adapters.add(change.adapter)
        data = change.tokens.tobytes()
        width = change.tokens.itemsize * size
        for place, name in enumerate(change.names[: self._room(rank)]):
            block = data[place * width : (place + 1) * width]
            key = _key(key, block, change.extra[place]) if change.extra else hash((key, block))
            before = table.get(name)
            if before is not None and before != key:
                self._index.remove(before, rank.bit)
            table[name] = key
            self._index.add(key, rank.bit)

    def _copied(self, rank: _Rank, change: KVStored) -> None:
        """Blocks that are in another medium as well."""
        table = self._table(rank, change.medium)
        for name in change.names[: self._room(rank)] if table is not None else ():
            if table is not None and (key := rank.key(name)) is not None:
                table[name] = key

    def _removed(self, rank: _Rank, change: KVRemoved) -> None:
        table = rank.media.get(change.medium, {})
        for name in change.names:
            key = table.pop(name, None)
            if key is not None and rank.key(name) is None:
                self._index.remove(key, rank.bit)


def _root(adapter: str | None) -> int:
    return hash(("", adapter))


def _key(before: int, block: bytes, extra: Hashable) -> int:
    """The key of a block behind another; `extra` is what else decides its content, () for nothing."""
    return hash((before, block, extra)) if extra else hash((before, block))


def _keys(prompt: Prompt, size: int, adapter: str | None) -> Iterator[list[int]]:
    """The keys of a prompt's blocks, run by run; those of known tokens are made once."""
    key, salt = _root(adapter), (prompt.salt,) if isinstance(prompt.salt, str) else ()
    # a server computes one token at least, and finds no block that has the last one
    count = max(0, len(prompt.tokens) - 1) // size
    sure = 0 if prompt.known is None or size < LEAST_KEPT else min(count, prompt.known.num_tokens // size)
    if prompt.known is not None and sure:
        kinds, kind = prompt.known.block_keys, (size, adapter, salt)
        if kind not in kinds and len(kinds) == MOST_KEPT:
            kinds.clear()
        kept = kinds.setdefault(kind, array("q"))
        if len(kept) < sure:
            whole = prompt._replace(tokens=prompt.tokens[: sure * size + 1], known=None)
            kept[:] = array("q", chain.from_iterable(_keys(whole, size, adapter)))
        run = kept[:sure].tolist()
        yield run
        key, salt = run[-1], ()
    width = prompt.tokens.itemsize * size
    blocks = Struct(f"{width}s").iter_unpack(memoryview(prompt.tokens).cast("B")[sure * width : count * width])
    if salt and (first := next(blocks, None)) is not None:
        key = _key(key, first[0], salt)
        yield [key]
    # one expression, since most of the time that a choice takes goes by here
    while run := [key := hash((key, block)) for (block,) in islice(blocks, _RUN_BLOCKS)]:
        yield run
