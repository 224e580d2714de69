"""Which tokens of a step are followed by a draw, and which drafts stand before each. Knows no sampling parameter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Ahead:
    """For each of N draws, the drafts between the last known token and it.

    `token_ids` int32 [N, k] of which the first `counts[i]` (int64 [N]) count, the rest is -1.
    """

    token_ids: Tensor
    counts: Tensor

    def add_counts(self, seen: Tensor, rows: Tensor) -> None:
        """seen[i, t] += how often t is among the drafts of draw rows[i]; `seen` int32 [n, V]."""
        drafts = self.token_ids.index_select(0, rows)
        seen.scatter_add_(1, drafts.clamp(min=0).long(), (drafts >= 0).to(seen.dtype))

    def shift(self, tails: Tensor, rows: Tensor) -> Tensor:
        """The newest tokens int32 [n, W] before the draws `rows`, given those before the drafts, `tails`."""
        return newest(tails, self.token_ids.index_select(0, rows), self.counts.index_select(0, rows))


@dataclass(frozen=True)
class Draws:
    """N draws of one step. Draw i follows token `rows[i]` of the step, for slot `host_slots[i]`.

    `rows` None: the first N tokens, in order. `lengths` int [N] is the position of the token to be drawn.
    """

    rows: Tensor | None
    host_slots: np.ndarray
    lengths: Tensor
    ahead: Ahead | None = None


@dataclass(frozen=True, kw_only=True)
class CheckedDraws(Draws):
    """Draws of S rows with drafts: those of a row follow one another in the order of their positions.

    `slots` and `known` int32 [S]: each row's slot and known tokens. `places` int64 [S, k+1] are its draws, some other
    one where it has fewer; `drafts` int32 [S, k] its drafts, of which `limits` [S] may be kept. On the host
    `num_draws` [S], and `alone` bool [S]: rows that must not be given drafts.
    """

    slots: Tensor
    known: Tensor
    places: Tensor
    drafts: Tensor
    limits: Tensor
    num_draws: np.ndarray
    alone: np.ndarray


def newest(older: Tensor, newer: Tensor, counts: Tensor) -> Tensor:
    """The last W tokens [n, W] of `older` [n, W] followed by the first `counts[i]` of `newer` [n, k]."""
    width = older.shape[1]
    places = counts[:, None] + torch.arange(width, device=counts.device)
    return torch.cat([older, newer], 1).gather(1, places)
