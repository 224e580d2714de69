"""The projection of attention whose queries come with a gate of the same width, head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.layers.linear import Linear, Rows, local_kv_heads, split_evenly

if TYPE_CHECKING:
    from frame.core.layers.build import Build


def gated_attention_input(
    build: Build, prefix: str, hidden_size: int, heads: tuple[int, int, int], *, bias: bool = False
) -> tuple[Linear, tuple[int, int, int, int]]:
    """Returns x → [T, queries + keys + values + gates] of this rank's heads, and these four sizes.

    `heads` are (query heads, key/value heads, head size). "PREFIX.q_proj" holds for each head its query, then its gate.
    """
    num_heads, num_kv_heads, size = heads
    group = build.groups.tensor
    count = split_evenly(f"the attention heads of {prefix}", num_heads, group)
    kv_count, first_kv = local_kv_heads(prefix, num_kv_heads, group)
    mine = range(group.rank * count, (group.rank + 1) * count)
    query, gate = (
        [Rows(f"{prefix}.q_proj", 2 * num_heads * size, (2 * head + part) * size, size) for head in mine]
        for part in (0, 1)
    )
    kv = [
        Rows(f"{prefix}.{name}", num_kv_heads * size, first_kv * size, kv_count * size) for name in ("k_proj", "v_proj")
    ]
    layer = Linear(build, [*query, *kv, *gate], hidden_size, slice(0, hidden_size), bias=bias)
    return layer, (count * size, kv_count * size, kv_count * size, count * size)
