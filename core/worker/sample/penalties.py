"""Which tokens penalised requests have seen: counts on the device, kept for them alone. Knows no penalty formula."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...interfaces.platform import Streams
from ...interfaces.step import NewRequest
from ...ops import Ops
from .draws import Ahead


class Penalties:
    """Token counts and penalty factors by slot.

    Memory is V · 5 bytes for each penalised request at once: nothing before the first one, doubled when full.
    """

    def __init__(self, max_slots: int, vocab_size: int, *, ops: Ops, streams: Streams, device: torch.device) -> None:
        self._ops = ops
        self._streams = streams
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._row = np.full(max_slots, -1, np.int64)
        self._factors = np.zeros((3, max_slots), np.float32)
        self._free: list[int] = []
        self._pending: dict[int, NewRequest] = {}
        self._batch: tuple[object, tuple[Tensor, Tensor, list[Tensor | None]]] | None = None

    def add(self, request: NewRequest) -> bool:
        """Takes a request if its parameters penalise anything; says whether they do.

        Tokens past the prompt are output: a resumed request goes on where it stopped.
        """
        params, slot = request.params, request.slot
        self.remove(slot)
        if params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0:
            return False
        if not self._free:
            self._grow()
        self._row[slot] = self._free.pop()
        self._factors[:, slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._pending[slot] = request
        return True

    def remove(self, slot: int) -> None:
        """Frees the slot's counts, if it has any."""
        if self._row[slot] >= 0:
            self._free.append(int(self._row[slot]))
            self._row[slot] = -1
            self._pending.pop(slot, None)

    def apply_staged_writes(self) -> None:
        """Counts the tokens of the requests added since the last call."""
        if not self._pending:
            return
        prompts = [request.token_ids[: request.prompt_len] for request in self._pending.values()]
        outputs = [request.token_ids[request.prompt_len :] for request in self._pending.values()]
        rows = self._row[list(self._pending)]
        staged = self._streams.stage(rows)
        self._in_prompt.index_fill_(0, staged, False)
        self._counts.index_fill_(0, staged, 0)
        self._in_prompt[self._spread(rows, prompts), self._join(prompts)] = True
        if any(len(output) for output in outputs):
            self._ops.count_tokens(self._counts, self._spread(rows, outputs), self._join(outputs))
        self._pending.clear()

    def apply(
        self, logits: Tensor, slots: np.ndarray, penalized: np.ndarray, key: object, ahead: Ahead | None = None
    ) -> None:
        """Penalises the rows of `logits` where `penalized` bool [N]; `key` stands for this batch composition.

        Drafts `ahead` of a row count as output for it alone.
        """
        rows, counts, factors = self._of(slots, penalized, key)
        seen = self._counts.index_select(0, counts)
        if ahead is not None:
            ahead.add_counts(seen, rows)
        self._ops.penalize(logits, rows, self._in_prompt.index_select(0, counts), seen, *factors)

    def count(self, token_ids: Tensor, slots: np.ndarray, penalized: np.ndarray, key: object) -> None:
        """Counts the tokens int32 [N] just drawn for the penalised rows."""
        rows, counts, _ = self._of(slots, penalized, key)
        self._ops.count_tokens(self._counts, counts, token_ids.index_select(0, rows))

    def count_several(self, token_ids: Tensor, slots: np.ndarray) -> None:
        """Counts the tokens int32 [S, n] that slots [S] got, but those that are -1."""
        chosen = np.flatnonzero(self._row[slots] >= 0)
        if not len(chosen):
            return
        rows, counts = self._streams.stage(np.stack((chosen, self._row[slots[chosen]])))
        tokens = token_ids.index_select(0, rows)
        amounts = (tokens >= 0).to(self._counts.dtype)
        self._counts.index_put_((counts[:, None], tokens.clamp(min=0).long()), amounts, accumulate=True)

    def _of(self, slots: np.ndarray, penalized: np.ndarray, key: object) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """(rows of the batch, their rows of the counts, their factors or None where all are neutral)."""
        if self._batch is None or self._batch[0] != key:
            rows = np.flatnonzero(penalized)
            chosen = slots[rows]
            stage = self._streams.stage
            factors = [
                stage(values) if (values != neutral).any() else None
                for values, neutral in zip(self._factors[:, chosen], (1, 0, 0), strict=True)
            ]
            self._batch = key, (stage(rows), stage(self._row[chosen]), factors)
        return self._batch[1]

    def _spread(self, rows: np.ndarray, tokens: list[np.ndarray]) -> Tensor:
        return self._streams.stage(np.repeat(rows, [len(part) for part in tokens]))

    def _join(self, tokens: list[np.ndarray]) -> Tensor:
        return self._streams.stage(np.concatenate(tokens).astype(np.int64))

    def _grow(self) -> None:
        old = len(self._counts)
        more = max(1, old)
        self._free.extend(range(old, old + more))
        for name in ("_in_prompt", "_counts"):
            table = getattr(self, name)
            setattr(self, name, torch.cat([table, table.new_zeros((more, table.shape[1]))]))
