"""The sizes of a step and the memory of a device, by the rules of the default platforms. Arithmetic alone.

The rules are restated here, because platforms need torch; tests compare them with the platforms and with engines.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from frame.interfaces import (
    DTYPE_BYTES,
    AnyKVSpec,
    KVLayout,
    full_bytes,
    plan_layout,
    pool_bytes,
    with_blocks,
    with_checkpoints,
)
from frame.settings import Checkpoint, ConfigError, FrameConfig, Registry
from frame.transfers.device_bytes import device_bytes
from frame.weight_offload.choice import GIB, NOTHING_KEPT, KeptBytes, kept_bytes

from .layers import Shape
from .machine import Device

#: Requests and tokens of a step where the settings leave them open, by device.
STEP_SIZES = {"cpu": (128, 2048), "cuda": (512, 8192)}
#: A CPU's cache takes at most this, and at most a quarter of what is free, unless its size is given.
CPU_KV_BYTES = 4 << 30
#: Elements of the smallest weight that a CPU packs, and the instructions that it packs 16-bit ones for.
CPU_LEAST_PACKED = 1 << 19
CPU_PACKED_HALVES = frozenset(("avx512bw", "avx512dq", "avx512vl"))
#: What a GPU keeps free beside weights, cache, activations and captured steps.
CUDA_RESERVE_BYTES = 400 << 20
#: Decode batches that are captured by default, and the largest one that ever is.
CUDA_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 256, 16), *range(256, 513, 32))
CUDA_MAX_GRAPH_ROWS = 512
#: Decode batches that are captured once more for rows of up to so many tokens.
CUDA_SHORT_LENGTHS = {1: 8192, 2: 4096, 4: 1024, 8: 1024}
#: Bytes that each of them but the largest takes, with its draws; bytes of the largest one for a library's workspace.
CUDA_GRAPH_BYTES, CUDA_WORKSPACE_BYTES = 4 << 20, 32 << 20
#: Tokens of steps with prompts that may be captured, and tokens times bytes of weights of a layer beyond which none is.
CUDA_PIECE_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
CUDA_PIECES_WORTHWHILE = 3.6e11
KV_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a step that follow from the settings and the device."""

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


def resolve_sizes(config: FrameConfig, checkpoint: Checkpoint, device: Device) -> Sizes:
    """Returns the sizes of a step, with the device's own for settings that are "auto" or not given."""
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


def empty_layout(config: FrameConfig, specs: Mapping[str, AnyKVSpec], multiples: Mapping[str, int]) -> KVLayout:
    """The engine's groups and the sizes of their blocks, still without blocks."""
    layout = plan_layout(specs, config.cache.block_size, multiples)
    return with_checkpoints(layout) if config.cache.enable_prefix_caching else layout


def fitting_pools(
    config: FrameConfig, sizes: Sizes, empty: KVLayout, kv_bytes: int, own_bytes: tuple[int, ...]
) -> tuple[int, ...]:
    """The blocks of each pool that `kv_bytes` hold, where one takes `own_bytes`; none where not even two fit."""
    override, states = config.cache.num_gpu_blocks_override, sizes.max_num_seqs
    try:
        return with_blocks(empty, kv_bytes, override, num_states=states, bytes_of_pools=own_bytes).pools
    except ValueError:
        return ()


def copied_bytes(device: Device, dtype: str, tables: Iterable[tuple[int, int]]) -> int:
    """Bytes of the packed copies that a CPU multiplies by of tables [rows, dim] that an embedding and a head share."""
    if device.kind != "cpu" or not packs(dtype):
        return 0
    elements = (rows * dim for rows, dim in tables)
    return DTYPE_BYTES[dtype] * sum(count for count in elements if count >= CPU_LEAST_PACKED)


def packs(dtype: str) -> bool:
    """Whether weights of this type are packed on processors of this machine's kind."""
    if platform.machine() not in ("x86_64", "AMD64") or dtype not in ("float32", "bfloat16"):
        return False
    return dtype == "float32" or processor_flags() >= CPU_PACKED_HALVES


