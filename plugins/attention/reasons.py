"""Why a backend cannot serve a layer: every reason, in the order in which the contract lists them.

Knows no kernel; a backend states what it can as a `Capabilities`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from frame.interfaces import AttentionSpec


@dataclass(frozen=True)
class Capabilities:
    """What a backend can; an empty tuple means any. A block size must be a multiple of one of `block_sizes`.

    `converts`: the cache may hold another dtype than the layer computes in.
    """

    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    kv_dtypes: tuple[torch.dtype, ...] = ()
    block_sizes: tuple[int, ...] = (1,)
    max_head_dim: int = 1 << 16
    head_multiple: int = 1
    converts: bool = True
    window: bool = True
    soft_cap: bool = True
    sinks: bool = True
    alibi: bool = True
    distances: bool = False
    deterministic: bool = True
    returns_lse: bool = False
    kinds: tuple[str, ...] = ("decoder",)


def name_of(dtype: torch.dtype) -> str:
    """The dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def reasons(spec: AttentionSpec, can: Capabilities) -> list[str]:
    """Every reason why `can` does not cover `spec`: sizes first, then what the layer is, then the device."""
    found = []
    if not 0 < spec.head_dim <= can.max_head_dim:
        found.append(f"head size {spec.head_dim} not supported (at most {can.max_head_dim})")
    elif spec.head_dim % can.head_multiple:
        found.append(f"head size {spec.head_dim} not supported (multiples of {can.head_multiple})")
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        found.append(f"{spec.num_heads} heads do not divide over {spec.num_kv_heads} KV heads")
    for what, dtype, known in (("dtype", spec.dtype, can.dtypes), ("KV-cache dtype", spec.kv_dtype, can.kv_dtypes)):
        if known and dtype not in known:
            choices = ", ".join(map(name_of, known))
            found.append(f"{what} {name_of(dtype)} not supported (there are: {choices})")
    if spec.kv_dtype != spec.dtype and not can.converts:
        found.append(f"KV-cache dtype {name_of(spec.kv_dtype)} not supported beside dtype {name_of(spec.dtype)}")
    if spec.block_size < 1 or not any(spec.block_size % size == 0 for size in can.block_sizes):
        found.append(
            f"block size {spec.block_size} not supported (multiples of {', '.join(map(str, can.block_sizes))})"
        )
    asked = {
        "sliding windows": spec.window > 0 and not can.window,
        "soft caps": spec.soft_cap > 0 and not can.soft_cap,
        "attention sinks": spec.sinks and not can.sinks,
        "ALiBi": spec.alibi and not can.alibi,
        "biases of distances": spec.distances > 0 and not can.distances,
        "biases of distances in windows, deterministic steps or with log-sum-exps": spec.distances > 0
        and (spec.window > 0 or spec.deterministic or spec.returns_lse),
        "windows and deterministic steps over what an encoder gives": spec.kind == "cross"
        and (spec.window > 0 or spec.deterministic),
        "deterministic steps": spec.deterministic and not can.deterministic,
        "log-sum-exps": spec.returns_lse and not can.returns_lse,
        "a share of the context": spec.context.ranks > 1 and not can.returns_lse,
        "ALiBi over a share of the context": spec.context.ranks > 1 and spec.alibi,
        "attention sinks over a share of the context": spec.context.ranks > 1 and spec.sinks,
        f"a window of {spec.window} tokens, shared by {spec.context.ranks} ranks,": spec.window % spec.context.ranks
        > 0,
    }
    found += [f"{what} not supported" for what, refused in asked.items() if refused]
    if spec.kind not in can.kinds:
        choices = ", ".join(map(repr, can.kinds))
        found.append(f"attention kind {spec.kind!r} not supported (there are: {choices})")
    if spec.kind != "decoder" and (spec.alibi or spec.sinks):
        found.append("ALiBi and sinks not supported without a cache")
    if spec.kind != "decoder" and spec.returns_lse:
        found.append("log-sum-exps not supported without a cache")
    if can.devices and spec.device_type not in can.devices:
        found.append(f"device {spec.device_type!r} not supported (there are: {', '.join(can.devices)})")
    return found
