"""What plugins of each kind are built with in tests, where no engine is there to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.mesh import Placement
from frame.core.interfaces.setup import (
    AdapterResolverSetup,
    AdapterSetup,
    BackendSetup,
    ExchangeSetup,
    LoaderSetup,
    ModelSetup,
    ParserSetup,
    PoolerSetup,
    ProcessorSetup,
    QuantizationSetup,
    Setup,
    SourceSetup,
    SpeculatorSetup,
    TokenizerSetup,
    WorkerExtensionSetup,
)
from frame.core.plugin_host.kinds import KINDS
from frame.core.plugin_host.setups import (
    connector_setup,
    connector_worker_setup,
    endpoint_setup,
    engine_setup,
    executor_setup,
    grammar_setup,
    platform_setup,
)
from frame.tiers.policy import TierPolicySetup
from frame.transfers.children import maker

if TYPE_CHECKING:
    from frame.core.interfaces.platform import Platform
    from frame.core.plugin_host.registry import Registry

_MAX_MODEL_LEN = 96
_NUM_SEQS = 8
_NUM_TOKENS = 64


def make_setup(kind: str, *, part: str = "", config: FrameConfig | None = None, **changes: Any) -> Any:
    """The setup of a plugin of this kind ("platform", "attention", …), its fields as `config` says, but for `changes`.

    `part` is "worker" for a connector's worker side. Sizes that nothing says are small, and the device is the CPU. What
    nobody else can make must be among the changes: the `spec` of an attention backend, the `build` of a model, the
    `workers` of an executor, the `vocabulary` of a grammar backend. Raises `ValueError` for a kind that there is not.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind of plugin {kind!r}; there are: {', '.join(KINDS)}")
    made = _engine_side(kind, part, _sized(config or FrameConfig()), changes) or _others(kind, config, changes)
    return replace(made, **changes)


def _sized(config: FrameConfig) -> FrameConfig:
    scheduler = config.scheduler
    sizes = {
        "max_num_seqs": scheduler.max_num_seqs or _NUM_SEQS,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens or _NUM_TOKENS,
    }
    return config.model_copy(update={"scheduler": scheduler.model_copy(update=sizes)})


def _engine_side(kind: str, part: str, config: FrameConfig, changes: dict[str, Any]) -> Setup | None:
    """For kinds whose setup holds the engine's facts."""
    layout = changes.get("layout") or KVLayout(groups=(), pools=(1,), block_size=1, grain=1)
    match kind, part:
        case "scheduler", "":
            return engine_setup(config, _MAX_MODEL_LEN)
        case "platform", "":
            return platform_setup(config, _MAX_MODEL_LEN, Placement())
        case "executor", "":
            return executor_setup(config, _MAX_MODEL_LEN, [Placement()], changes["workers"])
        case "connector", "":
            made = connector_setup(config, _MAX_MODEL_LEN, layout, "engine-under-test")
            return replace(made, make=_maker(config))
        case "connector", "worker":
            platform = _cpu(config)
            beside = connector_worker_setup(
                config, _MAX_MODEL_LEN, layout, Placement(), platform, engine_id="engine-under-test"
            )
            return replace(beside, make=_maker(config))
    return None


def _maker(config: FrameConfig) -> Callable[..., Any]:
    def make(*arguments: Any) -> Any:
        return maker(_registry(), config)(*arguments)

    return make


def _cpu(config: FrameConfig) -> Platform:
    setup = platform_setup(config, _MAX_MODEL_LEN, Placement())
    platform: Platform = _registry().make("platform", "frame-llm:cpu", setup)
    return platform


def _registry() -> Registry:
    from frame.core.plugin_host.registry import Registry

    return Registry.load()


def _others(kind: str, config: FrameConfig | None, changes: dict[str, Any]) -> Setup:
    config = config or FrameConfig()
    match kind:
        case "endpoint":
            from .fake_serving import FakeServing

            return endpoint_setup(config, changes.get("serving") or FakeServing())
        case "grammar":
            return grammar_setup(config, changes["vocabulary"])
        case "tool-parser" | "reasoning-parser":
            return ParserSetup()
        case "source":
            return SourceSetup(config.load.download_dir, config.load.offline)
        case "tier-policy":
            return TierPolicySetup(num_blocks=16)
        case "balancer" | "command" | "sink" | "route-policy":
            return Setup()
        case "adapter-resolver":
            return AdapterResolverSetup(config.model.model)
        case "model":
            return ModelSetup(changes["build"])
        case "tokenizer":
            return TokenizerSetup(changes.get("folder", Path()))
        case "loader":
            return LoaderSetup(changes.get("folder", Path()), seed=config.model.seed)
    return _on_device(kind, config, changes)


def _on_device(kind: str, config: FrameConfig, changes: dict[str, Any]) -> Setup:
    """For kinds whose parts need torch."""
    import torch

    from frame.core.ops import Ops

    cpu = torch.device("cpu")
    match kind:
        case "adapters":
            return AdapterSetup(
                max_adapters=2, max_rank=8, max_num_tokens=_NUM_TOKENS, device=cpu, dtype=torch.float32, ops=Ops()
            )
        case "exchange":
            return ExchangeSetup(changes["spec"], changes["groups"])
        case "extension":
            platform = _cpu(_sized(config))
            return WorkerExtensionSetup(Placement(), changes["model"], platform.device, platform.streams())
        case "quantization":
            return QuantizationSetup(changes["spec"])
        case "attention":
            return BackendSetup(changes["spec"], Ops())
        case "speculator":
            return SpeculatorSetup(config.speculation.num_speculative_tokens, Ops(), cpu)
        case "processor":
            return ProcessorSetup(cpu, _NUM_SEQS)
        case _:
            return PoolerSetup(_NUM_SEQS, 16, cpu, Ops(), torch.tensor, config.pooler.step_tag_id)