@cache
def processor_flags() -> frozenset[str]:
    """The names of the instructions of this machine's processors, as the kernel lists them; none where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(frozenset(line.split(":")[1].split()) for line in file if line.startswith("flags"))
    except (OSError, StopIteration):
        return frozenset()


def offloaded(config: FrameConfig, device: Device, layer_bytes: Sequence[int]) -> KeptBytes:
    """What `cpu_offload_gb` keeps in host memory, of layers of these sizes; nothing on a CPU, where all is there.

    Raises `ConfigError` where nothing would be saved.
    """
    settings = config.weight_offload
    if device.kind == "cpu" or not settings.cpu_offload_gb:
        return NOTHING_KEPT
    try:
        return kept_bytes(layer_bytes, int(settings.cpu_offload_gb * GIB), settings.cpu_offload_ahead + 1)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def held_bytes(pools: tuple[int, ...], block_bytes: tuple[int, ...]) -> int:
    """Bytes of so many blocks of each pool; 0 where there are none."""
    return sum(count * size for count, size in zip(pools, block_bytes, strict=bool(pools)))


def kv_budget(
    config: FrameConfig,
    device: Device,
    sizes: Sizes,
    shape: Shape,
    weights_bytes: int,
    empty: KVLayout,
    vocab_size: int,
    own_bytes: tuple[int, ...] = (),
) -> Budget:
    """How many bytes the KV cache gets, and which rule says so.

    `own_bytes` are those of a block of each pool on one of several ranks. Raises `ConfigError` for a GPU that something
    else fills.
    """
    cache, own_bytes = config.cache, own_bytes or pool_bytes(empty)
    if cache.num_gpu_blocks_override is not None:
        pools = fitting_pools(config, sizes, empty, 0, own_bytes)
        return Budget(held_bytes(pools, own_bytes), "num_gpu_blocks_override")
    if cache.kv_cache_memory_bytes is not None:
        return Budget(cache.kv_cache_memory_bytes, "kv_cache_memory_bytes")
    requested = int(device.total_bytes * cache.gpu_memory_utilization)
    if device.kind == "cpu":
        rules = {
            "full need": full_bytes(empty, sizes.max_num_seqs, sizes.max_model_len, own_bytes),
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
        "piecewise graphs": int(piece_share(config, sizes, shape, weights_bytes) * activations),
        "reserve": CUDA_RESERVE_BYTES,
    }
    if connected := device_bytes(config, Registry.load(), device.kind) if config.transfer.kv_connector else 0:
        parts["KV connector"] = connected
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
    """What is kept for captured decode steps and their draws; 0 where nothing is captured.

    Steps of every size are captured once, again deterministically where a single request may ask for that, and again
    over shared prefixes where these are looked for; those of few rows once more for short rows.
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
    captured = {size for size in given if size < rows} | {rows}
    longest = 0 if config.model.deterministic else sizes.max_model_len
    short = sum(size in captured and length < longest for size, length in CUDA_SHORT_LENGTHS.items())
    each = CUDA_GRAPH_BYTES // (2 if options.get("capture_draws") in (False, "false", "0") else 1)
    row_bytes = (4 * shape.hidden_size + 3 * shape.intermediate_size + vocab_size) * DTYPE_BYTES[sizes.dtype]
    return rows * row_bytes + CUDA_WORKSPACE_BYTES + (len(captured) * kinds + short - 1) * each


def piece_share(config: FrameConfig, sizes: Sizes, shape: Shape, weights_bytes: int) -> float:
    """Of the largest step's activations, what captured steps with prompts keep once more: all of a small model's."""
    options = config.plugin.get("cuda", {})
    off = options.get("capture_prompts") in (False, "false", "0") or options.get("graph_sizes") == []
    if config.executor.enforce_eager or config.weight_offload.cpu_offload_gb or off:
        return 0.0
    worthwhile = shape.num_layers * CUDA_PIECES_WORTHWHILE / max(1.0, weights_bytes * shape.read_share)
    most = min(sizes.max_num_batched_tokens, worthwhile)
    fitting = [size for size in {*CUDA_PIECE_SIZES, sizes.max_num_batched_tokens} if size <= most]
    return max(fitting, default=0) / sizes.max_num_batched_tokens
