"""A worker's device, opened for one checkpoint. Knows no weights and no KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from frame.transfers.children import maker

from ...config.checkpoint import Checkpoint, read_checkpoint
from ...config.tree import FrameConfig
from ...interfaces.collectives import Collectives, Groups, NoCollectives
from ...interfaces.connector import ConnectorWorker, NullConnectorWorker
from ...interfaces.kv import KVLayout
from ...interfaces.mesh import Placement
from ...interfaces.platform import Platform, PlatformSpec
from ...interfaces.platform_steps import Steps
from ...parallel.groups import make_groups, unconnected_groups
from ...plugin_host.registry import Registry
from ...plugin_host.setups import connector_worker_setup, platform_setup
from .model_loading import resolve_dtype
from .steps_key import steps_key


@dataclass(frozen=True)
class OpenDevice:
    """What all phases of a start share. `not_deterministic` says why the platform cannot run deterministic steps.

    `groups` have no peers until `connected`.
    """

    config: FrameConfig
    registry: Registry
    placement: Placement
    engine_id: str
    checkpoint: Checkpoint
    platform: Platform
    steps: Steps
    dtype: str
    groups: Groups = field(default_factory=Groups.single)
    collectives: Collectives = field(default_factory=NoCollectives)
    not_deterministic: str = ""

    def connected(self) -> OpenDevice:
        """With the process groups of the worker's mesh; all its workers must call this at the same time."""
        if self.placement.mesh.size == 1:
            return self
        collectives = self.platform.collectives(self.placement)
        try:
            return replace(self, collectives=collectives, groups=make_groups(self.placement, collectives))
        except BaseException:
            collectives.close()
            raise

    def connector(self, layout: KVLayout, name: str | None) -> ConnectorWorker:
        """The worker side of the KV connector `name`, or the null object."""
        config, max_model_len = self.config, self.checkpoint.max_model_len
        setup = connector_worker_setup(config, max_model_len, layout, self.placement, self.platform, self.engine_id)
        if name is None:
            return NullConnectorWorker(setup)
        setup = replace(setup, make=maker(self.registry, config))
        connector: ConnectorWorker = self.registry.make("connector", name, setup, config, part="worker")
        return connector


def open_device(config: FrameConfig, registry: Registry, placement: Placement, engine_id: str) -> OpenDevice:
    """Chooses the platform and makes the device this worker's; raises `ValueError` when it cannot serve `config`."""
    checkpoint = read_checkpoint(config)
    key = steps_key(config, checkpoint, placement)
    platform = choose_platform(config, registry, checkpoint.max_model_len, placement, key)
    dtype, deterministic = resolve_dtype(config, checkpoint, platform), config.model.deterministic
    reason = platform.supports(PlatformSpec(dtype, world_size=placement.mesh.size, deterministic=deterministic))
    name = platform.setup.plugin or platform.device_type
    if reason:
        raise ValueError(f"platform {name!r} cannot serve this configuration: {reason}")
    torch.manual_seed(config.model.seed)
    refused = platform.supports(PlatformSpec(dtype, deterministic=True))
    reason = f"platform {name!r}: {refused}" if refused else ""
    if config.expert_balance.enable_eplb:
        if len(placement.mesh.ranks("expert", placement.rank)) == 1:
            raise ValueError("enable_eplb needs several devices: set tensor_parallel_size or data_parallel_size")
        reason = "enable_eplb: sums depend on where experts lie"
    return OpenDevice(
        config=config,
        registry=registry,
        placement=placement,
        engine_id=engine_id,
        checkpoint=checkpoint,
        platform=platform,
        steps=platform.steps(),
        dtype=str(dtype).removeprefix("torch."),
        groups=unconnected_groups(placement),
        not_deterministic=reason,
    )


def choose_platform(
    config: FrameConfig, registry: Registry, max_model_len: int, placement: Placement, steps_key: str = ""
) -> Platform:
    """The platform asked for, or the preferred one that this machine has; raises with every candidate's reason."""
    provider = registry.select("platform", config.executor.platform, lambda platform: platform.probe())
    setup = platform_setup(config, max_model_len, placement, steps_key)
    platform: Platform = registry.make("platform", provider, setup, config)
    return platform
