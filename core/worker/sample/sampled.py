"""What one draw produced, on the device, and its log-probabilities once they are on the host. Knows no request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ...interfaces.step import LogprobRows, StepResult

NOT_FINITE = "the model produced logits that are not finite"
NO_CHOICE = (
    "no token is left: grammar, allowed_token_ids, bad_words, logit_bias, processors and min_tokens forbid them all"
)


@dataclass(frozen=True)
class LogprobTensors:
    """Log-probabilities of n positions: `ids` and `values` [n, width+1], `ranks` [n].

    On the host: `rows` [n], the row of the batch that each belongs to, and `counts` [n], its own k.
    """

    rows: np.ndarray
    counts: np.ndarray
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
        count = np.count_nonzero(samples)  # rows behind them fill up
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
        """By row of the plan: those of the first `counts[i]` draws from `starts[i]` on, for row `rows[i]`."""
        found = {}
        for index, part in enumerate(self.logprobs):
            ids, values, ranks = (arrays[f"{name}.{index}"] for name in ("ids", "values", "ranks"))
            firsts = np.searchsorted(part.rows, starts).clip(max=len(part.rows) - 1)
            for row in np.flatnonzero(part.rows[firsts] == starts).tolist():
                first = int(firsts[row])
                places, width = slice(first, first + int(counts[row])), int(part.counts[first]) + 1
                found[int(rows[row])] = LogprobRows(
                    token_ids=ids[places, :width], logprobs=values[places, :width], ranks=ranks[places]
                )
        return found


@dataclass(frozen=True)
class PlainSampled:
    """What a recorded draw gave the first `num_rows` rows.

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
    proposed; on the host, its first draw is one of `num_draws[i]`, and `alone[i]` says that drafts are of no use to it.
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
        rows = np.flatnonzero(samples)
        counts, batch = arrays["counts"], len(result.num_tokens)
        result.token_ids = np.full((batch, arrays["token_ids"].shape[1]), -1, np.int32)
        result.token_ids[rows] = arrays["token_ids"]
        result.num_tokens[rows] = counts
        result.num_drafts, result.num_next_drafts = np.zeros((2, batch), np.int32)
        result.num_drafts[rows] = arrays["num_drafts"]
        result.num_next_drafts[rows] = np.where(self.alone, 0, arrays["num_next_drafts"])
        result.logprobs = self._logprob_rows(arrays, rows, np.cumsum(self.num_draws) - self.num_draws, counts)
        drawn = arrays["drawn"]
        kept = np.arange(drawn.shape[1]) < counts[:, None]
        # the worst that a row keeps: NaN, else whether something is infinite
        _fail_unsound(result, np.where(kept, drawn, 0).min(-1) + np.where(kept, drawn, 0).max(-1), rows)


def _fail_unsound(result: StepResult, drawn: np.ndarray, rows: np.ndarray) -> None:
    """Fails each of `rows` [N] whose drawn logit [N] is not finite."""
    for index in np.flatnonzero(~np.isfinite(drawn)).tolist():
        result.failed[int(rows[index])] = NO_CHOICE if np.isneginf(drawn[index]) else NOT_FINITE
