"""How many tokens and requests a step takes, where the user left that open. Knows no request."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ...config.checkpoint import Checkpoint
from ...config.tree import FrameConfig
from ...plugin_host.model_choice import choose_model
from ...plugin_host.registry import Registry

if TYPE_CHECKING:
    from ...interfaces.platform import Platform

logger = logging.getLogger("frame.engine")


def resolve_budget(config: FrameConfig, checkpoint: Checkpoint, registry: Registry) -> FrameConfig:
    """The configuration with sizes of a step that suit platform and model."""
    asked = config.scheduler.max_num_batched_tokens
    config = _platform_sizes(config, registry)
    return config if checkpoint.pooling is None else _whole_prompts(config, checkpoint, registry, asked)


def _platform_sizes(config: FrameConfig, registry: Registry) -> FrameConfig:
    """The configuration with the platform's batch sizes where the user left them open."""
    scheduler = config.scheduler
    if scheduler.max_num_seqs and scheduler.max_num_batched_tokens:
        return config
    platform: type[Platform] = registry.resolve(
        registry.select("platform", config.executor.platform, lambda platform: platform.probe())
    )
    sizes = {
        "max_num_seqs": scheduler.max_num_seqs or platform.default_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens or platform.default_num_batched_tokens,
    }
    logger.info("max_num_seqs: %d, max_num_batched_tokens: %d", *sizes.values())
    return config.model_copy(update={"scheduler": scheduler.model_copy(update=sizes)})


def _whole_prompts(config: FrameConfig, checkpoint: Checkpoint, registry: Registry, asked: int) -> FrameConfig:
    """The configuration of a pooling engine: prompts in one step where every token of the model sees all others.

    The budget of a step grows to the longest prompt, unless the user has `asked` for one; longer prompts are refused.
    """
    changes: dict[str, Any] = {}
    if choose_model(checkpoint, registry).whole_prompts:
        budget = asked or max(config.scheduler.max_num_batched_tokens, checkpoint.max_model_len)
        changes["scheduler"] = config.scheduler.model_copy(
            update={"enable_chunked_prefill": False, "max_num_batched_tokens": budget}
        )
    executor = config.executor.model_copy(update={"enforce_eager": True})  # no decode step is captured
    return config.model_copy(update={"executor": executor, **changes})
