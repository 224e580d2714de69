"""Memory, capacity and load time of a checkpoint on a device. Arithmetic alone: nothing is loaded, torch is not needed.

The KV cache follows the engine's own layout (`frame.interfaces.plan_layout`); the rules of the default platforms'
memory are restated here, and tests hold them against engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frame.interfaces import (
    DTYPE_BYTES,
    KVLayout,
    blocks_needed,
    full_bytes,
    group_layers,
    max_request_len,
    plan_layout,
    with_blocks,
)
from frame.settings import Checkpoint, ConfigError, FrameConfig

from .estimate import estimate_weights
from .layers import Shape, read_shape
from .machine import Device
from .weights import Weights, has_weights, read_weights

#: Requests and tokens of a step where the settings leave them open, by device.
STEP_SIZES = {"cpu": (128, 2048), "cuda": (512, 8192)}
#: A CPU's cache takes at most this, and at most a quarter of what is free, unless its size is given.
CPU_KV_BYTES = 4 << 30
#: What a GPU keeps free beside weights, cache, activations and recorded steps.
CUDA_RESERVE_BYTES = 400 << 20
#: Decode batches that are recorded by default, and the largest one that ever is.
CUDA_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
CUDA_MAX_GRAPH_ROWS = 512
#: What each of them takes besides the largest, with its draws, and the largest for a library's workspace.
CUDA_GRAPH_BYTES, CUDA_WORKSPACE_BYTES = 4 << 20, 32 << 20
#: Tokens of steps with prompts that may be recorded, and tokens times bytes of weights beyond which none is.
CUDA_PIECE_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
CUDA_PIECES_WORTHWHILE = 12e12
#: Seconds before any weight is read: imports and the device; kernels that are tried at a first start on a GPU.
START_SECONDS = {"cpu": 3.0, "cuda": 8.0}
KV_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """What the settings come to on a device."""

    dtype: str
    kv_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class Budget:
    """Bytes for the KV cache, the name of the rule that set them, and the parts of the device's memory."""

    kv_bytes: int
    rule: str
    parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """All that was predicted; `layout` is None where not even two blocks fit."""

    checkpoint: Checkpoint
    device: Device
    sizes: Sizes
    shape: Shape
    weights: Weights
    weights_bytes: int
    budget: Budget
    layout: KVLayout | None
    fits_len: int
    full_requests: float
    graph_bytes: int
    load_seconds: float
    assumptions: list[str]


def predict(config: FrameConfig, checkpoint: Checkpoint, device: Device, disk_gib_per_s: float) -> Prediction:
    """Raises `ConfigError` for what cannot be read from config.json and the headers."""
    sizes = resolve_sizes(config, checkpoint, device)
    shape = read_shape(checkpoint, sizes.kv_dtype)
    there = has_weights(checkpoint.folder)
    if there:
        weights = read_weights(checkpoint.folder, tied=shape.tied)
    else:
        weights = estimate_weights(checkpoint, shape, DTYPE_BYTES[checkpoint.dtype])
    weights_bytes = weights.elements * DTYPE_BYTES[sizes.dtype]
    empty = plan_layout(group_layers(shape.kv_specs, config.cache.block_size))
    budget = kv_budget(config, device, sizes, shape, weights_bytes, empty, checkpoint.vocab_size)
    layout: KVLayout | None = None
    try:
        if not shape.kv_specs:
            raise ValueError("an encoder has no KV cache")
        layout = with_blocks(empty, budget.kv_bytes, config.cache.num_gpu_blocks_override)
    except ValueError:
        fits_len, full = 0, 0.0
        if not shape.kv_specs:  # a step takes whole prompts
            fits_len = min(sizes.max_model_len, sizes.max_num_batched_tokens)
            full = sizes.max_num_batched_tokens / max(1, sizes.max_model_len)
    else:
        fits_len = max_request_len(layout, sizes.max_model_len)
        needed = blocks_needed(layout, max(1, sizes.max_model_len - 1))
        full = (layout.num_blocks - 1) / needed if needed else float(sizes.max_num_seqs)
    return Prediction(
        checkpoint=checkpoint,
        device=device,
        sizes=sizes,
        shape=shape,
        weights=weights,
        weights_bytes=weights_bytes,
        budget=budget,
        layout=layout,
        fits_len=fits_len,
        full_requests=full,
        graph_bytes=graph_bytes(config, device, sizes, shape, checkpoint.vocab_size),
        load_seconds=START_SECONDS[device.kind] + weights.read_bytes / (disk_gib_per_s * GIB),
        assumptions=_assumptions(device, shape, disk_gib_per_s, there),
    )


