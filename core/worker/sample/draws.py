"""The draws of one step: the rows that they follow, their results on the device, and the copy to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...interfaces.step import LogprobRows, StepResult
from .shards import Part

NOT_FINITE = "the model produced logits that are not finite"
NO_CHOICE = (
    "no token is left: grammar, allowed_token_ids, bad_words, logit_bias, processors and min_tokens forbid them all"
)


@dataclass(frozen=True)
class Ahead:
    """For each of N draws, the drafts that stand between the slot's last known token and the token to be drawn.

    `token_ids` int32 [N, k] of which the first `counts[i]` (int64 [N]) count, the rest is -1.
    """

    token_ids: Tensor
    counts: Tensor

    def add_counts(self, seen: Tensor, rows: Tensor, part: Part) -> None:
        """Adds to seen[i, c] how often the id of the part's column c is among the drafts before draw rows[i].

        `seen` int32 [n, columns of the part].
        """
        drafts = part.columns(self.token_ids.index_select(0, rows))
        seen.scatter_add_(1, drafts.clamp(min=0).long(), (drafts >= 0).to(seen.dtype))

    def shift(self, tails: Tensor, rows: Tensor) -> Tensor:
        """The last W tokens before each of the draws `rows`, int32 [n, W]; `tails` are those before its drafts."""
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

    `slots` and `known` int32 [S]: each row's slot (-1 for padding rows) and known tokens. `places` int64 [S, k+1] are
    its draws, some other one where it has fewer; `drafts` int32 [S, k] its drafts, of which `limits` [S] may be kept.
    On the host, for the rows without padding: `num_draws`, and `alone`, whether a row must not be given drafts.
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


@dataclass(frozen=True)
class LogprobGroup:
    """Rows of a batch whose log-probabilities are computed together, `width` of the best tokens for each.

    On the host `rows` [n] and `counts` [n], how many each of them asked for; on the device `index`, the same rows, the
    last of them repeated where the platform pads rows.
    """

    index: Tensor
    rows: np.ndarray
    counts: np.ndarray
    width: int


@dataclass(frozen=True)
class LogprobTensors:
    """Log-probabilities of a group's rows: `ids` and `values` [n, width+1], `ranks` [n]."""

    group: LogprobGroup
    ids: Tensor
    values: Tensor
    ranks: Tensor


@dataclass(frozen=True)
class Sampled:
    """Row i drew `token_ids[i]` (int32 [N]), whose logit is `drawn[i]`; where that is not finite, the row must fail."""

    token_ids: Tensor
    drawn: Tensor
    logprobs: list[LogprobTensors] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that must reach the host, by name."""
        named = {"token_ids": self.token_ids, "drawn": self.drawn}
        for index, part in enumerate(self.logprobs):
            named |= {f"ids.{index}": part.ids, f"values.{index}": part.values, f"ranks.{index}": part.ranks}
        return named

    def fill(self, result: StepResult, arrays: Mapping[str, np.ndarray], samples: np.ndarray) -> None:
        """Puts the host's copy of `tensors()` into a result; `samples` bool [B] are the plan's rows that sample."""
        count = np.count_nonzero(samples)  # the rows after them are padding
        result.token_ids[samples, 0] = arrays["token_ids"][:count]
        drawn = arrays["drawn"][:count]
        finite = np.isfinite(drawn)
        if self.logprobs or np.count_nonzero(finite) < len(finite):
            rows = np.flatnonzero(samples)
            result.logprobs = self._logprob_rows(arrays, rows, np.arange(len(rows)), np.ones(len(rows), np.int64))
            _fail_unsound(result, drawn, rows)

    def _logprob_rows(
        self, arrays: Mapping[str, np.ndarray], rows: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> dict[int, LogprobRows]:
        """Log-probabilities by row of the plan: row `rows[i]` has `counts[i]` draws, from draw `starts[i]` on."""
        found = {}
        for index, part in enumerate(self.logprobs):
            ids, values, ranks = (arrays[f"{name}.{index}"] for name in ("ids", "values", "ranks"))
            group = part.group
            firsts = np.searchsorted(group.rows, starts).clip(max=len(group.rows) - 1)
            for row in np.flatnonzero(group.rows[firsts] == starts).tolist():
                first = int(firsts[row])
                places, width = slice(first, first + int(counts[row])), int(group.counts[first]) + 1
                found[int(rows[row])] = LogprobRows(
                    token_ids=ids[places, :width], logprobs=values[places, :width], ranks=ranks[places]
                )
        return found


@dataclass(frozen=True)
class PlainSampled:
    """What a captured draw gave the first `num_rows` rows.

    `packed` int32 [2, padded rows] are tokens and the bits of their logits; the next draw writes to the same memory.
    """

    packed: Tensor
    num_rows: int

    def tensors(self) -> dict[str, Tensor]:
        """Everything that must reach the host, by name."""
        return {"packed": self.packed}

    def fill(self, result: StepResult, arrays: Mapping[str, np.ndarray], samples: np.ndarray) -> None:
        """Puts the host's copy of `tensors()` into a result; every row of the plan samples."""
        packed = arrays["packed"][:, : self.num_rows]
        result.token_ids = packed[0][:, None]
        drawn = packed[1].view(np.float32)
        if np.count_nonzero(np.isfinite(drawn)) < len(drawn):
            _fail_unsound(result, drawn, np.flatnonzero(samples))


