"""Cross-attention: a decoder's tokens over all that an encoder gave for their request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from frame.core.interfaces.adapters import Adapters, NoAdapters
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.kv import AnyKVSpec, CrossKV
from frame.core.interfaces.model import ForwardStep
from frame.core.layers.attention import Attention
from frame.core.layers.linear import split_evenly
from frame.core.layers.pooling_build import PoolingBuild

if TYPE_CHECKING:
    from frame.core.layers.build import Build


@contextmanager
def over_encoder(build: Build) -> Iterator[None]:
    """The layers that are made within it compute the tokens that an encoder reads, with the adapters of these."""
    adapters = build.methods.adapters
    adapters.reads = True
    try:
        yield
    finally:
        adapters.reads = False


class CrossAttention(Attention):
    """Attention over this rank's heads, each with a key and a value of its own, kept in the model's dtype.

    Raises `ValueError` where a model is built to pool, with adapters that know no encoder, or for deterministic steps
    alone, or devices share the tokens of a row.
    """

    def __init__(self, build: Build, prefix: str, num_heads: int, head_dim: int, *, scale: float) -> None:
        if isinstance(build, PoolingBuild):
            raise ValueError(
                "a model with an encoder and a decoder does not pool: leave runner out, so that it generates"
            )
        adapters = type(build.methods.adapters)
        if adapters is not NoAdapters and adapters.prepare_read is Adapters.prepare_read:
            raise ValueError(
                f"the adapter plugin {adapters.__name__} is not for a model with an encoder and a decoder: leave "
                "enable_lora out"
            )
        if build.deterministic:
            raise ValueError(
                "deterministic is not for a model with an encoder and a decoder, since no attention backend gives its "
                "encoder's tokens and what reads them the same bits in every batch: leave it out"
            )
        if max(build.groups.decode_context.size, build.groups.prefill_context.size) > 1:
            raise ValueError(f"{prefix} reads what an encoder gives, which devices cannot share")
        heads = split_evenly(f"the attention heads of {prefix}", num_heads, build.groups.tensor)
        spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            scale=scale,
            dtype=build.dtype,
            kv_dtype=build.dtype,
            block_size=0,
            device_type=build.device_type,
            kind="cross",
            deterministic=build.deterministic,
        )
        super().__init__(build, prefix, spec)

    def kv_spec(self) -> AnyKVSpec | None:
        """The keys and values of each encoder token."""
        spec = self.spec
        dtype = str(spec.kv_dtype).removeprefix("torch.")
        return CrossKV(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, step: ForwardStep) -> Tensor:  # type: ignore[override]
        """query [T, H, D] → [T, H · D]; stores key and value [E, H, D] of the requests that begin in this step."""
        return super().forward(query, key, value, step)