def resolve_sizes(config: FrameConfig, checkpoint: Checkpoint, device: Device) -> Sizes:
    """What "auto" and open settings mean on the device."""
    dtype: str = config.model.dtype
    if dtype == "auto":
        options = config.plugin.get("cpu", {}) if device.kind == "cpu" else {"native_dtype": True}
        dtype = checkpoint.dtype if options.get("native_dtype") in (True, "true", "1") else "float32"
    kv_name = config.cache.kv_cache_dtype
    num_seqs, num_tokens = STEP_SIZES[device.kind]
    return Sizes(
        dtype=dtype,
        kv_dtype=dtype if kv_name == "auto" else KV_NAMES.get(kv_name, kv_name),
        max_num_seqs=config.scheduler.max_num_seqs or num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or num_tokens,
        max_model_len=checkpoint.max_model_len,
    )


def kv_budget(
    config: FrameConfig,
    device: Device,
    sizes: Sizes,
    shape: Shape,
    weights_bytes: int,
    empty: KVLayout,
    vocab_size: int,
) -> Budget:
    """How many bytes the KV cache gets, and which rule says so."""
    cache = config.cache
    per_block = empty.page_bytes * empty.num_slots
    if cache.num_gpu_blocks_override is not None:
        return Budget(cache.num_gpu_blocks_override * per_block, "num_gpu_blocks_override")
    if cache.kv_cache_memory_bytes is not None:
        return Budget(cache.kv_cache_memory_bytes, "kv_cache_memory_bytes")
    requested = int(device.total_bytes * cache.gpu_memory_utilization)
    if device.kind == "cpu":
        rules = {
            "full need": full_bytes(empty, sizes.max_num_seqs, sizes.max_model_len),
            "cpu default": CPU_KV_BYTES,
            "free memory": device.free_bytes // 4,
            "utilization": requested - weights_bytes,
        }
        rule = min(rules, key=lambda name: rules[name])
        return Budget(max(0, rules[rule]), rule, {"weights": weights_bytes})
    activations = activation_bytes(sizes, shape, vocab_size)
    parts = {
        "weights": weights_bytes,
        "activations": activations,
        "graphs": graph_bytes(config, device, sizes, shape, vocab_size),
        "recorded prompts": int(piece_share(config, sizes, weights_bytes) * activations),
        "reserve": CUDA_RESERVE_BYTES,
    }
    if device.free_bytes < requested:
        raise ConfigError(
            f"gpu_memory_utilization {cache.gpu_memory_utilization} asks for {requested >> 20} MiB, "
            f"{device.free_bytes >> 20} MiB of {device.name} are free; lower it or free the device"
        )
    return Budget(max(0, requested - sum(parts.values())), "utilization", parts)


def activation_bytes(sizes: Sizes, shape: Shape, vocab_size: int) -> int:
    """The most that the largest step allocates at once: a layer's inputs and products, or the logits and two copies.

    An encoder has no logits.
    """
    width = DTYPE_BYTES[sizes.dtype]
    layer = sizes.max_num_batched_tokens * (6 * shape.hidden_size + 3 * shape.intermediate_size) * width
    rows = min(sizes.max_num_seqs, sizes.max_num_batched_tokens) if shape.kv_specs else 0
    return max(layer, rows * vocab_size * (width + 12))


