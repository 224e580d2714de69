"""Where the Hopper kernel of few heads says that bulk copies put a tile, against where they put it."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton.experimental.gluon")

from frame.kernels.latent_copies import tile_layout


def copied_to(latent: int, number: int) -> int:
    """Where 3-d copies of 8 latents leave a number: chunks of 64 one behind the other, pieces of 16 bytes mixed."""
    group, line = divmod(latent, 8)
    chunk, place = divmod(number, 64)
    piece, rest = divmod(place, 8)
    return group * 4096 + chunk * 512 + line * 64 + (piece ^ line) * 8 + rest


@pytest.mark.parametrize("token", [0, 1])
def test_products_find_what_copies_bring(token: int) -> None:
    bases = tile_layout(token).offset_bases
    seen = set()
    for address in range(1 << len(bases)):
        place = [0, 0]
        for bit, base in enumerate(bases):
            if address >> bit & 1:
                place = [was ^ own for was, own in zip(place, base, strict=True)]
        latent, number = place[token], place[1 - token]
        assert copied_to(latent, number) == address
        seen.add((latent, number))
    assert seen == set(itertools.product(range(64), range(512)))
