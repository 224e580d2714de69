"""What layers compute that keep a running state of each request: a short convolution, and three recurrences.

`state` is a view of all state blocks of a layer, which an op reads for the rows of a step and writes in place. All
sums are taken in float32. Tokens of the rows lie one after the other, as everywhere; none sees another row's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

#: Added to the sum of squares of queries and keys before the delta rule divides by its root.
UNIT_EPS = 1e-6


@dataclass(frozen=True)
class StateRows:
    """The B rows of a step, T tokens: row i owns tokens query_start[i] .. query_start[i + 1], int32 [B + 1].

    `blocks` int32 [B] are the rows' state blocks, 0 for padding rows, which have no tokens; block 0 stays as it is.
    `begins` bool [B]: the row has no state yet, whatever its block holds. No row has more than `max_query_len` tokens.
    """

    query_start: Tensor
    blocks: Tensor
    begins: Tensor
    max_query_len: int

    def initial(self, state: Tensor) -> Tensor:
        """The rows' states [B, ...], zeros for those that begin."""
        kept = state.index_select(0, self.blocks).float()
        return kept.masked_fill(self.begins.view(-1, *(1 for _ in kept.shape[1:])), 0)

    def keep(self, state: Tensor, new: Tensor) -> None:
        """Writes the rows' states [B, ...]; those of padding rows must be zeros, which block 0 holds."""
        state.index_copy_(0, self.blocks.long(), new.to(state.dtype))


class ScanWeights(NamedTuple):
    """What a scan has besides its inputs, float32: `decay` < 0, `skip` of the input to the output, `step_bias`.

    `decay` is [H], or [D, N] for `selective_scan`; `skip` and `step_bias` are [H] or [D]. With a `step_bias` steps are
    softplus(dt + step_bias), limited to `step_range`; without it they are dt.
    """

    decay: Tensor
    skip: Tensor | None = None
    step_bias: Tensor | None = None
    step_range: tuple[float, float] = (0.0, float("inf"))

    def steps(self, dt: Tensor) -> Tensor:
        """float32, of the shape of dt."""
        if self.step_bias is None:
            return dt.float()
        return functional.softplus(dt.float() + self.step_bias).clamp(*self.step_range)


