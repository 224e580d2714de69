"""What the KV cache of a fake worker holds: for each token the prefix that it stands for and where it belongs.

The next token of a request is a function of its prefix. Knows no step and no worker.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from frame.core.interfaces.kv import (
    AnyKVSpec,
    ChunkedKV,
    CrossKV,
    FullKV,
    KVGroup,
    KVLayout,
    LatentKV,
    SlidingKV,
    StateKV,
)
from frame.core.interfaces.step import NewRequest

#: Drawn tokens lie below; the last one is what a wrong entry leads to.
VOCAB = 100
WRONG_TOKEN = VOCAB - 1
#: The prefix of an entry that a failed load or a broken step left; finite as bits of a float, as wrong values are.
BAD = -(1 << 31)
#: Heads of all ranks together, and numbers of each.
HEADS, HEAD_DIM = 2, 4
NUMBERS = 2 * HEADS * HEAD_DIM  # int32 numbers that a token's keys and values have room for


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
    chunks: Sequence[int] = (),
    latents: int = 0,
    ranks: int = 1,
    model: str = "test",
) -> KVLayout:
    """A KV cache of small blocks; one group for each window (0 is a full one), each of that many layers.

    There is one besides for each of `chunks`, whose tokens read those of their own chunk alone, and one of so many
    layers that keep `latents`. The heads are divided over `ranks`, also those of states. A block of group g has
    `strides[g]` times `block_size` tokens; without strides every block has `block_size`. With `states` there is a group
    of a running state besides, for so many requests, and for so many `checkpoints`; if it `encodes` there is one of
    encoder tokens.
    """
    groups = []
    heads = HEADS // ranks
    specs: list[AnyKVSpec] = [
        SlidingKV(num_kv_heads=heads, head_dim=HEAD_DIM, dtype="float32", window=window)
        if window
        else FullKV(num_kv_heads=heads, head_dim=HEAD_DIM, dtype="float32")
        for window in windows
    ]
    specs += [ChunkedKV(num_kv_heads=heads, head_dim=HEAD_DIM, dtype="float32", chunk=chunk) for chunk in chunks]
    specs += [LatentKV(dim=NUMBERS, dtype="float32")] * bool(latents)
    strides = strides or [1] * len(specs)
    for index, (spec, stride) in enumerate(zip(specs, strides, strict=True)):
        count = latents if isinstance(spec, LatentKV) else layers
        names = tuple(f"group{index}.layer{layer}" for layer in range(count))
        groups.append(KVGroup(specs=(spec,) * count, layers=names, block_size=block_size * stride))
    if encodes:
        crossed = (CrossKV(num_kv_heads=heads, head_dim=HEAD_DIM, dtype="float32"),)
        groups.append(KVGroup(specs=crossed, layers=("encoded",), block_size=block_size))
    if states:
        interval = block_size * math.lcm(*strides) if checkpoints else 0
        kept = (StateKV(state_bytes=4 * NUMBERS // ranks),)
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
    return zlib.crc32(f"{prefix},{token}".encode()) >> 2  # as bits of a float finite


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
