"""DeepSeek V3.2 and GLM-5: DeepSeek V3 whose tokens attend to the few others that a small index chooses for each."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, ModelSetup
from frame.layers import RotaryEmbedding

from .deepseek import DeepseekDecoder, sigmoid_router
from .latent import Choose, LatentAttentionBlock, latent_rotary

#: Of the norm of the index's keys, whatever `rms_norm_eps` says.
_KEY_EPS = 1e-6


class DeepseekV32ForCausalLM(DeepseekDecoder):
    """The index turns the halves of its heads' first part, where attention turns neighbours."""

    #: whether the index turns neighbours as well
    index_interleaved = False

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        config, indexes = setup.build.config, dict[int, Index]()
        index_rotary = latent_rotary(setup.build, interleaved=self.index_interleaved)

        def attention(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
            choose = _choose(build, f"{prefix}.indexer", index, index_rotary, indexes)
            bias, top_k = bool(config.attention_bias), config.index_topk
            block = LatentAttentionBlock(build, prefix, rotary, bias=bias, top_k=top_k, choose=choose)
            if isinstance(choose, Shared):
                choose.check(build, block.attention.name)
            return block

        super().__init__(setup, options, router=sigmoid_router(config), interleaved=True, attention=attention)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """Layers may share the choice of the layer before."""

    index_interleaved = True


class Index(nn.Module):
    """Small queries from the queries' latent, one key a token, and a weight for each of the `index_n_heads`."""

    def __init__(self, build: Build, prefix: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        config = build.config
        self.heads, self.dim, self.rotary = config.index_n_heads, config.index_head_dim, rotary
        self.query = build.linear(f"{prefix}.wq_b", config.q_lora_rank, self.heads * self.dim)
        parts = {"wk": self.dim, "weights_proj": self.heads}
        self.inputs = build.linear(prefix, config.hidden_size, sum(parts.values()), parts=parts)
        self.key_norm = build.norm(f"{prefix}.k_norm", self.dim, eps=_KEY_EPS, kind="layer")
        self.choice = build.sparse_index(prefix, self.heads, self.dim, top_k=config.index_topk, scale=self.dim**-0.5)
        #: of the step that was computed last, for layers that share it
        self.chosen: Tensor | None = None

    def forward(self, normed: Tensor, latent: Tensor | None, positions: Tensor, step: ForwardStep) -> Tensor:
        """int32 [T, index_topk] for what attention reads [T, hidden_size] and the queries' latent."""
        if latent is None:
            raise ValueError("the index of sparse attention needs q_lora_rank")
        query = self.query(latent).unflatten(-1, (self.heads, self.dim))
        key, weights = self.inputs(normed).split([self.dim, self.heads], -1)
        query, key = self.rotary(positions, query, self.key_norm(key).unsqueeze(1))
        chosen: Tensor = self.choice(query, weights * self.heads**-0.5, key.squeeze(1), step)
        self.chosen = chosen
        return chosen


class Shared:
    """What an earlier layer chose."""

    def __init__(self, source: Index) -> None:
        self._source = source

    def check(self, build: Build, attention: str) -> None:
        """Raises `ValueError` where the layer `attention` is in another pipeline stage than the one that chooses."""
        name = self._source.choice.name
        if (name in build.own_caches) != (attention in build.own_caches):
            raise ValueError(
                f"{attention} shares the choice of {name}, which is in another pipeline stage: divide the layers so "
                "that each stage begins with a layer that has an index"
            )

    def __call__(self, normed: Tensor, latent: Tensor | None, positions: Tensor, step: ForwardStep) -> Tensor:
        del normed, latent, positions, step
        if self._source.chosen is None:
            raise RuntimeError("an index that is shared was not asked before")
        return self._source.chosen


def _choose(build: Build, prefix: str, index: int, rotary: RotaryEmbedding, indexes: dict[int, Index]) -> Choose:
    """The index of layer `index`, or where it has none of its own that of the layer before; both add to `indexes`."""
    kinds = getattr(build.config, "indexer_types", None)
    if kinds is None or kinds[index] == "full":
        made = indexes[index] = Index(build, prefix, rotary)
        return made
    if kinds[index] != "shared" or index - 1 not in indexes:
        raise ValueError(f"indexer_types[{index}] is {kinds[index]!r}: full, or shared behind a layer with an index")
    source = indexes[index] = indexes[index - 1]
    return Shared(source)