class Places:
    """Where `width` places for each of several `lengths` int32 [N], from token `starts` [N], lie among T tokens."""

    def __init__(self, starts: Tensor, lengths: Tensor, width: int, num_tokens: int) -> None:
        offsets = torch.arange(width, device=starts.device)
        self.used = offsets < lengths[:, None]
        self._tokens = (starts[:, None] + offsets).clamp(max=num_tokens - 1)
        self._num_tokens = num_tokens

    def gather(self, x: Tensor) -> Tensor:
        """[T, ...] → float32 [N, width, ...], zeros in places that are not used."""
        return x[self._tokens].float() * self.used.view(*self.used.shape, *(1 for _ in x.shape[1:]))

    def scatter(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, width, ...] → [T, ...], zeros for tokens without a place."""
        out = torch.zeros(self._num_tokens + 1, *y.shape[2:], dtype=dtype, device=y.device)
        out[torch.where(self.used, self._tokens, self._num_tokens)] = y.to(dtype)
        return out[:-1]


def row_places(rows: StateRows, num_tokens: int) -> Places:
    """The tokens of each row side by side."""
    return Places(rows.query_start[:-1], rows.query_start.diff(), rows.max_query_len, num_tokens)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, *, silu: bool = True
) -> Tensor:
    """y_t = Σ_i weight[:, i] · x_{t-k+1+i} + bias for each channel, then silu; x [T, C], weight [C, k] → [T, C].

    `state` [blocks, C, k - 1] holds the newest inputs of a request; those before its first token are zeros.
    """
    places, width = row_places(rows, len(x)), weight.shape[1]
    before = rows.initial(state).float().transpose(1, 2)
    seen = torch.cat((before, places.gather(x)), 1)  # [B, k - 1 + L, C]
    out = (seen.unfold(1, width, 1) * weight.float()).sum(-1)
    out = out if bias is None else out + bias.float()
    newest = rows.query_start.diff()[:, None] + torch.arange(width - 1, device=x.device)
    kept = seen.gather(1, newest[..., None].expand(-1, -1, x.shape[1]).long())
    rows.keep(state, kept.transpose(1, 2) * (rows.blocks > 0)[:, None, None])
    return places.scatter(functional.silu(out) if silu else out, x.dtype)


def ssd_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: ScanWeights, state: Tensor, rows: StateRows
) -> Tensor:
    """S ← exp(Δ decay) S + Δ x bᵀ, y = S c + skip x for each head (Mamba-2, Dao & Gu 2024).

    x [T, H, P], dt [T, H], b and c [T, G, N], `state` [blocks, H, P, N]; head h reads group h // (H / G).
    Returns [T, H, P].
    """
    places, share = row_places(rows, len(x)), x.shape[1] // b.shape[1]
    values, steps = places.gather(x), places.gather(weights.steps(dt))
    b, c = (places.gather(one).repeat_interleave(share, 2) for one in (b, c))
    kept, out = rows.initial(state), torch.zeros_like(values)
    for t in range(rows.max_query_len):
        kept = kept * (steps[:, t] * weights.decay).exp()[..., None, None]
        kept = kept + (steps[:, t, :, None] * values[:, t])[..., None] * b[:, t, :, None]
        out[:, t] = (kept @ c[:, t, :, :, None]).squeeze(-1)
    rows.keep(state, kept)
    out = out if weights.skip is None else out + values * weights.skip[:, None]
    return places.scatter(out, x.dtype)


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: ScanWeights, state: Tensor, rows: StateRows
) -> Tensor:
    """S ← exp(Δ decay) S + Δ x b, y = S·c + skip x for each channel (Mamba-1, Gu & Dao 2023).

    x and dt [T, D], b and c [T, N], `state` [blocks, D, N]. Returns [T, D].
    """
    places = row_places(rows, len(x))
    values, steps, b, c = (places.gather(one) for one in (x, weights.steps(dt), b, c))
    kept, out = rows.initial(state), torch.zeros_like(values)
    for t in range(rows.max_query_len):
        kept = kept * (steps[:, t, :, None] * weights.decay).exp()
        kept = kept + (steps[:, t] * values[:, t])[..., None] * b[:, t, None]
        out[:, t] = (kept @ c[:, t, :, None]).squeeze(-1)
    rows.keep(state, kept)
    out = out if weights.skip is None else out + values * weights.skip
    return places.scatter(out, x.dtype)


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, rows: StateRows
) -> Tensor:
    """S ← exp(decay) S; S ← S + k (β (v - Sᵀk))ᵀ; o = Sᵀq for each value head (Yang et al. 2024).

    query and key [T, Hk, K] are scaled to length 1, the query then by K^-½; value [T, H, V]; beta [T, H]; decay float32
    [T, H], or [T, H, K] for each feature of the key; `state` [blocks, H, K, V]. Head h reads key head
    h // (H / Hk). Returns [T, H, V].
    """
    places, share = row_places(rows, len(value)), value.shape[1] // key.shape[1]
    query, key = (unit_heads(places.gather(one)).repeat_interleave(share, 2) for one in (query, key))
    query = query * query.shape[-1] ** -0.5
    values, decay, beta = places.gather(value), places.gather(decay).exp(), places.gather(beta)
    decay = decay[..., None] if decay.dim() == 3 else decay
    kept, out = rows.initial(state), torch.zeros_like(values)
    for t in range(rows.max_query_len):
        kept = kept * decay[:, t, ..., None]
        change = (values[:, t] - (key[:, t, :, None] @ kept).squeeze(-2)) * beta[:, t, :, None]
        kept = kept + key[:, t, ..., None] * change[:, :, None]
        out[:, t] = (query[:, t, :, None] @ kept).squeeze(-2)
    rows.keep(state, kept)
    return places.scatter(out, value.dtype)


def copy_blocks(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """cache[targets] = cache[sources] as it was before, for cache [blocks, ...], sources and targets int32 [n]."""
    cache.index_copy_(0, targets.long(), cache.index_select(0, sources))


def unit_heads(x: Tensor) -> Tensor:
    """Each head of x float32 [..., K] scaled to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)
