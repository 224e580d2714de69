"""Which families `make test` runs the long tests of: those whose rows in the table show a trait that no other shows."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from frame.testing.families import FAMILIES, latent, states

#: The parameters of tests that are names of rows.
_PARAMETERS = ("family", "checkpoint")
#: Rows of which each keeps what it caches of a request in another way.
CACHES = (
    "llama", "mistral", "gemma2", "gpt2", "bloom", "gpt-oss", "llama4", "qwen3-moe", "gemma3n", "deepseek-v2",
    "deepseek-v32", "mamba2", "qwen3-next", "lfm2",
)  # fmt: skip
#: Rows with ALiBi, whose contexts devices cannot share.
ALIBI = ("falcon-rw", "bloom", "bloom-post-norm", "mpt", "mpt-plain")
#: Rows whose decode contexts devices cannot share: of biases by distance, chunks and latents.
UNSHARED = frozenset({*ALIBI, *latent.ROWS, *(name for name in FAMILIES if name.startswith(("llama4", "kimi-linear")))})
#: Rows whose prompts devices cannot divide: those, and layers that need all tokens.
UNDIVIDED = UNSHARED | frozenset(states.ROWS)


def mark_families(items: Iterable[pytest.Item]) -> None:
    """Adds the marker `matrix` to cases of rows that are `in_matrix`, but in tests that are marked `every_family`.

    In tests that are marked `few_families`, of what no family does in its own way, they get the marker `slow`. In tests
    that are marked `each_cache`, of how requests are planned, all rows but `CACHES` are left to the matrix.
    """
    for item in items:
        if item.get_closest_marker("every_family") is not None:
            continue
        call = getattr(item, "callspec", None)
        names = [call.params.get(name) for name in _PARAMETERS] if call is not None else []
        of_caches = item.get_closest_marker("each_cache") is not None
        if any(_is_left(name, of_caches) for name in names):
            item.add_marker("matrix" if item.get_closest_marker("few_families") is None else "slow")


def _is_left(name: object, of_caches: bool) -> bool:
    if not isinstance(name, str) or name not in FAMILIES:
        return False
    return FAMILIES[name].in_matrix or (of_caches and name not in CACHES)
