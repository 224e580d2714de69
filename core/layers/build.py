"""`Build`: hands a model its parts, for one rank. Knows no model, no format of weights and no checkpoint file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frame.weight_offload.null import NoOffload

from ..interfaces.adapters import NoAdapters
from ..interfaces.attention import AttentionKind, AttentionSpec
from ..interfaces.collectives import Groups, SingleGroup
from ..interfaces.experts import ExpertExchange, ExpertSpec
from ..interfaces.latent import IndexSpec, LatentSpec
from ..interfaces.model import Model, RunningStep, Shard
from ..ops import Ops
from .attention import Attention
from .cached import CachedLayer
from .context import shared_context
from .embedding import Head, VocabEmbedding, VocabRows
from .experts import Experts
from .latent import LatentAttention, SparseIndex
from .linear import AttentionInput, Linear, RowLinear, Rows, empty_parameter, local_kv_heads, split_evenly
from .methods import Methods
from .norm import LayerNorm, RMSNorm
from .stages import AbsentLayer, Layers, Stage, StageEnd, split_layers
from .weights import WeightMap


@dataclass(kw_only=True)
class Build:
    """Makes the parts of a model. `prefix` is a part's name in the checkpoint ("model.layers.0.mlp.gate_proj").

    All sizes are those of the whole model, whatever share of it a worker has. A part that fuses several checkpoint
    tensors names them in `parts` (name → output size), relative to `prefix`.

    `config` is the Hugging Face configuration object of the (text) model. `max_model_len` counts the tokens of the
    longest request, prompt and output, which is the length of position tables; 0 is what the checkpoint says. `caches`
    holds every layer with a cache by its name, those of other stages too, in the order in which they were made.
    `own_caches` are those of this stage. `pipeline_layers` are the layers of each pipeline stage; empty: evenly.
    `exchange` makes what moves the tokens of a layer of experts, with so many slots on each rank, between data ranks;
    None where each rank has all tokens. Where experts are balanced, each layer has `redundant_experts` more slots than
    experts; else that is None.
    `methods` gives each layer who holds its weights and multiplies by them, `offload` keeps some in host memory.
    """

    config: Any
    dtype: torch.dtype
    device: torch.device
    ops: Ops
    groups: Groups
    kv_dtype: torch.dtype
    device_type: str
    state_dtype: torch.dtype = torch.float32
    deterministic: bool = False
    max_model_len: int = 0
    pipeline_layers: Sequence[int] = ()
    exchange: Callable[[ExpertSpec, int], ExpertExchange] | None = None
    redundant_experts: int | None = None
    methods: Methods = field(default_factory=Methods)
    offload: NoOffload = field(default_factory=NoOffload)
    running: RunningStep = field(default_factory=RunningStep, init=False)
    caches: dict[str, CachedLayer] = field(default_factory=dict, init=False)
    own_caches: dict[str, CachedLayer] = field(default_factory=dict, init=False)
    _elsewhere: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.max_model_len <= 0:
            self.max_model_len = int(getattr(self.config, "max_position_embeddings", 2048))  # states have no limit

    def weights(self, model: Model) -> WeightMap:
        """Returns what loads `model`; called once, when all its layers exist and its first tensors arrive."""
        return WeightMap(model)

    def layers(self, count: int, make: Callable[[int], nn.Module]) -> nn.ModuleList:
        """Returns `make(i)` for the layers of this pipeline stage, in order; those of other stages have no memory."""
        group = self.groups.pipeline
        here = split_layers(count, group.size, self.pipeline_layers)[group.rank]
        present, absent = list[nn.Module](), list[nn.Module]()
        for index in range(count):  # in one order, so that the layers with a cache have one order on all ranks
            if index in here:
                present.append(self.offload.layer(make(index), len(here)))
            else:
                with self._without_memory():
                    absent.append(make(index))
        return Layers(present, here.start, absent)

    @property
    def stage(self) -> Stage:
        """Which stage is built: a model embeds tokens in the first one only, and norms its result in the last one."""
        group = self.groups.pipeline
        return Stage(group.rank == 0, group.rank == group.size - 1)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Parts that are made within the context are of another stage: on the meta device."""
        device, self.device, self._elsewhere = self.device, torch.device("meta"), True
        try:
            yield
        finally:
            self.device, self._elsewhere = device, False

    def add_cache(self, layer: CachedLayer) -> None:
        """Called by each layer with a cache when it is made; raises `ValueError` where another has its name.

        Also for layers that need all tokens of a step where devices divide these among themselves.
        """
        if self.groups.prefill_context.size > 1 and not isinstance(layer, Attention):
            raise ValueError(f"{layer.name} is a {type(layer).__name__}, which needs all tokens of a prompt")
        if layer.name in self.caches:
            raise ValueError(f"two layers with a cache are called {layer.name!r}")
        self.caches[layer.name] = layer
        if not self._elsewhere:
            self.own_caches[layer.name] = layer

    def linear(
        self,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        shard: Shard | None = None,
        parts: Mapping[str, int] | None = None,
        pieces: Sequence[int] = (),
        transposed: bool = False,
        reduce: bool = True,
        exact: bool = False,
    ) -> nn.Module:
        """Returns y = x Wᵀ + b. "column" shards the outputs, "row" shards the inputs and sums over the tensor group.

        `pieces` are the sizes of what one checkpoint tensor joins, each sharded by itself. `transposed`: the checkpoint
        stores W as [in, out]. Without `reduce`, "row" gives each rank its part of the sum, which a `partial` norm, or
        another sum, must complete. `exact`: what the layer gives decides what is computed next, as a router's logits.
        """
        if shard == "row":
            if joined := list(parts or pieces):
                raise ValueError(f"{prefix}: a row-sharded layer cannot be put together from parts {joined}")
            width = split_evenly(f"the inputs of {prefix}", in_features, self.groups.tensor)
            columns = slice(self.groups.tensor.rank * width, (self.groups.tensor.rank + 1) * width)
            whole = [Rows(prefix, out_features, 0, out_features)]
            layer = RowLinear(self, whole, in_features, columns, bias=bias, transposed=transposed, exact=exact)
            layer.reduces = reduce
            return layer
        group = self.groups.tensor if shard == "column" else SingleGroup()
        sizes = list(parts.values() if parts else pieces or (out_features,))
        if sum(sizes) != out_features:
            raise ValueError(
                f"{prefix}: the parts {dict(parts or {}) or sizes} do not add up to {out_features} outputs"
            )
        rows = list[Rows]()
        names = [f"{prefix}.{name}" for name in parts] if parts else [prefix] * len(sizes)
        for name, base, size in zip(names, accumulate(sizes, initial=0), sizes, strict=False):
            count = split_evenly(f"the outputs of {name}", size, group)
            total, start = (size, 0) if parts else (out_features, base)
            rows.append(Rows(name, total, start + group.rank * count, count))
        columns = slice(0, in_features)
        return Linear(self, rows, in_features, columns, bias=bias, transposed=transposed, exact=exact)

    def attention_input(
        self,
        prefix: str,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        transposed: bool = False,
        groups: int = 1,
        order: str = "qkv",
    ) -> nn.Module:
        """Returns the fused query, key and value projection, sharded by heads.

        It maps [T, hidden_size] to (q, k, v), each [T, heads, head_dim]. With one entry in `names` the checkpoint holds
        one fused tensor: as many `groups`, one behind the other, each with its equal share of the heads of all three,
        in this `order`. So 1 group is all queries, all keys and all values, `num_kv_heads` groups have the queries of a
        key head beside it.
        """
        return AttentionInput(
            self, prefix, hidden_size, num_heads, num_kv_heads, head_dim,
            bias=bias, names=names, transposed=transposed, groups=groups, order=order,
        )  # fmt: skip

    def attention(
        self,
        prefix: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        soft_cap: float = 0.0,
        sinks: bool = False,
        alibi_slopes: Tensor | None = None,
        distance_bias: Tensor | None = None,
        kind: AttentionKind = "decoder",
    ) -> Attention:
        """Returns attention over this rank's heads.

        "decoder" is causal and has a KV cache; "encoder_only", for models with `whole_prompts`, lets each token see all
        tokens of its row and keeps nothing. So does "encoder", of the tokens that an encoder before a decoder reads.
        `distance_bias` [this rank's heads, 2 N + 1] is as `LayerParams` tells.
        """
        heads = split_evenly(f"the attention heads of {prefix}", num_heads, self.groups.tensor)
        mine = slice(self.groups.tensor.rank * heads, (self.groups.tensor.rank + 1) * heads)
        spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=local_kv_heads(prefix, num_kv_heads, self.groups.tensor)[0],
            head_dim=head_dim,
            scale=scale,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            block_size=0,
            device_type=self.device_type,
            kind=kind,
            window=window,
            chunk=chunk,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi=alibi_slopes is not None,
            distances=0 if distance_bias is None else distance_bias.shape[1] // 2,
            deterministic=self.deterministic,
        )
        spec = replace(spec, kv_dtype=self.methods.kv_dtype(prefix, spec))
        first = (mine.start - heads * self.groups.decode_context.rank) * num_kv_heads // num_heads
        return Attention(
            self,
            prefix,
            spec,
            sinks=empty_parameter(self, heads) if sinks else None,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes[mine].to(self.device, torch.float32),
            distance_bias=distance_bias,
            head_slice=mine,
            total_heads=num_heads,
            kv_heads=(first, num_kv_heads),
            context=shared_context(prefix, spec, num_kv_heads, self.groups, self.ops, self.running),
        )

    def latent_attention(
        self,
        prefix: str,
        num_heads: int,
        *,
        rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        scale: float,
        top_k: int = 0,
        up: str = "kv_b_proj",
    ) -> LatentAttention:
        """Returns latent attention over this rank's heads, with what makes keys and values of latents, "PREFIX.UP".

        That has for each head `nope_dim` rows of the key, then `value_dim` of the value. With `top_k` each token
        attends to that many others at most, which `sparse_index` chooses.
        """
        spec = LatentSpec(
            num_heads=split_evenly(f"the attention heads of {prefix}", num_heads, self.groups.tensor),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=value_dim,
            rank=rank,
            scale=scale,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            block_size=0,
            device_type=self.device_type,
            top_k=top_k,
            deterministic=self.deterministic,
        )
        adapted = self.methods
        self.methods = replace(adapted, adapters=NoAdapters())  # it is multiplied with others once, as it is loaded
        linear = self.linear(f"{prefix}.{up}", rank, num_heads * (nope_dim + value_dim), shard="column")
        self.methods = adapted
        return LatentAttention(self, prefix, spec, linear)

    def sparse_index(self, prefix: str, num_heads: int, head_dim: int, *, top_k: int, scale: float) -> SparseIndex:
        """Returns what chooses the `top_k` tokens that each token attends to; every rank has all of it."""
        spec = IndexSpec(
            num_heads, head_dim, top_k, scale, self.dtype, self.kv_dtype, 0, self.device_type, self.deterministic
        )
        return SparseIndex(self, prefix, spec)

    def embedding(self, prefix: str, num_embeddings: int, dim: int, *, shard: bool = True) -> nn.Module:
        """Returns the embedding of tokens or positions, ids [T] → [T, dim], sharded over the vocabulary.

        Only the first pipeline stage has one; in others calling it raises `RuntimeError`.
        """
        if self.stage.first:
            return VocabEmbedding(self, prefix, num_embeddings, dim, shard=shard)
        with self._without_memory():
            slots = VocabEmbedding(self, prefix, num_embeddings, dim, shard=shard).weight_slots
        return AbsentLayer(prefix, slots, num_embeddings=num_embeddings, dim=dim, shard=shard)

    def head(
        self, prefix: str, hidden_size: int, vocab_size: int, *, tied: nn.Module | None = None, bias: bool = False
    ) -> nn.Module:
        """Returns the output projection [N, hidden_size] → [N, vocab_size]; `tied` shares an embedding's weights.

        Only the last pipeline stage has one, and loads the weights of an embedding that is in another stage itself.
        """
        with nullcontext() if self.stage.last else self._without_memory():
            table = VocabEmbedding(self, tied.prefix, **tied.options) if isinstance(tied, AbsentLayer) else tied
            head = Head(self, prefix, hidden_size, vocab_size, tied=table, bias=bias)
        if self.stage.last:
            return head
        own: list[Head | VocabRows] = [head] if tied is not None else [head, head.table]
        return AbsentLayer(prefix, lambda: [slot for part in own for slot in part.weight_slots()])

    def norm(
        self,
        prefix: str,
        dim: int,
        *,
        eps: float,
        kind: Literal["rms", "layer"] = "rms",
        offset: float = 0.0,
        partial: bool = False,
        bias: bool = True,
    ) -> nn.Module:
        """Returns an RMSNorm (weight + `offset`), or a LayerNorm, with or without `bias`.

        An RMSNorm that is called with a residual adds it first, and returns (normed, sum). `partial`: what it is called
        with beside a residual is each rank's part of a sum over the tensor group, which it completes.
        """
        if kind == "layer":
            if partial:
                raise ValueError(f"{prefix}: only an RMS norm completes a sum over ranks")
            return LayerNorm(self, prefix, dim, eps, bias=bias)
        return RMSNorm(self, prefix, dim, eps, offset, partial=partial)

    def final_norm(
        self,
        prefix: str,
        dim: int,
        *,
        eps: float,
        kind: Literal["rms", "layer"] = "rms",
        offset: float = 0.0,
        partial: bool = False,
        bias: bool = True,
    ) -> nn.Module:
        """Returns what follows a model's layers: in the last pipeline stage `norm`, in others what completes sums."""
        if self.stage.last:
            return self.norm(prefix, dim, eps=eps, kind=kind, offset=offset, partial=partial, bias=bias)
        with self._without_memory():
            norm = self.norm(prefix, dim, eps=eps, kind=kind, offset=offset, partial=partial, bias=bias)
        return StageEnd(norm, self.groups.tensor if partial else SingleGroup())

    def experts(
        self, prefix: str, spec: ExpertSpec, shared: nn.Module | None = None, *, reduce: bool = True
    ) -> nn.Module:
        """Returns routed experts: (hidden [T, H], `Routing`) → [T, H]; `reduce` is as for `linear`.

        What `shared` gives for hidden is added. It must be a rank's part of a sum over the tensor group, as of a "row"
        layer that does not reduce.
        """
        layer = Experts(self, prefix, spec, shared)
        layer.reduces = reduce
        return layer
