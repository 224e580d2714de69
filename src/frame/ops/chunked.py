"""Scans of prompts in chunks: products of matrices inside a chunk, the state between chunks.

The same results as the recurrences in `Ops` up to rounding, in fewer and larger operations. Chunks begin anew with
every row, so that they hold tokens of one request. What shapes depend on is known on the host; nothing is read back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frame.core.ops.states import Places, ScanWeights, StateRows, unit_heads


class Chunks:
    """The tokens of a step in chunks of up to `size`: N of them, where each row has as many as it needs at most.

    Row i has the chunks from `first`[i] on: query_start[i] // size + i, which leaves room for all before it.
    """

    def __init__(self, rows: StateRows, num_tokens: int, size: int) -> None:
        starts, lengths = rows.query_start[:-1], rows.query_start.diff()
        num_rows, device = len(lengths), starts.device
        self.first = starts // size + torch.arange(num_rows, device=device)
        number = torch.arange(num_tokens // size + num_rows, device=device)
        row = torch.searchsorted(self.first, number, right=True) - 1
        done = (number - self.first[row]) * size
        self.places = Places(starts[row] + done, (lengths[row] - done).clamp(0, size), size, num_tokens)
        self.rounds = -(-rows.max_query_len // size)
        self.has = [lengths > index * size for index in range(self.rounds)]

    def of_round(self, index: int) -> Tensor:
        """int64 [B]: chunk number `index` of each row, or its first one where it has fewer."""
        return torch.where(self.has[index], self.first + index, self.first).long()


def chunk_size(rows: StateRows, most: int) -> int:
    """A power of two, no more than `most`, that is not much longer than the longest row."""
    return min(most, 1 << (rows.max_query_len - 1).bit_length())


def ssd_scan_chunked(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: ScanWeights, state: Tensor, rows: StateRows,
    size: int = 64,
) -> Tensor:  # fmt: skip
    """`Ops.ssd_scan`: inside a chunk y = (C Bᵀ ∘ decays) Δx (Dao & Gu 2024, section 6)."""
    chunks = Chunks(rows, len(x), chunk_size(rows, size))
    places, share = chunks.places, x.shape[1] // b.shape[1]
    values = places.gather(x).transpose(1, 2)  # [N, H, C, P]
    steps = places.gather(weights.steps(dt)).transpose(1, 2)  # [N, H, C]
    b, c = (places.gather(one).transpose(1, 2).repeat_interleave(share, 1) for one in (b, c))  # [N, H, C, S]
    logs = (steps * weights.decay[:, None]).cumsum(-1)
    moved = steps[..., None] * values
    out = ((c @ b.transpose(-1, -2)) * _between(logs)) @ moved
    last = logs[..., -1:]
    added = (moved * (last - logs).exp()[..., None]).transpose(-1, -2) @ b  # [N, H, P, S]
    fade, read = last[..., None].exp(), c * logs.exp()[..., None]
    kept = rows.initial(state)
    for index in range(chunks.rounds):
        at, has = chunks.of_round(index), chunks.has[index][:, None, None, None]
        out.index_add_(0, at, (read[at] @ kept.transpose(-1, -2)) * has)
        kept = torch.where(has, kept * fade[at] + added[at], kept)
    rows.keep(state, kept)
    out = out if weights.skip is None else out + values * weights.skip[:, None, None]
    return places.scatter(out.transpose(1, 2), x.dtype)


def gated_delta_chunked(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, rows: StateRows,
    size: int = 64,
) -> Tensor:  # fmt: skip
    """`Ops.gated_delta`: a chunk's changes solve one triangular system (Yang et al. 2024, section 3).

    With a decay for each feature of the key, decays are taken between all pairs of a chunk's tokens, which is of 16.
    """
    by_feature = decay.dim() == 3
    chunks = Chunks(rows, len(value), chunk_size(rows, 16 if by_feature else size))
    places, share = chunks.places, value.shape[1] // key.shape[1]
    query, key = (unit_heads(places.gather(one)).transpose(1, 2).repeat_interleave(share, 1) for one in (query, key))
    query = query * query.shape[-1] ** -0.5  # [N, H, C, K]
    values, beta = places.gather(value).transpose(1, 2), places.gather(beta).transpose(1, 2)[..., None]
    logs = places.gather(decay if by_feature else decay[..., None]).transpose(1, 2).cumsum(2)  # [N, H, C, K or 1]
    if by_feature:
        scores, reads = (_by_feature(one, key, logs) for one in (key, query))
    else:
        between = _between(logs[..., 0])
        scores, reads = ((one @ key.transpose(-1, -2)) * between for one in (key, query))
    system = torch.eye(scores.shape[-1], device=scores.device) + (beta * scores).tril(-1)
    both = torch.cat((values * beta, key * logs.exp() * beta), -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    change, seen = solved.split((values.shape[-1], key.shape[-1]), -1)
    last = logs[:, :, -1:]
    read, written, fade = query * logs.exp(), (key * (last - logs).exp()).transpose(-1, -2), last.exp().transpose(2, 3)
    kept, out = rows.initial(state), torch.zeros_like(values)
    for index in range(chunks.rounds):
        at, has = chunks.of_round(index), chunks.has[index][:, None, None, None]
        new = change[at] - seen[at] @ kept
        out.index_add_(0, at, (read[at] @ kept + reads[at] @ new) * has)
        kept = torch.where(has, kept * fade[at] + written[at] @ new, kept)
    rows.keep(state, kept)
    return places.scatter(out.transpose(1, 2), value.dtype)


def _between(logs: Tensor) -> Tensor:
    """exp(logs[i] - logs[j]) for j <= i, else 0: [..., C] → [..., C, C]."""
    ahead = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).triu(1)
    between: Tensor = (logs[..., :, None] - logs[..., None, :]).masked_fill(ahead, -torch.inf).exp()
    return between


def _by_feature(one: Tensor, key: Tensor, logs: Tensor) -> Tensor:
    """Σ_k one[i, k] key[j, k] exp(logs[i, k] - logs[j, k]) for j <= i, else 0; all [..., C, K] → [..., C, C]."""
    between = (logs[..., :, None, :] - logs[..., None, :, :]).clamp(max=0).exp()
    scores: Tensor = (one[..., :, None, :] * key[..., None, :, :] * between).sum(-1)
    return scores.tril()
