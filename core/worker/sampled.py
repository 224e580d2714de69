"""What one draw produced, on the device, and its log-probabilities once they are on the host. Knows no request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..interfaces.step import LogprobRows


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

    def logprob_rows(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[int, LogprobRows]:
        """The log-probabilities by row of the plan, from the host's copy of `tensors()`.

        `rows` [N] are the plan's rows that were sampled.
        """
        found = {}
        for index, part in enumerate(self.logprobs):
            ids, values, ranks = (arrays[f"{name}.{index}"] for name in ("ids", "values", "ranks"))
            for place, (row, count) in enumerate(zip(part.rows.tolist(), part.counts.tolist(), strict=True)):
                found[int(rows[row])] = LogprobRows(
                    token_ids=ids[place : place + 1, : count + 1],
                    logprobs=values[place : place + 1, : count + 1],
                    ranks=ranks[place : place + 1],
                )
        return found
