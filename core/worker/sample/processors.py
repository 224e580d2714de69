"""Builds the logits processors of a worker, those written for vLLM in adapters. Knows no logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ...config.tree import FrameConfig
from ...interfaces.logits import LogitsProcessor
from ...interfaces.setup import ProcessorSetup
from ...plugin_host.isolation import tried
from ...plugin_host.logits_processors import FoundProcessor, is_named, processor_classes
from ...plugin_host.registry import Registry


def load_processors(config: FrameConfig, registry: Registry, device: torch.device) -> list[LogitsProcessor]:
    """Builds the processors of a worker: all that packages offer, in order of preference, then the configured ones.

    Raises `PluginError` when one cannot be imported and `ValueError` when it is no logits processor.
    """
    setup = ProcessorSetup(device, config.scheduler.max_num_seqs)
    processors = []
    for found in processor_classes(config, registry):
        build = partial(_build, found, setup)
        if found.provider is None:
            processors.append(build())
        elif one := tried(registry, found.provider, build, named=is_named(found.provider, config)):
            processors.append(one)
    return processors


def _build(found: FoundProcessor, setup: ProcessorSetup) -> LogitsProcessor:
    kind, setup = found.kind, replace(setup, plugin=found.name)
    made: LogitsProcessor = kind(setup, found.options) if issubclass(kind, LogitsProcessor) else kind.adapted(setup)
    return made
