"""The table of model families that tests compare with transformers, in files by what families have in common."""

from __future__ import annotations

from collections.abc import Mapping

from . import decoders, dense, experts, latent, older, states
from .row import NUM_TOKENS, TINY, Family, rope

#: All rows, by name.
FAMILIES: Mapping[str, Family] = {
    **decoders.ROWS,
    **dense.ROWS,
    **older.ROWS,
    **experts.ROWS,
    **latent.ROWS,
    **states.ROWS,
}

__all__ = ["FAMILIES", "NUM_TOKENS", "TINY", "Family", "rope"]
