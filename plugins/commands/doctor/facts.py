"""A prediction as plain data, for the text and the JSON that `frame doctor` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from frame.interfaces import KVLayout, part_of, pool_bytes

from .memory import held_bytes
from .prediction import Prediction

if TYPE_CHECKING:
    from .ranks import Ranks


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """The prediction as plain data."""
    one, layout = prediction, prediction.layout
    return {
        "model": str(one.checkpoint.folder),
        "architecture": one.checkpoint.architecture,
        "device": {
            "kind": one.device.kind,
            "name": one.device.name,
            "total_bytes": one.device.total_bytes,
            "free_bytes": one.device.free_bytes,
        },
        "weights": {
            "dtype": one.sizes.dtype,
            **({"quantization": one.quantization} if one.quantization else {}),
            "num_bytes": one.weights_bytes,
            **({"host_bytes": one.kept.host, "ring_bytes": one.kept.ring} if one.kept.host else {}),
            "elements": one.weights.elements,
            "files": one.weights.files,
            "file_bytes_by_dtype": dict(one.weights.file_bytes),
        },
        "kv_cache": {
            "dtype": one.sizes.kv_dtype,
            "available_bytes": one.budget.kv_bytes if one.shape.kv_specs else 0,
            "set_by": one.budget.rule if one.shape.kv_specs else None,
            "block_size": layout.block_size if layout else None,
            "num_blocks": layout.pools[0] if layout else 0,
            "num_bytes": sum(cache_bytes(one)),
            "bytes_per_token": sum(map(bytes_per_token, parts_of(one))) if layout else None,
            "states": _states(one, layout) if layout and len(layout.pools) > 1 else None,
            "groups": _groups(parts_of(one)) if layout else [],
        },
        "capacity": {
            "max_model_len": one.sizes.max_model_len,
            "model_max_len": one.checkpoint.model_max_len,
            "longest_request": one.fits_len,
            "tokens": _capacity_tokens(one),
            "full_length_requests": round(one.full_requests, 2),
            "max_num_seqs": one.sizes.max_num_seqs,
            "max_num_batched_tokens": one.sizes.max_num_batched_tokens,
        },
        "memory": {**one.budget.parts, "graphs": one.graph_bytes},
        **({"layout": one.ranks.line, "ranks": _ranks(one, one.ranks)} if one.ranks else {}),
        "load_seconds": round(one.load_seconds, 1),
        "assumptions": one.assumptions,
    }


def _states(one: Prediction, layout: KVLayout) -> dict[str, int]:
    """The states of running requests, one of each, and those that are kept for prefixes.

    A prefix whose state is kept has a multiple of `checkpoint_tokens` tokens, which is 0 where none is kept.
    """
    num_live = one.sizes.max_num_seqs
    return {
        "bytes_per_state": sum(pool_bytes(part)[1] for part in parts_of(one)),
        "num_live": num_live,
        "num_checkpoints": layout.pools[1] - 1 - num_live,
        "checkpoint_tokens": next(group.block_size for group in layout.groups if group.keeps_states),
    }


def _capacity_tokens(one: Prediction) -> int | None:
    """Tokens that the KV cache holds, None where states alone are kept; of an encoder, tokens that a step takes."""
    if not one.shape.kv_specs:
        return one.sizes.max_num_batched_tokens
    if one.layout is None:
        return 0
    each = sum(one.layout.grain // group.block_size for group in one.layout.groups if group.pool == 0)
    return (one.layout.pools[0] - 1) // each * one.layout.grain if each else None


def parts_of(one: Prediction) -> list[KVLayout]:
    """The layout of the cache on each rank: with the layers that keep it there."""
    if one.layout is None or one.ranks is None:
        return [one.layout] if one.layout else []
    return [part_of(one.layout, rank.part.own) for rank in one.ranks.all]


def cache_bytes(one: Prediction) -> list[int]:
    """Bytes of the cache on each rank."""
    if one.layout is None:
        return [0] * one.num_ranks
    return [held_bytes(one.layout.pools, pool_bytes(part)) for part in parts_of(one)]


def _groups(parts: Sequence[KVLayout]) -> list[dict[str, Any]]:
    """The KV groups, with what a token, or the state of a request, takes in each over all ranks."""
    found = []
    for same in zip(*(part.groups for part in parts), strict=True):
        kinds = [spec for group in same for spec in group.specs]
        size, states = same[0].block_size, same[0].pool > 0
        width = sum(spec.block_bytes(size) for spec in kinds)
        found.append(
            {
                "layers": len({layer for group in same for layer in group.layers}),
                "kind": type(kinds[0]).__name__,
                "window": getattr(kinds[0], "window", None),
                "bytes_per_token": 0 if states else width // size,
                "bytes_per_state": width if states else 0,
            }
        )
    return found


def _ranks(one: Prediction, ranks: Ranks) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank.part.rank,
            "layers": [rank.part.layers.start, rank.part.layers.stop],
            "experts": rank.part.num_experts,
            "weights_bytes": rank.part.weights_bytes,
            "available_bytes": rank.budget.kv_bytes if rank.keeps else 0,
            "cache_bytes": held,
            "bytes_per_state": sum(rank.block_bytes[1:]),
            "memory": {**rank.budget.parts, "graphs": rank.graph_bytes},
            "device": rank.device.name,
            "fits": rank.fits,
        }
        for rank, held in zip(ranks.all, cache_bytes(one), strict=True)
    ]


def bytes_per_token(layout: KVLayout) -> int:
    """Bytes that one more token of a request takes in all groups that keep tokens, as long as every one keeps it."""
    return int(sum(pool_bytes(layout)[0] / group.block_size for group in layout.groups if group.pool == 0))
