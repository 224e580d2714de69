"""Rules on single tokens: logit bias, allowed ids, stop ids before min_tokens, bad words. Knows no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...interfaces.step import NewRequest
from ..device import Device
from .draws import Ahead, newest
from .need import Need
from .shards import Part

_FOREVER = np.iinfo(np.int64).max
#: Fills a tail where the request has no token yet; equals no entry of a pattern.
_NO_TOKEN = -2


@dataclass(frozen=True)
class _SlotRules:
    """One slot's rules: a bias of `values` on `token_ids` below the length `until`, `allowed` ids, and bad `words`.

    `allowed` is empty where the request names none; `words` are bad words of several tokens.
    """

    token_ids: np.ndarray
    values: np.ndarray
    until: np.ndarray
    allowed: np.ndarray
    words: list[list[int]]


@dataclass(frozen=True)
class BatchRules:
    """The rules of one batch composition on the device; None where no row has such a rule.

    `biases` are (rows, columns, values, lengths from which they end), `allowed` (rows, rows and columns of entries),
    `words` (rows, slots, patterns, columns forbidden after them), `tails` (rows, slots) that keep their newest tokens.
    """

    biases: tuple[Tensor, ...] | None
    allowed: tuple[Tensor, ...] | None
    words: tuple[Tensor, ...] | None
    tails: tuple[Tensor, ...] | None


class TokenRules:
    """Rules by slot, on the ids of `part`, of which the logits are that they change.

    The newest output tokens of slots with multi-token bad words are kept on the device.
    """

    def __init__(self, device: Device, max_slots: int, part: Part) -> None:
        self._part = part
        self._device = device
        self._rules: dict[int, _SlotRules] = {}
        self._tails = torch.full((max_slots, 0), _NO_TOKEN, dtype=torch.int32, device=device.device)
        self._pending: dict[int, np.ndarray] = {}

    def add(self, request: NewRequest) -> Need:
        """Takes a request's rules; says what its rows need.

        Raises `ValueError` when a rule names an id outside the vocabulary.
        """
        slot, params = request.slot, request.params
        self.remove(slot)
        bans, words = self._bans(request)
        biases = params.logit_bias or {}
        token_ids = np.array([*biases, *(token for token, _ in bans)], np.int64)
        allowed = np.array(sorted(set(params.allowed_token_ids or ())), np.int64)
        self._check(request.request_id, token_ids, allowed, *(np.array(word, np.int64) for word in words))
        if not (len(token_ids) or words or len(allowed)):
            return Need(0)
        self._rules[slot] = _SlotRules(
            token_ids=token_ids,
            values=np.array([*biases.values(), *[-np.inf] * len(bans)], np.float32),
            until=np.array([_FOREVER] * len(biases) + [until for _, until in bans], np.int64),
            allowed=allowed,
            words=words,
        )
        if words:
            self._widen(max(len(word) - 1 for word in words))
            self._pending[slot] = request.token_ids[request.prompt_len :]
        return Need.RULES

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
        slots = self._device.stage_padded("rows", np.array(list(self._pending), np.int64))
        self._tails[slots] = self._device.stage_padded("rows", tails, axis=0)
        self._pending.clear()

    def batch(self, slots: np.ndarray) -> BatchRules:
        """The rules of the batch whose rows are `slots` int32 [N]."""
        rows = [(row, slot, self._rules[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._rules]
        biased = [(row, rules) for row, _, rules in rows if len(rules.token_ids)]
        allowing = [(row, rules.allowed) for row, _, rules in rows if len(rules.allowed)]
        words = [(row, slot, word) for row, slot, rules in rows for word in rules.words if self._has(word[-1])]
        tails = [(row, slot) for row, slot, rules in rows if rules.words]
        return BatchRules(
            biases=self._biases(biased) if biased else None,
            allowed=self._allowed(allowing) if allowing else None,
            words=self._words(words) if words else None,
            tails=tuple(self._device.stage_padded("rows", np.array(tails, np.int64).T)) if tails else None,
        )

    def apply(self, logits: Tensor, lengths: Tensor, batch: BatchRules, ahead: Ahead | None = None) -> None:
        """Applies the batch's rules to `logits`; `lengths` [N] are the positions of the tokens to be drawn.

        Drafts `ahead` of a row stand between its tail and that position.
        """
        ops = self._device.ops
        if batch.allowed is not None:
            ops.keep_only(logits, *batch.allowed)
        if batch.biases is not None:
            rows, columns, values, until = batch.biases
            active = torch.where(lengths.index_select(0, rows) < until, values, 0.0)
            ops.add_bias(logits, rows, columns, active)
        if batch.words is not None:
            rows, slots, patterns, last = batch.words
            tails = self._tails.index_select(0, slots)
            if ahead is not None:
                tails = ahead.shift(tails, rows)
            matches = ops.match_tails(tails, patterns)
            ops.add_bias(logits, rows, last, torch.where(matches, -torch.inf, 0.0))

    def extend(self, token_ids: Tensor, batch: BatchRules) -> None:
        """Appends the tokens int32 [N] just drawn to the tails of the rows that keep one."""
        if batch.tails is not None:
            rows, slots = batch.tails
            older = self._tails.index_select(0, slots)[:, 1:]
            self._tails[slots] = torch.cat([older, token_ids.index_select(0, rows)[:, None]], -1)

    def extend_several(self, token_ids: Tensor, counts: Tensor, slots: np.ndarray) -> None:
        """Appends the first `counts[i]` of `token_ids[i]` (int32 [S, n]) to the tails of slots [S] that keep one."""
        found = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._rules]
        chosen = [(row, slot) for row, slot in found if self._rules[slot].words]
        if chosen:
            rows, tail_slots = self._device.stage_padded("rows", np.array(chosen, np.int64).T)
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
            wrong = token_ids[(token_ids < 0) | (token_ids >= self._part.vocab_size)]
            if len(wrong):
                raise ValueError(
                    f"request {request_id}: token id {wrong[0]} is outside the vocabulary of {self._part.vocab_size}"
                )

    def _widen(self, width: int) -> None:
        missing = self._device.shapes.pad("tokens", width) - self._tails.shape[1]
        if missing > 0:
            older = self._tails.new_full((len(self._tails), missing), _NO_TOKEN)
            self._tails = torch.cat([older, self._tails], -1)

    # padding repeats the last entry, which changes nothing; a repeated bias has the value 0

    def _biases(self, biased: Sequence[tuple[int, _SlotRules]]) -> tuple[Tensor, ...] | None:
        stage, part = self._device.stage_padded, self._part
        rows = np.repeat([row for row, _ in biased], [len(rules.token_ids) for _, rules in biased])
        token_ids = np.concatenate([rules.token_ids for _, rules in biased])
        kept = part.has(token_ids)
        if not kept.any():
            return None
        return (
            stage("values", rows[kept]),
            stage("values", token_ids[kept] - part.start),
            stage("values", np.concatenate([rules.values for _, rules in biased])[kept], 0),
            stage("values", np.concatenate([rules.until for _, rules in biased])[kept]),
        )

    def _allowed(self, allowing: Sequence[tuple[int, np.ndarray]]) -> tuple[Tensor, ...]:
        rows = np.array([row for row, _ in allowing], np.int64)
        owners = np.repeat(rows, [len(ids) for _, ids in allowing])
        token_ids = np.concatenate([ids for _, ids in allowing])
        kept = self._part.has(token_ids)
        entries = np.stack((owners[kept], token_ids[kept] - self._part.start))
        return self._device.stage_padded("rows", rows), *self._device.stage_padded("values", entries)

    def _words(self, words: Sequence[tuple[int, int, list[int]]]) -> tuple[Tensor, ...]:
        width, stage = self._tails.shape[1], self._device.stage_padded
        patterns = np.array([[-1] * (width + 1 - len(word)) + word[:-1] for _, _, word in words], np.int32)
        numbers = np.array([(row, slot, word[-1] - self._part.start) for row, slot, word in words], np.int64)
        rows, slots, last = stage("values", numbers.T)
        return rows, slots, stage("values", patterns, axis=0), last

    def _has(self, token_id: int) -> bool:
        return 0 <= token_id - self._part.start < self._part.size
