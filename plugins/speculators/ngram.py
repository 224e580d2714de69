"""Prompt lookup: proposes the tokens that followed the newest tokens at an earlier place of the request.

After Saxena, "Prompt Lookup Decoding" (2023). The whole search is a few tensor operations over all rows at once, so it
runs where the tokens are. Knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frame.interfaces import DraftContext, Drafts, Speculator, SpeculatorSetup

from .ngram_options import NgramOptions


class NgramSpeculator(Speculator):
    """Keeps no state: it reads the token table of the step."""

    def __init__(self, setup: SpeculatorSetup, options: NgramOptions) -> None:
        super().__init__(setup, options)
        self._min = options.prompt_lookup_min
        self._max = options.prompt_lookup_max

    def propose(self, context: DraftContext) -> Drafts:
        slots, lengths = context.slots.long(), context.lengths.long()
        tokens = context.token_ids[:, : context.longest][slots]  # an index, since slots may be -1
        matched = match_lengths(tokens, lengths, self._max)
        start, found = best_start(matched, lengths, self.num_drafts)
        places = start[:, None] + torch.arange(self.num_drafts, device=tokens.device)
        drafts = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))
        counts = (lengths - start).clamp(max=self.num_drafts).masked_fill(found < self._min, 0)
        return Drafts(drafts, counts.to(torch.int32))


def match_lengths(tokens: Tensor, lengths: Tensor, most: int) -> Tensor:
    """int64 [S, L]: how many tokens before place p of `tokens` [S, L] equal the newest ones, `most` at most.

    The newest token of row i is at lengths[i] - 1. 0 from that length on, where nothing would follow.
    """
    width = tokens.shape[1]
    places = torch.arange(width, device=tokens.device)
    running = places < lengths[:, None]
    matched = torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)
    for back in range(1, min(most, width - 1) + 1):
        newest = tokens.gather(1, (lengths - back).clamp(min=0)[:, None])
        equal = torch.zeros_like(running)
        equal[:, back:] = tokens[:, : width - back] == newest
        running = running & equal
        matched += running
    return matched


def best_start(matched: Tensor, lengths: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """(where the drafts start, how long its match is), int64 [S]: the longest match, and of those the newest.

    A match that `wanted` tokens follow beats one of the same length that fewer follow.
    """
    width = matched.shape[1]
    places = torch.arange(width, device=matched.device)
    # among matches that fewer than `wanted` tokens follow, the older one is followed by more
    rank = torch.where(places + wanted <= lengths[:, None], width + places, width - places)
    start = (matched * (2 * width + 1) + rank.masked_fill(matched == 0, 0)).argmax(1)
    return start, matched.gather(1, start[:, None]).squeeze(1)
