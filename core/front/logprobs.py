"""Log-probabilities as users read them: one mapping from token id to `Logprob` a position. Knows no tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

from ..interfaces.step import LogprobRows


@dataclass(slots=True)
class Logprob:
    """Log-probability of a token; `rank` is 1 for the most likely one."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition: TypeAlias = dict[int, Logprob]


@dataclass
class FlatLogprobs(Sequence[LogprobsOnePosition | None]):
    """A list of one mapping for each position, kept in six flat lists, so that long outputs create few objects.

    Position i owns entries start_indices[i] to end_indices[i]; a position without entries reads as None.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append_fast(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int | None],
        decoded_tokens: Sequence[str | None],
    ) -> None:
        """Adds one position from parallel sequences without creating a dict."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Adds one position; None for one without entries."""
        entries = value or {}
        self.append_fast(
            list(entries),
            [entry.logprob for entry in entries.values()],
            [entry.rank for entry in entries.values()],
            [entry.decoded_token for entry in entries.values()],
        )

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Adds positions; `values` may be this object itself."""
        for value in list(values):
            self.append(value)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs | None:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(len(self))[index]:
                span = slice(self.start_indices[position], self.end_indices[position])
                part.append_fast(self.token_ids[span], self.logprobs[span], self.ranks[span], self.decoded_tokens[span])
            return part
        start, end = self.start_indices[index], self.end_indices[index]
        if start == end:
            return None
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(start, end)
        }


SampleLogprobs: TypeAlias = list[LogprobsOnePosition] | FlatLogprobs
PromptLogprobs: TypeAlias = list[LogprobsOnePosition | None] | FlatLogprobs


def new_sample_logprobs(flat: bool) -> SampleLogprobs:
    """An empty container for the log-probabilities of an output."""
    return FlatLogprobs() if flat else []


def new_prompt_logprobs(flat: bool) -> PromptLogprobs:
    """A container for the log-probabilities of a prompt. Position 0 is None, as nothing precedes the first token."""
    if not flat:
        return [None]
    container = FlatLogprobs()
    container.append(None)
    return container


def append_rows(
    container: list[Any] | FlatLogprobs,
    rows: LogprobRows,
    decode: Callable[[int], str] | None,
    num_rows: int | None = None,
) -> float:
    """Adds the first `num_rows` positions; returns the sum of the log-probabilities of the tokens themselves."""
    total = 0.0
    ids, values, ranks = rows.token_ids.tolist(), rows.logprobs.tolist(), rows.ranks.tolist()
    for row in range(len(ids) if num_rows is None else num_rows):
        # column 0 is the token itself, then come the k best, which may hold it again
        token_ids, logprobs = ids[row], values[row]
        if -1 in token_ids:
            width = token_ids.index(-1)
            token_ids, logprobs = token_ids[:width], logprobs[:width]
        total += logprobs[0]
        again = token_ids.index(token_ids[0], 1) if token_ids.count(token_ids[0]) > 1 else 0
        entry_ranks = [ranks[row], *range(1, len(token_ids))]
        if again:
            for column in (token_ids, logprobs, entry_ranks):
                del column[again]
        texts = [decode(token) for token in token_ids] if decode else [None] * len(token_ids)
        if isinstance(container, FlatLogprobs):
            container.append_fast(token_ids, logprobs, entry_ranks, texts)
        else:
            container.append(
                {
                    token: Logprob(logprob, rank, text)
                    for token, logprob, rank, text in zip(token_ids, logprobs, entry_ranks, texts, strict=True)
                }
            )
    return total
