"""Runs a model without an engine: one sequence, full causal attention over a plain list of keys and values."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.attention import AttentionBackend, LayerParams
from frame.core.interfaces.collectives import Groups, ProcessGroup, SingleGroup
from frame.core.interfaces.model import ForwardStep, Model, ModelInputs
from frame.core.ops import Ops
from frame.core.plugin_host.registry import Registry
from frame.interfaces import (
    BackendSetup,
    Build,
    GroupBatch,
    IndexBackend,
    IndexSpec,
    LatentBackend,
    LatentParams,
    LatentSpec,
    LoaderSetup,
    ModelSetup,
    WeightLoader,
)
from frame.layers import StatePlanner, load_weights
from frame.plugins.loaders.safetensors import SafetensorsLoader


class DenseAttention(AttentionBackend):
    """Keeps keys and values of every layer, and attends to all of them under the causal (windowed) mask."""

    def __init__(self, spec: Any, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        self.past: list[Tensor] = []
        self.newest: Tensor | None = None

    @classmethod
    def supports(cls, spec: Any) -> str | None:
        return None

    def plan(self, batch: Any) -> Any:
        return None

    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: Any
    ) -> Tensor:
        del kv_cache, plan
        spec, new = layer.spec, torch.stack((key, value))
        if key is not self.newest:  # layers that share keys and values give them again
            self.past, self.newest = [torch.cat((*self.past, new), dim=1)], key
        keys, values = self.past[0].repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=2)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        ends = torch.arange(len(keys) - len(query), len(keys))
        distance = ends[:, None] - torch.arange(len(keys))[None, :]
        hidden = distance < 0
        if spec.window:
            hidden |= distance >= spec.window
        if layer.alibi_slopes is not None:
            scores = scores - layer.alibi_slopes[:, None, None] * distance
        if spec.chunk:
            hidden |= ends[:, None] // spec.chunk != torch.arange(len(keys))[None, :] // spec.chunk
        scores = scores.masked_fill(hidden, float("-inf"))
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.to(scores)[:, None, None].expand(-1, len(query), 1)), -1)
        weights = scores.softmax(-1)[..., : len(keys)].to(values.dtype)
        return torch.einsum("hqk,khd->qhd", weights, values)


class DenseLatent(LatentBackend):
    """Keeps the latents of a layer, and expands all of them to attend."""

    def __init__(self, spec: Any, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        self.past = torch.empty(0)

    @classmethod
    def supports(cls, spec: Any) -> str | None:
        return None

    def plan(self, batch: Any) -> Any:
        return None

    def forward(
        self, layer: LatentParams, query: Tensor, latent: Tensor, kv_cache: Tensor, plan: Any, chosen: Tensor | None
    ) -> Tensor:
        del kv_cache, plan
        self.past = torch.cat((self.past.to(latent), latent)) if len(self.past) else latent
        nope, values = layer.expand(self.past)
        turned = self.past[:, None, layer.spec.rank :].expand(-1, layer.spec.num_heads, -1)
        keys = torch.cat((nope, turned), -1)
        hidden = torch.ones(len(query), len(keys)).triu(len(keys) - len(query) + 1).bool()
        if chosen is not None and len(keys) > layer.spec.top_k:
            others = torch.ones(len(query), len(keys) + 1).scatter(1, chosen.long() % (len(keys) + 1), 0.0)
            hidden |= others[:, :-1].bool()
        scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.spec.scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


class DenseIndex(IndexBackend):
    """Keeps the keys of a layer, and scores all of them."""

    def __init__(self, spec: Any, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        self.past = torch.empty(0)

    @classmethod
    def supports(cls, spec: Any) -> str | None:
        return None

    def plan(self, batch: Any) -> Any:
        return None

    def forward(
        self, spec: IndexSpec, query: Tensor, weights: Tensor, key: Tensor, kv_cache: Tensor, plan: Any
    ) -> Tensor:
        del kv_cache, plan
        self.past = torch.cat((self.past.to(key), key)) if len(self.past) else key
        scores = (torch.einsum("qhd,kd->qhk", query, self.past) * spec.scale).relu()
        scores = torch.einsum("qh,qhk->qk", weights, scores)
        hidden = torch.ones(scores.shape).triu(len(self.past) - len(query) + 1).bool()
        best = scores.masked_fill(hidden, float("-inf")).topk(min(spec.top_k, len(self.past)), -1)
        chosen = torch.where(best.values == float("-inf"), -1, best.indices).to(torch.int32)
        return torch.nn.functional.pad(chosen, (0, spec.top_k - chosen.shape[1]), value=-1)


_DENSE = {LatentSpec: DenseLatent, IndexSpec: DenseIndex}


def make_model(
    folder: Path,
    group: ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    groups: Groups | None = None,
    loader: WeightLoader | None = None,
    redundant_experts: int | None = None,
    config: Any = None,
    name: str = "",
) -> Model:
    """The model of a checkpoint, or the plugin `name`, loaded (by `loader`) and bound to dense attention.

    `config` replaces what transformers reads from the folder.
    """
    from transformers import AutoConfig

    config = config or AutoConfig.from_pretrained(folder)
    text = getattr(config, "get_text_config", lambda: config)()
    maker = Build(
        config=text,
        dtype=dtype,
        device=torch.device("cpu"),
        ops=Ops(),
        groups=groups or Groups.of(tensor=group or SingleGroup()),
        kv_dtype=dtype,
        device_type="cpu",
        redundant_experts=redundant_experts,
        max_model_len=0 if hasattr(text, "max_position_embeddings") else 256,
    )
    registry = Registry.load()
    model = registry.make("model", name or config.architectures[0], ModelSetup(maker))
    load_weights(model, loader or SafetensorsLoader(LoaderSetup(folder)))
    for layer in maker.caches.values():
        if layer.backend_spec is None:  # a state: of one request, in block 1, which another request left as it is
            memory = torch.full((2, layer.kv_spec().block_bytes(0)), 0x55, dtype=torch.uint8)
            layer.bind(memory, None, 1, layer.planner(None))
        else:
            kind = _DENSE.get(type(layer.backend_spec), DenseAttention)
            layer.bind(None, None, 0, kind(BackendSetup(layer.backend_spec, maker.ops)))
    return model


def fuse_experts(folder: Path, num_experts: int = 8) -> None:
    """Joins the experts of each layer of a checkpoint in two tensors."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    suffix = ".0.gate_proj.weight"
    for prefix in [name.removesuffix(suffix) for name in tensors if name.endswith(f"experts{suffix}")]:
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(num_experts)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = torch.cat((gate, up), dim=1), down
    save_file(tensors, path)


