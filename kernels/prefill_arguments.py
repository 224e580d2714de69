"""What the functions of `prefill` and `prefill_tiles` hand each other together. Knows no kernel."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """What a kernel is compiled for.

    A tile is `tile` keys of `dim` features, the padded `head_dim`; `num_stages` of them are in flight, and `page` keys
    are copied at once. `groups` query heads share a KV head; `window` 0 is none; `repeated` programs serve several
    blocks of queries.
    """

    groups: int
    block_size: int
    page: int
    tile: int
    num_stages: int
    dim: int
    head_dim: int
    window: int
    soft_cap: bool
    sinks: bool
    repeated: bool


class Tiles(NamedTuple):
    """Shared memory for tiles, and the barriers that say of each that it is there, and that it is free again."""

    memory: Any
    ready: Any
    free: Any


class Queries(NamedTuple):
    """A block of at most 128 queries of a row, and the tiles of keys that they see.

    `out_row` is its first token's place in the batch, `first_token` that in the row's new tokens, of which there are
    `query_len`, `first_pos` that in the row of `seq_len` tokens. The first `num_masked` of the `num_tiles` tiles reach
    the diagonal.
    """

    out_row: Any
    first_token: Any
    first_pos: Any
    query_len: Any
    seq_len: Any
    num_tiles: Any
    num_masked: Any
