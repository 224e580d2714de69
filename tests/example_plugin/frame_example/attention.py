"""An attention backend: keys and values block by block, attention row by row through frame's reference op."""

from __future__ import annotations

from torch import Tensor

from frame.interfaces import AttentionBackend, AttentionSpec, GroupBatch, LayerParams


class PlainAttention(AttentionBackend):
    """Slow and short. `plan` has nothing to prepare, so the batch itself is the plan."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        reasons = []
        if spec.kind != "decoder":
            reasons.append(f"{spec.kind} attention is not supported")
        if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} key/value heads")
        if spec.head_dim < 1:
            reasons.append(f"head size {spec.head_dim} is not supported")
        if spec.deterministic:
            reasons.append("deterministic is not supported")
        if spec.returns_lse:
            reasons.append("log-sum-exps are not supported")
        if spec.distances:
            reasons.append("biases of distances are not supported")
        for what, dtype in (("dtype", spec.dtype), ("cache dtype", spec.kv_dtype)):
            if not dtype.is_floating_point or dtype.itemsize < 2:
                reasons.append(f"{what} {dtype} is not supported")
        return "; ".join(reasons) or None

    def plan(self, batch: GroupBatch) -> GroupBatch:
        return batch

    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: GroupBatch
    ) -> Tensor:
        self.ops.write_kv(key, value, kv_cache, plan.slot_mapping)
        out: Tensor = self.ops.paged_attention(
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
        )
        return out