def one_row(start: int, count: int) -> GroupBatch:
    """Tokens start .. start + count of one request, whose state is in block 1."""
    ends = np.array([start + count], np.int32)
    return GroupBatch(
        num_tokens=count,
        query_start=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.from_numpy(ends),
        block_table=torch.ones((1, 1), dtype=torch.int32),
        slot_mapping=torch.zeros(count, dtype=torch.int64),
        host_query_lens=np.array([count], np.int32),
        host_seq_lens=ends,
        max_query_len=count,
        max_seq_len=start + count,
    )


def run(model: Model, ids: list[int], chunks: list[int], places: Tensor | None = None) -> Tensor:
    """float32 logits [len(ids), vocab_size], computed in steps of the given numbers of tokens.

    `places` [axes, len(ids)] are the tokens' positions where these are not those in the text.
    """
    rows = []
    places = torch.arange(len(ids)).expand(model.position_axes, -1) if places is None else places
    with torch.inference_mode():
        start = 0
        for count in chunks:
            tokens = torch.tensor(ids[start : start + count], dtype=torch.int32)
            states = StatePlanner().plan(one_row(start, count))
            step = ForwardStep(plans=[None, states], batches=[None, None])
            rows.append(model.logits(model(ModelInputs(places[:, start : start + count], tokens), step)))
            start += count
    return torch.cat(rows)