def graph_bytes(config: FrameConfig, device: Device, sizes: Sizes, shape: Shape, vocab_size: int) -> int:
    """What is kept for recorded decode steps and their draws; 0 where nothing is recorded.

    Steps of every size are recorded once, again deterministically where a single request may ask for that, and again
    over shared prefixes where these are looked for.
    """
    if device.kind == "cpu" or config.executor.enforce_eager or not shape.kv_specs:
        return 0
    options = config.plugin.get("cuda", {})
    if options.get("graph_memory_bytes") is not None:
        return int(options["graph_memory_bytes"])
    given = options.get("graph_sizes", CUDA_GRAPH_SIZES)
    if not given:
        return 0
    kinds = 1 if config.model.deterministic else 2 + (config.attention.shared_prefix_min_tokens != 0)
    rows = min(CUDA_MAX_GRAPH_ROWS, sizes.max_num_seqs)
    count = len({size for size in given if size < rows} | {rows})
    each = CUDA_GRAPH_BYTES // (2 if options.get("record_draws") in (False, "false", "0") else 1)
    row_bytes = (4 * shape.hidden_size + 3 * shape.intermediate_size + vocab_size) * DTYPE_BYTES[sizes.dtype]
    return rows * row_bytes + CUDA_WORKSPACE_BYTES + (count * kinds - 1) * each


def piece_share(config: FrameConfig, sizes: Sizes, weights_bytes: int) -> float:
    """Of the largest step's activations, what recorded steps with prompts keep once more: all of a small model's."""
    options = config.plugin.get("cuda", {})
    off = options.get("record_prompts") in (False, "false", "0") or options.get("graph_sizes") == []
    if config.executor.enforce_eager or off:
        return 0.0
    most = min(sizes.max_num_batched_tokens, CUDA_PIECES_WORTHWHILE / max(1, weights_bytes))
    fitting = [size for size in {*CUDA_PIECE_SIZES, sizes.max_num_batched_tokens} if size <= most]
    return max(fitting, default=0) / sizes.max_num_batched_tokens


def bytes_per_token(layout: KVLayout) -> int:
    """What one more token of a request takes, over all groups, while every group still keeps it."""
    return len(layout.groups) * layout.page_bytes * layout.num_slots // layout.block_size


def _assumptions(device: Device, shape: Shape, disk_gib_per_s: float, there: bool) -> list[str]:
    found = [
        f"load time: {START_SECONDS[device.kind]:g} s to import and prepare, then {disk_gib_per_s:g} GiB/s "
        "(--disk-gib-per-s); a first start on a GPU also compiles kernels, about four seconds",
        "full-length requests share no prefix" if shape.kv_specs else "full-length requests are computed in one step",
    ]
    if not there:
        found.append("weights: no file of them is there yet, so they are counted from the sizes in config.json")
    if device.kind == "cuda" and shape.kv_specs:
        found += [
            "activations: six hidden and three intermediate rows for each token of the largest step, or the logits of "
            "the largest batch with two copies, whichever is more",
            f"graphs: as much for the largest decode batch, its logits, {CUDA_WORKSPACE_BYTES >> 20} MiB, and "
            f"{CUDA_GRAPH_BYTES >> 20} MiB for each further recorded step",
        ]
    elif device.kind == "cuda":
        found.append("activations: six hidden and three intermediate rows for each token of the largest step")
    if device.stated:
        found.append("all of the memory that was named is free")
    if not shape.known:
        found.append("this family is not one of frame's own: its layers are taken for full attention or `layer_types`")
    return found


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
            "num_blocks": layout.num_blocks if layout else 0,
            "num_bytes": layout.num_blocks * layout.page_bytes * layout.num_slots if layout else 0,
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
    """Tokens that the cache holds, or, of an encoder, that a step takes."""
    if not one.shape.kv_specs:
        return one.sizes.max_num_batched_tokens
    if one.layout is None:
        return 0
    return (one.layout.num_blocks - 1) // max(1, len(one.layout.groups)) * one.layout.block_size


def _groups(layout: KVLayout) -> list[dict[str, Any]]:
    return [
        {
            "layers": len(group.layers),
            "kind": type(group.spec).__name__,
            "window": getattr(group.spec, "window", None),
            "bytes_per_token": len(group.layers) * group.spec.block_bytes(layout.block_size) // layout.block_size,
        }
        for group in layout.groups
    ]
