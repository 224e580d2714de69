"""What the KV cache of a fake worker holds: for each token the prefix that it stands for and where it belongs.

The next token of a request is a function of its prefix. Knows no step and no worker.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from frame.core.interfaces.kv import CrossKV, FullKV, KVGroup, KVLayout, SlidingKV, StateKV
from frame.core.interfaces.step import NewRequest

#: Drawn tokens lie below; the last one is what a wrong entry leads to.
VOCAB = 100
WRONG_TOKEN = VOCAB - 1
#: The prefix of an entry that a failed load or a broken step left.
BAD = -1
HEADS, HEAD_DIM = 1, 4
NUMBERS = 2 * HEADS * HEAD_DIM  # int32 numbers that a token's key and value have room for


def make_layout(
    num_blocks: int = 64,
    block_size: int = 4,
    windows: Sequence[int] = (0,),
    layers: int = 2,
    *,
    strides: Sequence[int] = (),
    states: int = 0,
    checkpoints: int = 0,
    encodes: bool = False,
    model: str = "test",
) -> KVLayout:
    """A KV cache of small blocks; one group for each window (0 is a full one), each of that many layers.

    `strides[g]` times `block_size` tokens are in a block of group g; without them every block has `block_size`. With
    `states` there is a group of a running state besides, for so many requests, and for so many `checkpoints`; if it
    `encodes` there is one of encoder tokens.
    """
    groups = []
    strides = strides or [1] * len(windows)
    for index, window in enumerate(windows):
        spec = (
            SlidingKV(num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32", window=window)
            if window
            else FullKV(num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
        )
        names = tuple(f"group{index}.layer{layer}" for layer in range(layers))
        groups.append(KVGroup(specs=(spec,) * layers, layers=names, block_size=block_size * strides[index]))
    if encodes:
        crossed = (CrossKV(num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32"),)
        groups.append(KVGroup(specs=crossed, layers=("encoded",), block_size=block_size))
    if states:
        interval = block_size * math.lcm(*strides) if checkpoints else 0
        kept = (StateKV(state_bytes=4 * NUMBERS),)
        groups.append(KVGroup(specs=kept, layers=("state",), block_size=interval, pool=1))
    return KVLayout(
        groups=tuple(groups),
        pools=(num_blocks, states + checkpoints + 1) if states else (num_blocks,),
        block_size=block_size,
        grain=block_size * math.lcm(*strides),
        numerics=f"{model} in float32",
        model=model,
    )


def prefixes_of(tokens: Sequence[int], first: int = 0) -> list[int]:
    """The number that stands for each prefix of `tokens`; `first` stands for what comes before them."""
    prefixes: list[int] = []
    for token in tokens:
        prefixes.append(extend_prefix(prefixes[-1] if prefixes else first, token))
    return prefixes


def next_token(prefix: int, seed: int, vocab: int = WRONG_TOKEN) -> int:
    """The token below `vocab` that a worker draws after a prefix whose cache entries are all right."""
    return zlib.crc32(f"{prefix}:{seed}".encode()) % vocab


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """The output of a prompt whose cache entries are all right."""
    prefix, tokens = prefixes_of(prompt)[-1], list[int]()
    for _ in range(num_tokens):
        tokens.append(next_token(prefix, seed))
        prefix = extend_prefix(prefix, tokens[-1])
    return tokens


def extend_prefix(prefix: int, token: int) -> int:
    return zlib.crc32(f"{prefix},{token}".encode()) >> 1


@dataclass
class Resident:
    """A request in a slot: its tokens, the numbers that stand for its prefixes, its blocks by group.

    `spoiled`: it read what a failed load or a broken step left, so that all it computes is wrong from then on. `drafts`
    were proposed after its newest token. `encoded` stand for the prefixes of its encoder tokens, on which all depend.
    """

    request_id: str
    seed: int
    prompt_len: int
    max_len: int
    num_computed: int
    tables: list[list[int]]
    tokens: list[int]
    prefixes: list[int]
    prompt_logprobs: bool = False
    spoiled: bool = False
    drafts: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, new: NewRequest) -> Resident:
        """The state of a request that enters."""
        tokens = new.token_ids.tolist()
        encoded = prefixes_of([] if new.encoder_ids is None else new.encoder_ids.tolist())
        return cls(
            request_id=new.request_id,
            seed=new.seed,
            prompt_len=new.prompt_len,
            max_len=new.prompt_len + (new.params.max_tokens or 1 << 30),
            num_computed=new.num_computed,
            tables=[blocks.tolist() for blocks in new.block_ids],
            tokens=tokens,
            prefixes=prefixes_of(tokens, encoded[-1] if encoded else 0),
            prompt_logprobs=new.params.prompt_logprobs is not None,
            encoded=encoded,
        )

    def append(self, token: int) -> None:
        """One more token."""
        self.tokens.append(token)
        self.prefixes.append(extend_prefix(self.prefixes[-1] if self.prefixes else 0, token))


def entries_of(group: int, number: int, positions: range, prefixes: Sequence[int]) -> np.ndarray:
    """int32 [n, numbers]: what the cache of a group's layer of that number holds of tokens at `positions`."""
    found = np.zeros((len(positions), NUMBERS), np.int32)
    found[:, 0], found[:, 1], found[:, 2], found[:, 3:] = group + 1, positions, prefixes, number + 1
    return found
