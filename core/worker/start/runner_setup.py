"""Makes the runner of a worker: its state, buffers and collaborators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from frame.links.encoder_tokens import EncoderTokens

from ...interfaces.adapters import Adapters
from ...interfaces.connector import ConnectorWorker
from ...interfaces.engine import MAX_EMBEDS_BYTES
from ...interfaces.kv import KVLayout
from ...interfaces.logits import LogitsProcessor
from ...interfaces.model import Model
from ...interfaces.platform_steps import Steps
from ...ops.step import StepBuffers
from ..adapters import AdapterSlots
from ..device import Device
from ..lockstep import lockstep_of
from ..pooling.pooling import NullPooling
from ..pooling.setup import make_pooling
from ..sample.sampler import Sampler
from ..sample.shards import vocabulary_of
from ..step.encoder import NoEncoder
from ..step.handover import OwnTokens, PipelineStage, WholeModel
from ..step.prefix_tiles import PrefixTiles
from ..step.prompt_embeds import NoPromptEmbeds, PromptEmbeds
from ..step.request_state import RequestTables
from ..step.runner import Runner
from ..step.speculation import make_speculation
from .attention_binding import BoundLayers
from .open_device import OpenDevice


def make_runner(
    opened: OpenDevice,
    layout: KVLayout,
    model: Model,
    bound: BoundLayers,
    steps: Steps,
    connector: ConnectorWorker,
    processors: Sequence[LogitsProcessor] = (),
    adapters: Adapters | None = None,
) -> Runner:
    """A runner with empty slots on an open device; `adapters` are those that the model's layers were given."""
    config, platform, checkpoint = opened.config, opened.platform, opened.checkpoint
    plan = checkpoint.pooling
    max_slots, max_len = config.scheduler.max_num_seqs, checkpoint.max_model_len
    encodes = any(group.keeps_encoded for group in layout.groups)
    max_blocks = [group.blocks_for(max_len + 1) for group in layout.groups]
    device = Device(
        platform.ops(),
        platform.streams(),
        platform.device,
        shapes=steps.shapes,
        graphs=steps.graphs,
        deterministic=config.model.deterministic,
    )
    tables = RequestTables(device, max_slots, max_len + 1, max_blocks)
    max_tokens = config.scheduler.max_num_batched_tokens
    sampler = Sampler(
        device,
        max_slots,
        checkpoint.vocab_size,
        config.model.logprobs_mode,
        processors,
        vocabulary_of(model, device.ops),
    )
    return Runner(
        device=device,
        model=model,
        layout=layout,
        planners=[one.planner for one in bound.planned],
        plan_groups=[one.group for one in bound.planned],
        tables=tables,
        buffers=StepBuffers.allocate(max_tokens, max_slots, max_blocks, platform.device),
        sampler=sampler,
        speculation=make_speculation(config, opened.registry, device, sampler, tables.token_ids),
        connector=connector,
        pooling=NullPooling() if plan is None else make_pooling(config, plan, model, opened.registry, platform),
        prefixes=PrefixTiles(device, max_slots, bound.prefix_tile_rows or 16),
        stage=_stage(opened, model, device, tables),
        adapters=AdapterSlots(adapters, device, max_slots) if adapters is not None and adapters.max_adapters else None,
        lockstep=lockstep_of(opened.groups.data, steps.shapes, opened.collectives.count),
        embeds=_embeds(opened, model, device),
        encoder=EncoderTokens(device, tables, layout.groups, max_slots, adapters) if encodes else NoEncoder(),
    )


def embed_size(opened: OpenDevice, model: Model) -> int:
    """The length of embeddings that requests may bring, 0 where they may not.

    Raises `ValueError` where the model or the size of steps is not for that.
    """
    config = opened.config
    if not config.model.enable_prompt_embeds:
        return 0
    name = opened.checkpoint.architecture
    if opened.checkpoint.pooling is not None:
        raise ValueError(f"enable_prompt_embeds is for engines that generate, and {name} is served to pool")
    if model.needs_ids:
        raise ValueError(f"enable_prompt_embeds is not for {name}: it reads the ids of tokens beside their embeddings")
    num_bytes = 4 * config.scheduler.max_num_batched_tokens * model.embed_size
    if num_bytes > MAX_EMBEDS_BYTES:
        raise ValueError(
            f"enable_prompt_embeds: the embeddings of a step of max_num_batched_tokens "
            f"{config.scheduler.max_num_batched_tokens} take {num_bytes} bytes, at most {MAX_EMBEDS_BYTES} are sent; "
            f"lower it to {MAX_EMBEDS_BYTES // 4 // model.embed_size}"
        )
    return model.embed_size


def _embeds(opened: OpenDevice, model: Model, device: Device) -> NoPromptEmbeds:
    if not opened.config.model.enable_prompt_embeds or opened.groups.pipeline.rank > 0:
        return NoPromptEmbeds()
    max_tokens = opened.config.scheduler.max_num_batched_tokens
    return PromptEmbeds(device, max_tokens, model.embed_size, getattr(torch, opened.dtype))


def _stage(opened: OpenDevice, model: Model, device: Device, tables: RequestTables) -> WholeModel:
    if opened.groups.prefill_context.size > 1:
        return OwnTokens(opened.groups.prefill_context)
    if opened.groups.pipeline.size == 1:
        return WholeModel()
    return PipelineStage(
        opened.groups,
        device,
        tables.token_ids,
        model.stage_tensors,
        max_tokens=opened.config.scheduler.max_num_batched_tokens,
        hidden_size=model.config.hidden_size,
        dtype=getattr(torch, opened.dtype),
    )
