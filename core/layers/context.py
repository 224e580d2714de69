"""Attention over a context that several ranks share, each of which caches every n-th token of a row.

Every rank of the group attends with the queries of all of them to the tokens that it holds, and gives each rank the
part of the result for that rank's heads, or for its tokens of the step, with its log-sum-exp, by which they are merged.
What is sent for a token does not depend on how many there are in its context. Knows no cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..interfaces.attention import AttentionSpec, ContextShare
from ..interfaces.collectives import Groups, ProcessGroup
from ..interfaces.model import RunningStep
from ..ops import Ops


class SharedContext:
    """The ranks of `group`, which hold the key/value heads of all of them for their share of the tokens.

    `spec` is what is asked of the backend: the heads of all ranks, of which those of one have `own`. Key/value heads
    that several ranks would each hold are held once: `repeats` says how many times the ranks have each.
    """

    def __init__(self, group: ProcessGroup, own: AttentionSpec, repeats: int, ops: Ops) -> None:
        self.group, self._own, self._repeats, self._ops = group, own, repeats, ops
        self.spec = replace(
            own,
            num_heads=own.num_heads * group.size,
            num_kv_heads=own.num_kv_heads * group.size // repeats,
            sinks=False,
            returns_lse=True,
            context=ContextShare(group.size, group.rank),
        )

    def gather(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values of all ranks' heads, from those of this rank's, each [T, heads, D]."""
        size, shared = self.group.size, self._repeats == self.group.size
        sent = query if shared else torch.cat((query, key, value), 1)
        came = self.group.all_gather(sent.contiguous(), 0).unflatten(0, (size, len(query))).transpose(0, 1)
        heads, kv_heads = query.shape[1], key.shape[1]
        if shared:
            return came.flatten(1, 2), key, value
        queries, keys, values = (x.flatten(1, 2) for x in came.split([heads, kv_heads, kv_heads], 2))
        return queries, keys[:, :: self._repeats], values[:, :: self._repeats]

    def merge(self, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
        """The output [T, H, D] of this rank's heads over all tokens, from those of all heads over this rank's.

        `out` [T, N · H, D], `lse` float32 [T, N · H]. Learned logits `sinks` [H] take part once.
        """
        size, dim = self.group.size, out.shape[2]
        words = lse.unsqueeze(-1)  # as elements of the output's type, so that both go together
        words = words.view(out.dtype) if out.dtype.itemsize <= words.itemsize else words.to(out.dtype)
        sent = self._by_rank(torch.cat((out, words), -1))
        counts = [len(sent) // size] * size
        came = self.group.all_to_all(sent.contiguous(), counts, counts).unflatten(0, (size, counts[0]))
        parts, words = came[..., :dim], came[..., dim:].contiguous()
        lses = words.view(torch.float32) if words.itemsize <= 4 else words.float()
        merged, total = self._ops.merge_parts(parts, lses.squeeze(-1))
        if sinks is None:
            return merged
        return (merged * torch.sigmoid(total - sinks.float()).unsqueeze(-1)).to(out.dtype)

    def _by_rank(self, out: Tensor) -> Tensor:
        """`out` [T, N · H, D] as [N · T, H, D]: what goes to each rank, one after the other."""
        parts: Tensor = out.unflatten(1, (self.group.size, self._own.num_heads))
        return parts.transpose(0, 1).flatten(0, 1)


class DividedTokens(SharedContext):
    """The ranks of `group`, each of which computes the tokens of a step that `own_tokens` gives it, with all heads.

    Every rank caches every n-th token of a row, so that all have as much to attend to, wherever a token stands in its
    prompt. `running` tells how many tokens the step has.
    """

    def __init__(self, group: ProcessGroup, own: AttentionSpec, ops: Ops, running: RunningStep) -> None:
        super().__init__(group, own, group.size, ops)  # the heads of one rank are those of all
        self.spec = replace(self.spec, num_heads=own.num_heads, num_kv_heads=own.num_kv_heads)
        self._running = running

    def gather(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those of all tokens of the step, from those of this rank's tokens, each [tokens, heads, D]."""
        if (step := self._running.step) is None or not step.batches:
            raise RuntimeError("tokens that ranks divide among themselves were given without a step that counts them")
        count: int = step.batches[0].num_tokens
        came = self.group.all_gather(torch.cat((query, key, value), 1), 0)[:count]
        queries, keys, values = came.split([query.shape[1], key.shape[1], value.shape[1]], 1)
        return queries, keys, values

    def _by_rank(self, out: Tensor) -> Tensor:
        return pad(out, (0, 0, 0, 0, 0, -len(out) % self.group.size))


def own_tokens(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The part [ceil(T / N), ...] of `tensor` [T, ...] that is about this rank's tokens, filled up with zeros.

    Each of the N ranks of `group` has as many, one after the other in the order of ranks.
    """
    each = -(-len(tensor) // group.size)
    part = tensor[group.rank * each : (group.rank + 1) * each]
    return part if len(part) == each else pad(part, (*(0, 0) * (part.ndim - 1), 0, each - len(part)))


def shared_context(
    prefix: str, spec: AttentionSpec, num_kv_heads: int, groups: Groups, ops: Ops, running: RunningStep
) -> SharedContext | None:
    """The ranks that share the contexts of a layer of this rank's heads; None where each rank has its own.

    `num_kv_heads` are the model's. Raises `ValueError` for layers whose cache cannot be shared by so many ranks.
    """
    divided, tensor = groups.prefill_context, groups.tensor
    ranks = max(groups.decode_context.size, divided.size)
    if ranks == 1 or (spec.kind != "decoder" and divided.size == 1):
        return None
    if spec.kind != "decoder":
        raise ValueError(f"{prefix} lets each token see the whole prompt, which cannot be divided among devices")
    holders = tensor.size // num_kv_heads if num_kv_heads < tensor.size else 1
    if divided.size == 1 and holders % ranks and ranks % holders:
        raise ValueError(
            f"the {num_kv_heads} key/value heads of {prefix} are each on {holders} of {tensor.size} devices, which "
            f"cannot be grouped by {ranks}"
        )
    if spec.alibi:
        raise ValueError(f"{prefix} has ALiBi slopes, whose attention cannot be shared by devices")
    if spec.chunk:
        raise ValueError(f"{prefix} sees chunks of {spec.chunk} tokens, which devices cannot share")
    if spec.window % ranks:
        raise ValueError(f"the window of {prefix}, {spec.window} tokens, cannot be shared by {ranks} devices")
    if divided.size > 1:
        return DividedTokens(divided, spec, ops, running)
    return SharedContext(groups.decode_context, spec, min(holders, ranks), ops)
