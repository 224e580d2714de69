"""Layers that models are put together from. They know shards and weights, and no request.

The worker makes and binds the layers of `frame.core.layers`; what models alone use is in this package. The imports
below are the list of names; each is done on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.lazy import lazy_names

if TYPE_CHECKING:
    from frame.core.interfaces.quantization import (
        Rows as Rows,
    )
    from frame.core.layers.attention import (
        Attention as Attention,
    )
    from frame.core.layers.cached import (
        CachedLayer as CachedLayer,
        Planner as Planner,
    )
    from frame.core.layers.embedding import (
        Head as Head,
        VocabEmbedding as VocabEmbedding,
    )
    from frame.core.layers.experts import (
        Experts as Experts,
        PlainExperts as PlainExperts,
    )
    from frame.core.layers.latent import (
        LatentAttention as LatentAttention,
        SparseIndex as SparseIndex,
    )
    from frame.core.layers.linear import (
        AttentionInput as AttentionInput,
        Linear as Linear,
        RowLinear as RowLinear,
    )
    from frame.core.layers.methods import (
        PlainEmbedding as PlainEmbedding,
        PlainLinear as PlainLinear,
    )
    from frame.core.layers.norm import (
        LayerNorm as LayerNorm,
        RMSNorm as RMSNorm,
    )
    from frame.core.layers.weight_slot import (
        WeightSlot as WeightSlot,
    )
    from frame.core.layers.weights import (
        WeightError as WeightError,
        WeightMap as WeightMap,
        load_weights as load_weights,
    )
    from frame.layers.cross import (
        CrossAttention as CrossAttention,
        over_encoder as over_encoder,
    )
    from frame.layers.delta_net import (
        DeltaHeads as DeltaHeads,
        DeltaNetSpec as DeltaNetSpec,
        GatedDeltaNet as GatedDeltaNet,
        GatedHeadNorm as GatedHeadNorm,
    )
    from frame.layers.gated_attention import (
        gated_attention_input as gated_attention_input,
    )
    from frame.layers.heads_norm import (
        HeadsNorm as HeadsNorm,
    )
    from frame.layers.kimi_delta import (
        KimiDeltaAttention as KimiDeltaAttention,
    )
    from frame.layers.lightning import (
        LightningAttention as LightningAttention,
    )
    from frame.layers.mamba1 import (
        MambaMixer as MambaMixer,
        MambaSpec as MambaSpec,
    )
    from frame.layers.mamba2 import (
        Mamba2Mixer as Mamba2Mixer,
        Mamba2Spec as Mamba2Spec,
        step_range as step_range,
    )
    from frame.layers.normed import (
        normed_linear as normed_linear,
        normed_silu_mul as normed_silu_mul,
    )
    from frame.layers.rotary import (
        RotaryEmbedding as RotaryEmbedding,
        rope_frequencies as rope_frequencies,
    )
    from frame.layers.router import (
        Router as Router,
    )
    from frame.layers.short_conv import (
        ShortConv as ShortConv,
    )
    from frame.layers.states import (
        StateLayer as StateLayer,
        StatePlanner as StatePlanner,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
