"""Which limit requests meet first, and which setting raises it."""

from __future__ import annotations

from dataclasses import dataclass

from frame.interfaces import DTYPE_BYTES, pool_bytes

from .command import size
from .prediction import Prediction

_MEMORY_FLAGS = {
    "num_gpu_blocks_override": "--num-gpu-blocks-override",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
    "cpu default": "--kv-cache-memory-bytes (a CPU's cache takes 4 GiB at most by itself)",
    "free memory": "--kv-cache-memory-bytes (a CPU's cache takes a quarter of the free memory at most by itself)",
    "utilization": "--gpu-memory-utilization",
    "full need": "--max-num-seqs",
}


@dataclass(frozen=True)
class Verdict:
    """`limit` is weights, kv_cache, max_model_len or max_num_seqs; `works` is False when no engine would start."""

    limit: str
    why: str
    change: str
    works: bool = True


def judge(prediction: Prediction) -> Verdict:
    """The limit that more or longer requests meet first."""
    one, sizes = prediction, prediction.sizes
    if not one.shape.kv_specs:
        return _judge_encoder(one)
    if one.ranks is not None and one.ranks.shared_bytes > one.device.free_bytes:
        return Verdict(
            "weights",
            f"weights and KV cache of {one.num_ranks} ranks take {_gib(one.ranks.shared_bytes)} together of "
            f"{one.device.name}, of which {_gib(one.device.free_bytes)} are free",
            "lower --kv-cache-memory-bytes, take fewer ranks, or a device with more memory",
            works=False,
        )
    flag = _MEMORY_FLAGS[one.budget.rule]
    if one.layout is None or one.fits_len < 2:
        if one.budget.rule in ("utilization", "free memory") and one.budget.kv_bytes == 0:
            return Verdict(
                "weights",
                f"the weights{_here(one)} take {_gib(one.held_bytes)} and leave no room for a KV cache on "
                f"{one.device.name}",
                _less_weight(one),
                works=False,
            )
        return Verdict(
            "kv_cache",
            f"{_gib(one.budget.kv_bytes)} of KV cache hold no request{_beside_states(one)}",
            f"raise {flag}, or lower {'--max-num-seqs' if one.keeps_states else '--block-size'}",
            works=False,
        )
    if one.fits_len < sizes.max_model_len:
        return Verdict(
            "kv_cache",
            f"the KV cache holds a request of {one.fits_len} tokens at most; max_model_len is {sizes.max_model_len}",
            f"raise {flag}, set --max-model-len {one.fits_len}, or choose a smaller --kv-cache-dtype",
        )
    if one.full_requests < sizes.max_num_seqs:
        return Verdict(
            "kv_cache",
            f"{one.full_requests:.1f} requests of {sizes.max_model_len} tokens fit; max_num_seqs is "
            f"{sizes.max_num_seqs}: long requests wait, or are preempted and computed again",
            f"raise {flag}, lower --max-model-len, or choose a smaller --kv-cache-dtype",
        )
    return Verdict(
        "max_num_seqs",
        f"memory holds {one.full_requests:.1f} requests of {sizes.max_model_len} tokens; "
        f"no more than max_num_seqs = {sizes.max_num_seqs} run at once",
        f"raise --max-num-seqs for more at once; {_cost(one)}",
    )


def _beside_states(one: Prediction) -> str:
    return f" beside states for max_num_seqs = {one.sizes.max_num_seqs} requests" if one.keeps_states else ""


def _cost(one: Prediction) -> str:
    """What more requests at once take beside their tokens."""
    if one.layout is None or not one.keeps_states:
        return "memory is not the limit"
    (each,) = (one.ranks.poorest.block_bytes if one.ranks is not None else pool_bytes(one.layout))[1:]
    return f"the state of each takes {size(each)}{_here(one).replace(' of ', ' on ')}"


def _judge_encoder(one: Prediction) -> Verdict:
    """Without a KV cache memory must hold the weights, and a step whole prompts."""
    sizes = one.sizes
    left = one.budget.kv_bytes if one.device.kind == "cuda" else one.device.free_bytes - one.held_bytes
    if left <= 0:
        return Verdict(
            "weights",
            f"the weights{_here(one)} take {_gib(one.held_bytes)} and leave no room for a step on {one.device.name}",
            _less_weight(one),
            works=False,
        )
    if one.full_requests < sizes.max_num_seqs:
        return Verdict(
            "max_num_batched_tokens",
            f"a step takes {sizes.max_num_batched_tokens} tokens, which are {one.full_requests:.1f} requests of "
            f"{sizes.max_model_len} tokens",
            "raise --max-num-batched-tokens for more at once; an encoder has no KV cache",
        )
    return Verdict(
        "max_num_seqs",
        f"a step takes {sizes.max_num_seqs} requests at most, whatever their length",
        "raise --max-num-seqs for more at once; an encoder has no KV cache",
    )


def _here(one: Prediction) -> str:
    return f" of rank {one.ranks.poorest.part.rank}" if one.ranks is not None else ""


def _less_weight(one: Prediction) -> str:
    """What to change where the weights leave no room; a CPU computes in float32 unless it is asked not to."""
    more = "take a device with more memory, divide the model over more devices, raise --gpu-memory-utilization"
    if one.device.kind == "cuda":
        return f"{more}, lower --max-num-batched-tokens, or keep weights in host memory by --cpu-offload-gb"
    dtype = one.checkpoint.dtype
    if DTYPE_BYTES[dtype] >= DTYPE_BYTES[one.sizes.dtype]:
        return f"{more}, or take a smaller model"
    needed = _gib(one.held_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[one.sizes.dtype])
    return f"{more}, or compute as the checkpoint is stored: --dtype {dtype} needs {needed}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