@dataclass(frozen=True, kw_only=True)
class VerifiedTokens(Sampled):
    """Several tokens a row: `token_ids` and `drawn` [S, k+1], the first `counts[i]` (int32 [S]) being row i's.

    Of row i, whose slot has `known[i]` tokens now, `num_drafts[i]` drafts were checked and `num_next_drafts[i]` were
    proposed. On the host, for the rows that sample: how many draws each had, and whether it must not be given drafts
    (`alone`). The tensors may end with padding rows.
    """

    counts: Tensor
    known: Tensor
    num_drafts: Tensor
    num_next_drafts: Tensor | None = None
    num_draws: np.ndarray
    alone: np.ndarray

    def tensors(self) -> dict[str, Tensor]:
        if self.num_next_drafts is None:
            raise RuntimeError("drafts must be proposed before the step is answered")
        counts = {"counts": self.counts, "num_drafts": self.num_drafts, "num_next_drafts": self.num_next_drafts}
        return super().tensors() | counts

    def fill(self, result: StepResult, arrays: Mapping[str, np.ndarray], samples: np.ndarray) -> None:
        rows, batch = np.flatnonzero(samples), len(result.num_tokens)
        token_ids, counts, drawn = (arrays[name][: len(rows)] for name in ("token_ids", "counts", "drawn"))
        result.token_ids = np.full((batch, token_ids.shape[1]), -1, np.int32)
        result.token_ids[rows] = token_ids
        result.num_tokens[rows] = counts
        result.num_drafts, result.num_next_drafts = np.zeros((2, batch), np.int32)
        result.num_drafts[rows] = arrays["num_drafts"][: len(rows)]
        result.num_next_drafts[rows] = np.where(self.alone, 0, arrays["num_next_drafts"][: len(rows)])
        result.logprobs = self._logprob_rows(arrays, rows, np.cumsum(self.num_draws) - self.num_draws, counts)
        kept = np.where(np.arange(drawn.shape[1]) < counts[:, None], drawn, 0)
        _fail_unsound(result, kept.min(-1) + kept.max(-1), rows)  # NaN or infinite where a kept logit of the row is


def _fail_unsound(result: StepResult, drawn: np.ndarray, rows: np.ndarray) -> None:
    """Fails each of `rows` [N] whose drawn logit [N] is not finite."""
    for index in np.flatnonzero(~np.isfinite(drawn)).tolist():
        result.failed[int(rows[index])] = NO_CHOICE if np.isneginf(drawn[index]) else NOT_FINITE
