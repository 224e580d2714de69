"""A prediction as plain data, for the text and the JSON that `frame doctor` prints."""

from __future__ import annotations

from typing import Any

from frame.interfaces import KVLayout, pool_bytes

from .prediction import Prediction


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
            "num_bytes": one.weights_bytes,
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
            "num_bytes": layout.pools[0] * pool_bytes(layout)[0] if layout else 0,
            "bytes_per_token": bytes_per_token(layout) if layout else None,
            "groups": _groups(layout) if layout else [],
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
        "load_seconds": round(one.load_seconds, 1),
        "assumptions": one.assumptions,
    }


def _capacity_tokens(one: Prediction) -> int:
    """Tokens that the KV cache holds; of an encoder, tokens that a step takes."""
    if not one.shape.kv_specs:
        return one.sizes.max_num_batched_tokens
    if one.layout is None:
        return 0
    each = sum(one.layout.grain // group.block_size for group in one.layout.groups)
    return (one.layout.pools[0] - 1) // each * one.layout.grain


def _groups(layout: KVLayout) -> list[dict[str, Any]]:
    return [
        {
            "layers": len(group.layers),
            "kind": type(group.specs[0]).__name__,
            "window": getattr(group.specs[0], "window", None),
            "bytes_per_token": sum(spec.block_bytes(group.block_size) for spec in group.specs) // group.block_size,
        }
        for group in layout.groups
    ]


def bytes_per_token(layout: KVLayout) -> int:
    """Bytes that one more token of a request takes in all KV groups, as long as every group keeps it."""
    return int(sum(pool_bytes(layout)[0] / group.block_size for group in layout.groups))
