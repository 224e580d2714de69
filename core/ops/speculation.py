"""Which drafts hold: those that the model would have drawn itself. S rows, k drafts a row at most."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_drafts(token_ids: Tensor, drafts: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int32 [S, k+1], how many of them int32 [S]): the draws up to and with the first that is no draft.

    `token_ids` int32 [S, k+1]: what was drawn after the last known token, and after each of `drafts` int32 [S, k], of
    which row i has `limits[i]`. Every draw but the first is meaningful only while the drafts before it hold, and every
    position is drawn with noise of its own, so the tokens are those of as many single steps. The rest is -1.
    """
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    equal = (token_ids[:, :-1] == drafts) & (places[:-1] < limits[:, None])
    counts = equal.cumprod(-1).sum(-1, dtype=torch.int32) + 1
    return token_ids.masked_fill(places >= counts[:, None], -1), counts
