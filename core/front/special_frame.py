"""The special tokens that a tokenizer puts around one text and between two, and truncation that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_PROBE = "a"


@dataclass(frozen=True)
class SpecialFrame:
    """One text becomes head + ids + tail; two texts become head + ids + middle + ids + tail.

    `cut_left`: texts that are too long lose tokens at their beginning instead of their end.
    """

    head: list[int]
    middle: list[int]
    tail: list[int]
    cut_left: bool = False

    def cut(self, ids: Sequence[int], length: int) -> list[int]:
        """Truncates a text's ids (without special tokens) to `length`."""
        return list(ids[max(0, len(ids) - length) :] if self.cut_left else ids[:length])

    def bare(self, ids: list[int]) -> list[int]:
        """A text's ids without the special tokens around it, where they are there."""
        end = len(ids) - len(self.tail)
        framed = ids[: len(self.head)] == self.head and ids[end:] == self.tail
        return ids[len(self.head) : end] if framed else ids

    def single(self, ids: Sequence[int], limit: int | None = None) -> list[int]:
        """One text with its special tokens, in at most `limit` ids."""
        room = len(ids) if limit is None else max(limit - len(self.head) - len(self.tail), 0)
        return [*self.head, *self.cut(ids, room), *self.tail]

    def parts(self, ids: Sequence[int], limit: int) -> list[list[int]]:
        """A long text in parts of at most `limit` ids, each with the special tokens."""
        room = max(limit - len(self.head) - len(self.tail), 1)
        return [[*self.head, *ids[start : start + room], *self.tail] for start in range(0, len(ids), room)]

    def pair(self, first: Sequence[int], second: Sequence[int], limit: int | None = None) -> tuple[list[int], int]:
        """Two texts as one prompt, and where the second begins; the longer one is cut first."""
        if limit is not None:
            room = max(limit - len(self.head) - len(self.middle) - len(self.tail), 0)
            first_room, second_room = _share(len(first), len(second), room)
            first, second = self.cut(first, first_room), self.cut(second, second_room)
        begin = [*self.head, *first, *self.middle]
        return [*begin, *second, *self.tail], len(begin)


def _share(first: int, second: int, room: int) -> tuple[int, int]:
    """How many ids of each text stay: all of the shorter one if it needs at most half, else half each."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    kept = shorter if shorter <= room // 2 else room // 2
    return (kept, room - kept) if first <= second else (room - kept, kept)


def read_frame(encode: Callable[..., Any], cut_left: bool) -> SpecialFrame:
    """Finds the special tokens by encoding a short text; `encode` is a transformers tokenizer.

    Tokenizers without a place for a second text simply join the two.
    """
    bare, single, pair = (
        list(encoded["input_ids"])
        for encoded in (encode(_PROBE, add_special_tokens=False), encode(_PROBE), encode(_PROBE, _PROBE))
    )
    start = next((i for i in range(len(single)) if single[i : i + len(bare)] == bare), 0)
    head, tail = single[:start], single[start + len(bare) :]
    middle = pair[len(head) + len(bare) : len(pair) - len(tail) - len(bare)]
    return SpecialFrame(head, middle, tail, cut_left)
