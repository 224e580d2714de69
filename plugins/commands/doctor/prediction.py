"""Memory, capacity and load time of a checkpoint on a device. Arithmetic alone: nothing is loaded.

torch is imported only where a backend of attention must be asked (see `backends`).
The KV cache follows the engine's own layout (`frame.interfaces.plan_layout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_pools

from frame.interfaces import (
    DTYPE_BYTES,
    KVLayout,
    blocks_needed,
    max_request_len,
    pool_bytes,
)
from frame.settings import Checkpoint, ConfigError, FrameConfig
from frame.weight_offload.choice import NOTHING_KEPT, KeptBytes

from .backends import block_multiples, multiples_of
from .estimate import estimate_weights, weights_of
from .layers import Shape, read_shape
from .machine import Device
from .memory import (
    CUDA_GRAPH_BYTES,
    CUDA_WORKSPACE_BYTES,
    Budget,
    Sizes,
    copied_bytes,
    empty_layout,
    fitting_pools,
    graph_bytes,
    kv_budget,
    offloaded,
    resolve_sizes,
)
from .weights import Weights, has_weights, read_weights

if TYPE_CHECKING:
    from frame.settings import RankPart

    from .ranks import Ranks

#: Seconds before any weight is read: imports and the device; kernels that are tried at a first start on a GPU.
START_SECONDS = {"cpu": 3.0, "cuda": 8.0}
GIB = 1 << 30


@dataclass(frozen=True)
class Prediction:
    """All that was predicted; `layout` is None where not even two blocks fit.

    Of several `ranks`, device, budget and graphs are those of the poorest; weights are all of them. `kept` are those of
    a rank that lie in host memory.
    """

    checkpoint: Checkpoint
    device: Device
    sizes: Sizes
    shape: Shape
    weights: Weights
    weights_bytes: int
    quantization: str
    budget: Budget
    layout: KVLayout | None
    fits_len: int
    full_requests: float
    graph_bytes: int
    load_seconds: float
    assumptions: list[str]
    ranks: Ranks | None = None
    kept: KeptBytes = NOTHING_KEPT

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return len(self.ranks.all) if self.ranks is not None else 1

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep a running state of each request."""
        return any(spec.retention[0] == "state" for spec in self.shape.kv_specs.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of weights on the device that memory and cache are told for, of several ranks the poorest one's."""
        if self.ranks is not None:
            return self.ranks.poorest.part.weights_bytes
        return self.weights_bytes - self.kept.saved


def predict(
    config: FrameConfig,
    checkpoint: Checkpoint,
    device: Device,
    disk_gib_per_s: float,
    devices: Sequence[Device] = (),
) -> Prediction:
    """The prediction; raises `ConfigError` where config.json or the headers of the weights cannot be read.

    `devices` are those of the ranks of an engine whose model is divided; none where it is not.
    """
    sizes = resolve_sizes(config, checkpoint, device)
    there = has_weights(checkpoint.folder)
    shape, built = _shape(config, checkpoint, sizes, devices)
    weights = _weights(checkpoint, shape, built, sizes)
    weights_bytes = weights.elements * DTYPE_BYTES[sizes.dtype]
    quantization = quantization_of(config, checkpoint)
    held = built
    if quantization and not devices:
        held = _quantised(config, checkpoint, sizes, there)
        weights_bytes, shape = held.weights_bytes, replace(shape, kv_specs=held.kv_specs)
    weights_bytes += 0 if devices else _copied_bytes(config, checkpoint, device, sizes, shape, held)
    ranks, kept = None, NOTHING_KEPT
    if devices:
        from .ranks import predict_ranks

        ranks = predict_ranks(config, checkpoint, shape, sizes, devices)
        poorest, unknown = ranks.poorest, ranks.unknown
        shape = replace(shape, kv_specs=poorest.part.kv_specs, known=shape.known or there)
        device, budget, graphs, filled = poorest.device, poorest.budget, poorest.graph_bytes, ranks.layout
        kept = poorest.kept
    else:
        if config.weight_offload.cpu_offload_gb and device.kind != "cpu":
            kept = _kept(config, checkpoint, device, sizes, held)
        multiples, unknown = (
            multiples_of(config, built.attention, device)
            if built is not None
            else block_multiples(config, checkpoint, shape, sizes, device)
        )
        empty = empty_layout(config, shape.kv_specs, multiples)
        on_device = weights_bytes - kept.saved
        budget = kv_budget(config, device, sizes, shape, on_device, empty, checkpoint.vocab_size)
        graphs, filled = (
            graph_bytes(config, device, sizes, shape, checkpoint.vocab_size),
            _filled(config, sizes, empty, budget),
        )
    layout, fits_len, full = _capacity(sizes, shape, filled)
    return Prediction(
        checkpoint=checkpoint,
        device=device,
        sizes=sizes,
        shape=shape,
        weights=weights,
        weights_bytes=weights_bytes,
        quantization=quantization,
        budget=budget,
        layout=layout,
        fits_len=fits_len,
        full_requests=full,
        graph_bytes=graphs,
        load_seconds=START_SECONDS[device.kind] + weights.read_bytes / (disk_gib_per_s * GIB),
        assumptions=[*_engines(config), *_assumptions(device, shape, disk_gib_per_s, there, unknown), *_host(kept)],
        ranks=ranks,
        kept=kept,
    )


def _shape(
    config: FrameConfig, checkpoint: Checkpoint, sizes: Sizes, devices: Sequence[Device]
) -> tuple[Shape, RankPart | None]:
    """The sizes of the model, and the model itself without memory where the tables lack its family."""
    shape = read_shape(checkpoint, sizes.kv_dtype, sizes.dtype)
    if shape.known or devices:
        built = None
    else:
        from .ranks import built_part

        built = built_part(config, checkpoint, sizes.dtype)
    if not (shape.num_heads or built or devices):
        raise ConfigError(
            f"no model of this installation serves {checkpoint.architecture}, which has no attention heads"
        )
    return (shape if built is None else replace(shape, kv_specs=built.kv_specs, known=True)), built


def _weights(checkpoint: Checkpoint, shape: Shape, built: RankPart | None, sizes: Sizes) -> Weights:
    """The weights by the headers of their files, by the model without memory, or by an estimate, in this order."""
    stored = DTYPE_BYTES[checkpoint.dtype]
    if has_weights(checkpoint.folder):
        weights = read_weights(checkpoint.folder, tied=shape.tied)
    elif built is None:
        return estimate_weights(checkpoint, shape, stored)
    else:
        weights = weights_of(built.weights_bytes // DTYPE_BYTES[sizes.dtype], checkpoint.dtype, stored)
    if built is None:
        return weights
    return replace(weights, elements=built.weights_bytes // DTYPE_BYTES[sizes.dtype])


def quantization_of(config: FrameConfig, checkpoint: Checkpoint) -> str:
    """The format of quantised weights, "" for others."""
    if config.model.quantization is not None:
        return config.model.quantization
    stored = checkpoint.quantization
    return "" if stored is None else str(stored.get("quant_method", "quantised"))


def _quantised(config: FrameConfig, checkpoint: Checkpoint, sizes: Sizes, there: bool) -> RankPart:
    """The model without memory, whatever of its weights is there."""
    from frame.settings import engine_parts

    if not there:
        config = config.model_copy(update={"load": config.load.model_copy(update={"load_format": "dummy"})})
    return engine_parts(config, checkpoint, sizes.dtype).ranks[0]


def _copied_bytes(
    config: FrameConfig, checkpoint: Checkpoint, device: Device, sizes: Sizes, shape: Shape, built: RankPart | None
) -> int:
    """Bytes of the packed copy that a CPU multiplies by where the head is tied to the embedding."""
    if device.kind != "cpu" or not (shape.tied or built):
        return 0
    if built is None and checkpoint.pooling is not None:  # which may do without a head
        from .ranks import built_part

        if (built := built_part(config, checkpoint, sizes.dtype)) is None:
            return 0
    tables = [(checkpoint.vocab_size, shape.hidden_size)] if built is None else built.tied
    return copied_bytes(device, sizes.dtype, tables)


def _kept(
    config: FrameConfig, checkpoint: Checkpoint, device: Device, sizes: Sizes, built: RankPart | None
) -> KeptBytes:
    """What lies in host memory, by the layers of the model without memory."""
    from .ranks import built_part

    part = built or built_part(config, checkpoint, sizes.dtype)
    return NOTHING_KEPT if part is None else offloaded(config, device, part.layer_bytes)


def _filled(config: FrameConfig, sizes: Sizes, empty: KVLayout, budget: Budget) -> KVLayout | None:
    pools = fitting_pools(config, sizes, empty, budget.kv_bytes, pool_bytes(empty))
    return with_pools(empty, pools=pools) if pools else None


def _capacity(sizes: Sizes, shape: Shape, layout: KVLayout | None) -> tuple[KVLayout | None, int, float]:
    """(the layout of the cache, None where not even two blocks fit; longest request; requests of full length)."""
    if not shape.kv_specs:  # a step takes whole prompts
        tokens = sizes.max_num_batched_tokens
        return None, min(sizes.max_model_len, tokens), tokens / max(1, sizes.max_model_len)
    if layout is None:
        return None, 0, 0.0
    needed = blocks_needed(layout, max(1, sizes.max_model_len - 1))
    full = (layout.pools[0] - 1) / needed if needed else float(sizes.max_num_seqs)
    if len(layout.pools) > 1:  # there is a state for each of so many
        full = min(full, float(sizes.max_num_seqs))
    return layout, max_request_len(layout, sizes.max_model_len), full


def _engines(config: FrameConfig) -> list[str]:
    """That one of several engines is predicted."""
    count = config.data_parallel.data_parallel_size
    return [f"all of this is about one of {count} engines; each has devices of its own"] if count > 1 else []


def _host(kept: KeptBytes) -> list[str]:
    """What the machine must have beside the device."""
    if not kept.host:
        return []
    return [
        f"{kept.host / GIB:.2f} GiB of host memory are free for the weights of each device that cpu_offload_gb keeps "
        "there; all of them are copied in each step, at the speed of the link"
    ]


def _assumptions(device: Device, shape: Shape, disk_gib_per_s: float, there: bool, unknown: str) -> list[str]:
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
            f"{CUDA_GRAPH_BYTES >> 20} MiB for each further captured step",
        ]
    elif device.kind == "cuda":
        found.append("activations: six hidden and three intermediate rows for each token of the largest step")
    if unknown:
        found.append(f"no attention backend asks for longer blocks: {unknown}")
    if device.stated:
        found.append("all of the memory that was named is free")
    if not shape.known:
        found.append("this family is not one of frame's own: its layers are taken for full attention or `layer_types`")
    return found
