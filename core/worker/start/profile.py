"""The largest step, run once before the KV cache is allocated, so that the platform's peak memory includes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...config.checkpoint import Checkpoint
from ...config.tree import FrameConfig
from ...interfaces.attention import GroupBatch, LayerParams
from ...interfaces.latent import IndexSpec, LatentParams
from ...interfaces.model import ForwardStep, ModelInputs
from ...interfaces.platform import Platform
from ...layers.context import own_tokens
from .model_loading import LoadedModel


class NoAttention:
    """Takes the place of a backend while there is no cache: returns zeros of the shape that attention returns."""

    needs_python = False
    takes_head_scales = True

    def plan(self, batch: GroupBatch) -> None:
        """There is nothing to plan."""

    def forward(
        self, layer: LayerParams | LatentParams | IndexSpec, query: Tensor, *rest: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Zeros [T, num_heads, head_dim], and log-sum-exps [T, num_heads] where the layer asks for them."""
        if isinstance(layer, IndexSpec):
            return query.new_zeros((len(query), layer.top_k), dtype=torch.int32)
        if isinstance(layer, LatentParams):
            return torch.zeros_like(layer.expand(rest[0])[1])  # keys and values of prompts take memory
        out = torch.zeros_like(query)
        return (out, torch.zeros_like(query[..., 0], dtype=torch.float32)) if layer.spec.returns_lse else out


@torch.inference_mode()
def profile_step(config: FrameConfig, checkpoint: Checkpoint, loaded: LoadedModel, platform: Platform) -> None:
    """A forward pass of the most tokens, then logits and draws for the most rows, each with all that sampling may add.

    The workspace of attention is left out: it is small beside that of the products. Layers without an attention backend
    compute one row of all tokens, on a cache made for this step.
    """
    num_tokens = min(config.scheduler.max_num_batched_tokens, max(checkpoint.max_model_len, 1) * 64)
    speculation = config.speculation
    draws = 1 + (speculation.num_speculative_tokens if speculation.speculator is not None else 0)
    num_rows = min(config.scheduler.max_num_seqs * draws, num_tokens)
    device, ops = platform.device, platform.ops()
    plans, row = list[Any](), _one_row(num_tokens, device)
    for layer in loaded.build.own_caches.values():
        planner = NoAttention() if layer.backend_spec is not None else layer.planner(None)
        size = kept.block_bytes(0) if (kept := layer.kv_spec()) is not None else 0
        layer.bind(torch.zeros((2, size), dtype=torch.uint8, device=device), None, len(plans), planner)
        plans.append(planner.plan(row))
    ranks = loaded.build.groups.prefill_context  # which divide the tokens among themselves
    ids = own_tokens(torch.zeros(num_tokens, dtype=torch.int32, device=device), ranks)
    positions = own_tokens(torch.arange(num_tokens, device=device) % checkpoint.max_model_len, ranks)
    stage, dtype = loaded.build.stage, loaded.build.dtype
    shape, names = (num_tokens, loaded.build.config.hidden_size), () if stage.first else loaded.model.stage_tensors
    given = {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}
    inputs = ModelInputs(positions.expand(loaded.model.position_axes, -1), ids, stage=given)
    if config.model.enable_prompt_embeds and stage.first:
        rows = torch.zeros((num_tokens, loaded.model.embed_size), dtype=dtype, device=device)
        inputs = replace(inputs, embeds=own_tokens(rows, ranks), given=own_tokens(rows[:, 0] > 0, ranks))
    if any(layer.of_encoder for layer in loaded.build.own_caches.values()):
        inputs = replace(inputs, encoder_ids=ids, encoder_positions=positions)
    step = loaded.model.running.step = ForwardStep(plans=plans, batches=[row] * len(plans))
    hidden = ranks.all_gather(loaded.model(inputs, step), 0)
    if checkpoint.pooling is not None or not stage.last:
        platform.streams().synchronize()
        return
    logits = loaded.model.logits(hidden[:num_rows]).float()
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    scores = logits / 2.0  # what temperature and filters copy
    ops.draw(scores, torch.ones(num_rows, device=device), zeros, zeros)
    platform.streams().synchronize()


def _one_row(num_tokens: int, device: torch.device) -> GroupBatch:
    """All tokens in one row that begins, as a group of states sees it."""
    host = np.array([num_tokens], np.int32)
    return GroupBatch(
        num_tokens=num_tokens,
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_table=torch.ones((1, 1), dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        host_query_lens=host,
        host_seq_lens=host,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
