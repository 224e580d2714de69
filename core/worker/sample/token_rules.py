"""Rules on single tokens: logit bias, allowed ids, stop ids before min_tokens, bad words. Knows no sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...interfaces.platform import Streams
from ...interfaces.step import NewRequest
from ...ops import Ops
from .draws import Ahead, newest
from .sampling_slots import Need

_FOREVER = np.iinfo(np.int64).max
#: In a tail: no token there yet, equal to no pattern.
_NO_TOKEN = -2


@dataclass(frozen=True)
class _SlotRules:
    """One slot's rules: a bias of `values` on `token_ids` while the length is below `until`, then `allowed` ids,

    then the multi-token bad words: `last_ids` forbidden after `patterns` [E, width].
    """

    token_ids: np.ndarray
    values: np.ndarray
    until: np.ndarray
    allowed: np.ndarray | None
    words: list[list[int]]


@dataclass(frozen=True)
class _BatchRules:
    """The rules of one batch composition on the device; an empty part is None."""

    biases: tuple[Tensor, Tensor, Tensor, Tensor] | None
    allowed: tuple[Tensor, Tensor, Tensor] | None
    words: tuple[Tensor, Tensor, Tensor, Tensor] | None
    tail_rows: Tensor | None
    tail_slots: Tensor | None


class TokenRules:
    """Rules by slot. The newest output tokens of slots with multi-token bad words are kept on the device."""

    def __init__(self, max_slots: int, vocab_size: int, *, ops: Ops, streams: Streams, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._ops = ops
        self._streams = streams
        self._rules: dict[int, _SlotRules] = {}
        self._tails = torch.full((max_slots, 0), _NO_TOKEN, dtype=torch.int32, device=device)
        self._pending: dict[int, np.ndarray] = {}
        self._batch: tuple[object, _BatchRules] | None = None

    def add(self, request: NewRequest) -> Need:
        """Takes a request's rules; says what its rows need.

        Raises `ValueError` when a rule names an id outside the vocabulary.
        """
        slot, params = request.slot, request.params
        self.remove(slot)
        bans, words = self._bans(request)
        biases = params.logit_bias or {}
        token_ids = np.array([*biases, *(token for token, _ in bans)], np.int64)
        allowed = np.unique(np.array(params.allowed_token_ids or (), np.int64))
        self._check(request.request_id, token_ids, allowed, *(np.array(word, np.int64) for word in words))
        if not (len(token_ids) or words or len(allowed)):
            return Need(0)
        self._rules[slot] = _SlotRules(
            token_ids=token_ids,
            values=np.array([*biases.values(), *[-np.inf] * len(bans)], np.float32),
            until=np.array([_FOREVER] * len(biases) + [until for _, until in bans], np.int64),
            allowed=allowed if len(allowed) else None,
            words=words,
        )
        if not words:
            return Need.RULES
        self._widen(max(len(word) - 1 for word in words))
        self._pending[slot] = request.token_ids[request.prompt_len :]
        return Need.RULES | Need.TAILS

    def remove(self, slot: int) -> None:
        """Forgets the slot's rules, if it has any."""
        self._rules.pop(slot, None)
        self._pending.pop(slot, None)

    def apply_staged_writes(self) -> None:
        """Sets the tails of the requests added since the last call."""
        if not self._pending:
            return
        width = self._tails.shape[1]
        tails = np.full((len(self._pending), width), _NO_TOKEN, np.int32)
        for row, output in zip(tails, self._pending.values(), strict=True):
            newest = output[-width:]
            row[width - len(newest) :] = newest
        slots = self._streams.stage(np.array(list(self._pending), np.int64))
        self._tails[slots] = self._streams.stage(tails)
        self._pending.clear()

    def apply(
        self, logits: Tensor, lengths: Tensor, slots: np.ndarray, key: object, ahead: Ahead | None = None
    ) -> None:
        """Applies the rules of rows `slots` to `logits`; `lengths` [N] are the positions of the tokens to be drawn.

        Drafts `ahead` of a row stand between its tail and that position.
        """
        batch = self._of(slots, key)
        if batch.allowed is not None:
            self._ops.keep_only(logits, *batch.allowed)
        if batch.biases is not None:
            rows, token_ids, values, until = batch.biases
            active = torch.where(lengths.index_select(0, rows) < until, values, 0.0)
            self._ops.add_bias(logits, rows, token_ids, active)
        if batch.words is not None:
            rows, word_slots, patterns, last_ids = batch.words
            tails = self._tails.index_select(0, word_slots)
            if ahead is not None:
                tails = ahead.shift(tails, rows)
            matches = self._ops.match_tails(tails, patterns)
            self._ops.add_bias(logits, rows, last_ids, torch.where(matches, -torch.inf, 0.0))

    def extend(self, token_ids: Tensor, slots: np.ndarray, key: object) -> None:
        """Appends the tokens int32 [N] just drawn to the tails of the rows that keep one."""
        batch = self._of(slots, key)
        if batch.tail_rows is not None and batch.tail_slots is not None:
            older = self._tails.index_select(0, batch.tail_slots)[:, 1:]
            newest = token_ids.index_select(0, batch.tail_rows)[:, None]
            self._tails[batch.tail_slots] = torch.cat([older, newest], -1)

    def extend_several(self, token_ids: Tensor, counts: Tensor, slots: np.ndarray) -> None:
        """Appends the first `counts[i]` of `token_ids[i]` (int32 [S, n]) to the tails of slots [S] that keep one."""
        found = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._rules]
        chosen = [(row, slot) for row, slot in found if self._rules[slot].words]
        if chosen:
            rows, tail_slots = self._streams.stage(np.array(chosen, np.int64).T)
            tokens, added = token_ids.index_select(0, rows), counts.index_select(0, rows)
            self._tails[tail_slots] = newest(self._tails.index_select(0, tail_slots), tokens, added.long())

    def _bans(self, request: NewRequest) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """([(forbidden id, length from which it is free)], bad words of several tokens)."""
        params = request.params
        bans = []
        if params.min_tokens > 0:
            until = request.prompt_len + params.min_tokens
            bans = [(token, until) for token in {*request.eos_token_ids, *(params.stop_token_ids or ())}]
        words = [word for word in params.bad_words_token_ids or () if word]
        bans += [(word[0], _FOREVER) for word in words if len(word) == 1]
        return bans, [word for word in words if len(word) > 1]

    def _check(self, request_id: str, *lists: np.ndarray) -> None:
        for token_ids in lists:
            wrong = token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)]
            if len(wrong):
                raise ValueError(
                    f"request {request_id}: token id {wrong[0]} is outside the vocabulary of {self._vocab_size}"
                )

    def _widen(self, width: int) -> None:
        missing = width - self._tails.shape[1]
        if missing > 0:
            older = self._tails.new_full((len(self._tails), missing), _NO_TOKEN)
            self._tails = torch.cat([older, self._tails], -1)
            self._batch = None

    def _of(self, slots: np.ndarray, key: object) -> _BatchRules:
        if self._batch is None or self._batch[0] != key:
            members = [(row, slot, self._rules[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._rules]
            self._batch = key, self._build(members)
        return self._batch[1]

    def _build(self, members: list[tuple[int, int, _SlotRules]]) -> _BatchRules:
        stage = self._streams.stage
        biased = [(row, rules) for row, _, rules in members if len(rules.token_ids)]
        allowing = [(row, rules.allowed) for row, _, rules in members if rules.allowed is not None]
        wording = [(row, slot, word) for row, slot, rules in members for word in rules.words]
        tails = [(row, slot) for row, slot, rules in members if rules.words]
        width = self._tails.shape[1]
        return _BatchRules(
            biases=(
                stage(np.repeat([row for row, _ in biased], [len(rules.token_ids) for _, rules in biased])),
                stage(np.concatenate([rules.token_ids for _, rules in biased])),
                stage(np.concatenate([rules.values for _, rules in biased])),
                stage(np.concatenate([rules.until for _, rules in biased])),
            )
            if biased
            else None,
            allowed=(
                stage(np.array([row for row, _ in allowing], np.int64)),
                stage(np.repeat([row for row, _ in allowing], [len(ids) for _, ids in allowing])),
                stage(np.concatenate([ids for _, ids in allowing])),
            )
            if allowing
            else None,
            words=(
                stage(np.array([row for row, _, _ in wording], np.int64)),
                stage(np.array([slot for _, slot, _ in wording], np.int64)),
                stage(np.array([[-1] * (width + 1 - len(word)) + word[:-1] for _, _, word in wording], np.int32)),
                stage(np.array([word[-1] for _, _, word in wording], np.int64)),
            )
            if wording
            else None,
            tail_rows=stage(np.array([row for row, _ in tails], np.int64)) if tails else None,
            tail_slots=stage(np.array([slot for _, slot in tails], np.int64)) if tails else None,
        )
