"""Where plain draws come from: whole rows of logits, or the best of each rank's part of the vocabulary.

Ranks that divide the vocabulary exchange three numbers a row instead of its logits. What asks for more than a
temperature reads whole rows. Knows no request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...interfaces.model import Model
from ...layers.embedding import Head
from ...ops import Ops


class WholeRows:
    """Every rank has whole rows."""

    #: whether ranks have parts of rows
    divided = False

    def __init__(self, model: Model, ops: Ops) -> None:
        self._model, self._ops = model, ops

    def draw(
        self, hidden: Tensor, temperature: Tensor | None, streams: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(token ids int32 [N], their logits float32 [N]) for `hidden` [N, H]; greedy without `temperature`.

        The other arguments, all [N], are those of `ops.draw`.
        """
        logits = self._model.logits(hidden)
        if temperature is None or streams is None or positions is None:
            return self._ops.greedy(logits)
        token_ids = self._ops.draw(logits, temperature, streams, positions)
        return token_ids, logits.gather(-1, token_ids.long()[:, None]).squeeze(-1).float()


class ShardedRows(WholeRows):
    """Each rank has the columns of its part of the vocabulary, which `head` gives."""

    divided = True

    def __init__(self, model: Model, ops: Ops, head: Head) -> None:
        super().__init__(model, ops)
        self._head = head

    def draw(
        self, hidden: Tensor, temperature: Tensor | None, streams: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        head = self._head
        with head.divided():
            logits = self._model.logits(hidden)[:, : head.table.num_used]
        best = self._ops.best_of_part(logits, head.table.start, temperature, streams, positions)
        if head.group.is_silent:  # a trial step: what others would send may be no token
            return best[1], best[2]
        sent = torch.stack([part.view(torch.int32) for part in best])
        came = head.group.all_gather(sent, dim=0).unflatten(0, (head.group.size, len(best)))
        winner = came[:, 0].view(torch.float32).argmax(0, keepdim=True)  # the first of equals, and NaN before all
        tokens, logit = (came[:, part].gather(0, winner).squeeze(0) for part in (1, 2))
        return tokens, logit.view(torch.float32)


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
