"""Tokens of prompts that servers have said. A prompt that begins like one of those begins with its tokens."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from .cached_blocks import LEAST_KEPT, MOST_KEPT, KnownTokens
from .prompt_text import MOST_BYTES, PIECE_BYTES

#: Tokens at the end of a beginning that may be others, since a text is not divided evenly.
_UNSURE_TOKENS = 8
#: The room of a key, in that of a token of four bytes.
_KEY_TOKENS = 32
#: The share of a prompt that must be known.
_LEAST_SHARE = 0.5


class TokenizedTexts:
    """The newest prompts, by the keys of their pieces, which take the room of at most `most_tokens` tokens together."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._num_tokens = 0
        self._next = 0
        #: number of a prompt → the keys of its pieces, its bytes, its tokens, and what is known of their blocks
        self._prompts: OrderedDict[int, tuple[Sequence[int], int, array[int], KnownTokens]] = OrderedDict()
        self._newest: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def remember(self, keys: Sequence[int], num_bytes: int, tokens: Sequence[int]) -> None:
        """A prompt of so many bytes, whose pieces have these keys, has these tokens."""
        if not keys or num_bytes >= MOST_BYTES:  # what was cut off has tokens, too
            return
        self._next += 1
        self._prompts[self._next] = keys, num_bytes, array("I", tokens), KnownTokens({})
        self._newest |= dict.fromkeys(keys, self._next)
        self._num_tokens += _room(keys, tokens)
        while self._num_tokens > self._most:
            number, (gone, _, old, _) = self._prompts.popitem(last=False)
            self._num_tokens -= _room(gone, old)
            for key in gone:
                if self._newest.get(key) == number:
                    del self._newest[key]

    def recall(self, keys: Sequence[int], num_bytes: int) -> tuple[array[int], KnownTokens] | None:
        """The tokens of another prompt as far as they are known, and 0 for each of the others; None where few are.

        What comes with them says how many are known.

        How many there are is estimated from bytes.
        """
        place = next((place for place in range(len(keys) - 1, -1, -1) if keys[place] in self._newest), None)
        if place is None or (known := (place + 1) * PIECE_BYTES) < _LEAST_SHARE * num_bytes:
            return None
        _, all_bytes, tokens, blocks = self._prompts[self._newest[keys[place]]]
        rate = len(tokens) / all_bytes
        found = tokens[: max(0, min(len(tokens), int(rate * known)) - _UNSURE_TOKENS)]
        num_known = len(found)
        found.frombytes(bytes(4 * max(1, int(rate * num_bytes) - num_known)))
        return found, blocks.up_to(num_known)


def _room(keys: Sequence[int], tokens: Sequence[int]) -> int:
    """What a prompt takes, in the room of tokens, with the keys of its blocks."""
    return len(tokens) + 2 * MOST_KEPT * len(tokens) // LEAST_KEPT + _KEY_TOKENS * len(keys)
