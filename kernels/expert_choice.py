"""Which kernels multiply tokens with experts whose weights are codes, where tiles do not. Knows no tensor.

`python -m benchmarks.kernels.coded_experts --candidates` times them all and prints choices to write into `choose`; what
is written here was the quickest for a layer of gpt-oss-20b on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from .expert_launch import Shape, Tile

#: The most tokens that are served by a choice; more take the tiles of `expert_launch.coded_launch`. Both decide alike
#: from a power of two to the next, so that the warm-up, which takes powers of two, meets all kernels.
MOST_TOKENS = 127
#: The most rows that experts have on average, of so many more tokens, for "warpgroups" on Hopper.
WARPGROUP_ROWS = 64


@dataclass(frozen=True)
class Part:
    """How one of the two products is computed.

    `kernel` is "vectors" (`coded_vectors`), "few" (`coded_few.product`, on Hopper), "summed" (`coded_few.summed`, of a
    second product, with `early` steps), "warpgroups" (`coded_blocks.product`, on Hopper) or "tiles" (`coded_experts`).
    """

    kernel: str
    tile: Tile
    early: int = 0


@dataclass(frozen=True)
class Choice:
    """Both products, and the pairs of a block of theirs; 0: each pair by itself, as some kernels take them anyway."""

    block_m: int
    gate_up: Part
    down: Part

    def __post_init__(self) -> None:
        if self.down.early and (self.block_m or self.gate_up.kernel == "tiles"):
            raise ValueError(f"a first product by {self.gate_up} does not wait before it lets {self.down} begin")


def choose(shape: Shape, num_tokens: int) -> Choice:
    """The kernels for so many tokens on Hopper."""
    pairs = (1 << num_tokens.bit_length() >> 1) * shape.top_k
    if pairs > max(shape.top_k, shape.num_experts // 2):
        down = Tile(16, 128, 2) if pairs <= shape.num_experts else Tile(32, 256, 4)
        return Choice(8, Part("few", Tile(16, 128, 2)), Part("few", down))
    if pairs > shape.top_k:
        return Choice(0, Part("few", Tile(16, 256, 4)), Part("few", Tile(32, 256, 4)))
    tile = Tile(16, 128, 4, 6)
    return Choice(0, Part("few", tile), Part("summed", tile, 2))


def choose_blocks(shape: Shape, num_tokens: int) -> Choice | None:
    """The kernels for more than `MOST_TOKENS` tokens on Hopper, or None where `coded_launch` shall decide."""
    rows = (1 << num_tokens.bit_length() >> 1) * shape.top_k / shape.num_experts
    if rows > WARPGROUP_ROWS:
        return None
    if rows <= 8:  # more experts than gpt-oss-20b has; the quickest blocks of 16 with 16 rows, not timed with fewer
        return Choice(16, Part("warpgroups", Tile(64, 256, 4, 4)), Part("warpgroups", Tile(128, 256, 4, 4)))
    if rows <= 16:
        tile = Tile(64, 128, 4, 4)
        return Choice(32, Part("warpgroups", tile), Part("warpgroups", Tile(128, 128, 4, 4)))
    return Choice(64, Part("warpgroups", Tile(128, 384, 8, 3)), Part("warpgroups", Tile(256, 384, 8, 3)))


def plain() -> Choice:
    """The kernels of one to three tokens where there is none for Hopper."""
    return Choice(0, Part("vectors", Tile(4, 1024, 1)), Part("vectors", Tile(4, 1024, 1)))
