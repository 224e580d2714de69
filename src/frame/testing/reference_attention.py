"""An attention backend that is the reference ops and nothing else: any feature, any device, slow."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec, GroupBatch, LayerParams


class ReferenceAttention(AttentionBackend):
    """For tests of models and platforms that should not depend on a real backend."""

    takes_head_scales = True

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        against = {
            "only causal attention over a cache": spec.kind != "decoder",
            f"dtype {spec.dtype} is no float": not spec.dtype.is_floating_point,
            f"{spec.num_heads} heads over {spec.num_kv_heads}": spec.num_kv_heads < 1
            or spec.num_heads % spec.num_kv_heads > 0,
            f"head size {spec.head_dim}, block size {spec.block_size}": min(spec.head_dim, spec.block_size) < 1,
            "bits depend on the batch": spec.deterministic,
            "no biases of distances": spec.distances > 0,
            "no log-sum-exps": spec.returns_lse or spec.context.ranks > 1,
        }
        return "; ".join(reason for reason, wrong in against.items() if wrong) or None

    def plan(self, batch: GroupBatch) -> GroupBatch:
        return batch

    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: Any
    ) -> Tensor:
        scales = {"key_scale": layer.key_scale, "value_scale": layer.value_scale}
        self.ops.write_kv(key, value, kv_cache, plan.slot_mapping, **scales)
        return self.ops.paged_attention(
            query,
            kv_cache,
            plan.query_start,
            plan.seq_lens,
            plan.block_table,
            scale=layer.spec.scale,
            window=layer.spec.window,
            soft_cap=layer.spec.soft_cap,
            sinks=layer.sinks,
            alibi_slopes=layer.alibi_slopes,
            **scales,
        )
