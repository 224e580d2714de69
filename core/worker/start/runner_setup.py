"""Puts a runner together for one worker: its state, buffers and collaborators. Knows no step."""

from __future__ import annotations

from collections.abc import Sequence

from ...config.checkpoint import Checkpoint
from ...config.tree import FrameConfig
from ...interfaces.attention import AttentionBackend
from ...interfaces.connector import ConnectorWorker
from ...interfaces.kv import KVLayout
from ...interfaces.logits import LogitsProcessor
from ...interfaces.model import Model
from ...interfaces.platform import Platform, Steps
from ...ops.step import StepBuffers
from ...plugin_host.registry import Registry
from ..pooling.pooling import NullPooling
from ..pooling.setup import make_pooling
from ..sample.sampler import Sampler
from ..step.prefix_tiles import PrefixTiles
from ..step.request_state import BlockTables, RequestState
from ..step.runner import Device, Runner
from ..step.speculation import make_speculation


class RunnerSetup:
    """What all runners of a worker have in common."""

    def __init__(self, config: FrameConfig, registry: Registry, platform: Platform, checkpoint: Checkpoint) -> None:
        self._config = config
        self._registry = registry
        self._platform = platform
        self._checkpoint = checkpoint

    def make(
        self,
        layout: KVLayout,
        model: Model,
        backends: Sequence[AttentionBackend],
        steps: Steps,
        connector: ConnectorWorker,
        processors: Sequence[LogitsProcessor],
    ) -> Runner:
        """A runner with empty slots."""
        config, platform, checkpoint = self._config, self._platform, self._checkpoint
        ops, streams, device = platform.ops(), platform.streams(), platform.device
        max_slots, block_size = config.scheduler.max_num_seqs, layout.block_size
        max_len = checkpoint.max_model_len
        state = RequestState(max_slots, max_len + 1, ops=ops, streams=streams, shapes=steps.shapes, device=device)
        max_blocks = -(-(max_len + 1) // block_size)
        tables = BlockTables(
            len(layout.groups), max_slots, max_blocks, ops=ops, streams=streams, shapes=steps.shapes, device=device
        )
        max_tokens = config.scheduler.max_num_batched_tokens
        buffers = StepBuffers.allocate(max_tokens, max_slots, max_blocks, len(layout.groups), device)
        sampler = Sampler(
            ops=ops,
            streams=streams,
            device=device,
            max_slots=max_slots,
            vocab_size=checkpoint.vocab_size,
            logprobs_mode=config.model.logprobs_mode,
            processors=processors,
            shapes=steps.shapes,
        )
        speculation = make_speculation(
            config, self._registry, sampler, state.token_ids, ops=ops, streams=streams, device=device
        )
        sharing = [backend for backend in backends if backend.shares_prefixes]
        return Runner(
            device=Device(ops, streams, steps.shapes, steps.graphs, device, config.model.deterministic),
            model=model,
            layout=layout,
            backends=backends,
            state=state,
            tables=tables,
            buffers=buffers,
            sampler=sampler,
            speculation=speculation,
            connector=connector,
            pooling=self._make_pooling(model),
            prefixes=PrefixTiles(max_slots, streams, device, next((one.prefix_tile_rows for one in sharing), 16)),
        )

    def _make_pooling(self, model: Model) -> NullPooling:
        plan = self._checkpoint.pooling
        if plan is None:
            return NullPooling()
        return make_pooling(self._config, plan, model, self._registry, self._platform)
