"""What a rank has of the vocabulary, and how the ranks of a tensor group draw from what each of them has.

Ranks that divide the vocabulary exchange three numbers a row instead of its logits. Whole rows are gathered for those
that need them, and for no others. Knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...interfaces.model import Model
from ...layers.embedding import Head
from ...ops import Ops


@dataclass(frozen=True)
class Part:
    """The `size` ids of a rank, from `start` on, of a vocabulary of `vocab_size`; id `start` + c is its column c."""

    start: int
    size: int
    vocab_size: int

    @property
    def is_whole(self) -> bool:
        """Whether it has all ids."""
        return self.size == self.vocab_size

    def has(self, token_ids: np.ndarray) -> np.ndarray:
        """Which of the ids it has, as bool."""
        found: np.ndarray = (token_ids >= self.start) & (token_ids < self.start + self.size)
        return found

    def columns(self, token_ids: Tensor) -> Tensor:
        """The columns of ids, -1 for those that it does not have."""
        if self.is_whole:
            return token_ids
        columns = token_ids - self.start
        return columns.masked_fill_((columns < 0) | (columns >= self.size), -1)

    def words(self, words: np.ndarray) -> np.ndarray:
        """The bits of its ids, int32 [n, ceil(size / 32)], of masks [n, ceil(vocab_size / 32)] over all ids."""
        if self.is_whole:
            return words
        first, shift = divmod(self.start, 32)
        count = -(-self.size // 32)
        taken = words.view(np.uint32)[:, first : first + count + 1]
        if not shift:
            return np.ascontiguousarray(taken[:, :count]).view(np.int32)
        taken = np.pad(taken, ((0, 0), (0, count + 1 - taken.shape[1])))
        return (taken[:, :-1] >> np.uint32(shift) | taken[:, 1:] << np.uint32(32 - shift)).view(np.int32)


class WholeVocabulary:
    """Every rank has whole rows of logits [N, V]."""

    #: whether a rank has only a part of each row
    is_divided = False

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def part(self, vocab_size: int) -> Part:
        """The ids whose columns a rank has."""
        return Part(0, vocab_size, vocab_size)

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        """What a rank has of the logits of `hidden` [N, H]; the methods below call it `logits`."""
        return model.logits(hidden)

    def columns(self, logits: Tensor) -> Tensor:
        """A view of the columns of `part`."""
        return logits

    def whole(self, logits: Tensor, index: Tensor | None) -> Tensor:
        """Whole rows: a copy of those of `index` int64 [n], or all."""
        return logits if index is None else logits.index_select(0, index)

    def best(self, logits: Tensor, *noise: Tensor) -> tuple[Tensor, Tensor]:
        """(token ids int32 [N], their logits float32 [N]).

        Greedy without `noise`, which is temperature, streams and positions [N], as `ops.draw` takes them.
        """
        if not noise:
            return self._ops.greedy(logits)
        token_ids = self._ops.draw(logits, *noise)
        return token_ids, logits.gather(-1, token_ids.long()[:, None]).squeeze(-1).float()


class DividedVocabulary(WholeVocabulary):
    """Each rank has the columns of its part of the vocabulary, which `head` gives, and those that fill it up."""

    is_divided = True

    def __init__(self, ops: Ops, head: Head) -> None:
        super().__init__(ops)
        self._head = head

    def part(self, vocab_size: int) -> Part:
        return Part(self._head.table.start, self._head.table.num_used, vocab_size)

    def logits(self, model: Model, hidden: Tensor) -> Tensor:
        with self._head.divided():
            return model.logits(hidden)

    def columns(self, logits: Tensor) -> Tensor:
        return logits[:, : self._head.table.num_used]

    def whole(self, logits: Tensor, index: Tensor | None) -> Tensor:
        """As of whole rows, in float32: gathers them, so that all ranks must call it."""
        return self._head.gathered(logits if index is None else logits.index_select(0, index)).float()

    def best(self, logits: Tensor, *noise: Tensor) -> tuple[Tensor, Tensor]:
        group = self._head.group
        best = self._ops.best_of_part(self.columns(logits), self._head.table.start, *noise)
        joined = group.join_best(*best)
        if joined is None:
            sent = torch.stack([one.view(torch.int32) for one in best])
            joined = self._ops.join_parts(group.all_gather(sent, dim=0).unflatten(0, (group.size, len(best))))
        # in a trial step, what others would send may be no token
        return best[1:] if group.is_silent else joined


class Rows:
    """Draws that ask for an argmax or a temperature, from the hidden states of a model."""

    def __init__(self, model: Model, vocabulary: WholeVocabulary) -> None:
        self._model, self._vocabulary = model, vocabulary

    def logits(self, hidden: Tensor) -> Tensor:
        """What this rank has of the logits of `hidden` [N, H], as its vocabulary gives it."""
        return self._vocabulary.logits(self._model, hidden)

    def draw(self, hidden: Tensor, *noise: Tensor) -> tuple[Tensor, Tensor]:
        """(token ids int32 [N], their logits float32 [N]), `noise` as for `WholeVocabulary.best`."""
        return self._vocabulary.best(self.logits(hidden), *noise)


class StepRows:
    """Whole rows of the logits of one step: each set of rows is gathered once. They must not be changed."""

    def __init__(self, vocabulary: WholeVocabulary, logits: Tensor) -> None:
        self._vocabulary, self._logits = vocabulary, logits
        self._found: dict[bytes, Tensor] = {}

    def at(self, rows: np.ndarray, index: Tensor) -> Tensor:
        """The rows `index` int64 [n] on the device, which are `rows` on the host, without padding."""
        key = rows.tobytes()
        if key not in self._found:
            every = len(rows) == len(self._logits)
            self._found[key] = self._vocabulary.whole(self._logits, None if every else index)
        return self._found[key]


def vocabulary_of(model: Model, ops: Ops) -> WholeVocabulary:
    """Divided where the model's only head is and its `logits` may be called for a part, else whole."""
    heads = [module for module in model.modules() if isinstance(module, Head)]
    defining = next(kind for kind in type(model).__mro__ if "logits" in vars(kind))
    if len(heads) != 1 or heads[0].group.size == 1 or not vars(defining).get("divides_logits", False):
        return WholeVocabulary(ops)
    (head,) = heads
    if (head.group.size - 1) * head.table.num_rows >= head.vocab_size:
        return WholeVocabulary(ops)  # a rank has no token
    return DividedVocabulary(ops, head)
