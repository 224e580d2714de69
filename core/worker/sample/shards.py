"""Where plain draws come from: whole rows of logits, or the best of each rank's part of the vocabulary.

Ranks that divide the vocabulary exchange three numbers a row instead of its logits, and gather the rows that filter.
What asks for more reads whole rows. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...interfaces.model import Model
from ...layers.embedding import Head
from ...ops import Ops


class WholeRows:
    """Every rank has whole rows."""

    def __init__(self, model: Model, ops: Ops) -> None:
        self._model, self._ops = model, ops

    def draw(self, hidden: Tensor, *noise: Tensor) -> tuple[Tensor, Tensor]:
        """(token ids int32 [N], their logits float32 [N]) for `hidden` [N, H].

        Greedy without `noise`, which is temperature, streams and positions [N], as `ops.draw` takes them.
        """
        logits = self._model.logits(hidden)
        return self._drawn(logits, *noise) if noise else self._ops.greedy(logits)

    def _drawn(self, logits: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
        token_ids = self._ops.draw(logits, *parameters)
        return token_ids, logits.gather(-1, token_ids.long()[:, None]).squeeze(-1).float()


class ShardedRows(WholeRows):
    """Each rank has the columns of its part of the vocabulary, which `head` gives."""

    def __init__(self, model: Model, ops: Ops, head: Head) -> None:
        super().__init__(model, ops)
        self._head = head

    def draw(
        self, hidden: Tensor, *noise: Tensor, index: Tensor | None = None, filters: Sequence[Tensor | None] = ()
    ) -> tuple[Tensor, Tensor]:
        """As of whole rows. Those of `index` int64 [n], which `filters` [n] limit, are gathered, and no others."""
        head = self._head
        with head.divided():
            part = self._model.logits(hidden)
        best = self._ops.best_of_part(part[:, : head.table.num_used], head.table.start, *noise)
        if head.group.is_silent:  # a trial step: what others would send may be no token
            return best[1], best[2]
        sent = torch.stack([one.view(torch.int32) for one in best])
        came = head.group.all_gather(sent, dim=0).unflatten(0, (head.group.size, len(best)))
        winner = came[:, 0].view(torch.float32).argmax(0, keepdim=True)  # the first of equals, and NaN before all
        tokens, logits = (came[:, place].gather(0, winner).squeeze(0) for place in (1, 2))
        drawn = logits.view(torch.float32)
        if index is None:
            return tokens, drawn
        whole = head.gathered(part.index_select(0, index))
        chosen = self._drawn(whole, *(one.index_select(0, index) for one in noise), *filters)
        return tokens.index_copy(0, index, chosen[0]), drawn.index_copy(0, index, chosen[1])


def rows_of(model: Model, ops: Ops) -> WholeRows:
    """Parts where the model's only head is divided and its `logits` may be called for a part, else whole rows."""
    heads = [module for module in model.modules() if isinstance(module, Head)]
    defining = next(kind for kind in type(model).__mro__ if "logits" in vars(kind))
    if len(heads) != 1 or heads[0].group.size == 1 or not vars(defining).get("divides_logits", False):
        return WholeRows(model, ops)
    (head,) = heads
    if (head.group.size - 1) * head.table.num_rows >= head.vocab_size:
        return WholeRows(model, ops)  # a rank has no token
    return ShardedRows(model, ops, head)
