"""Checks that the plugins and options that a configuration names exist. Builds none of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..config.errors import near
from ..config.leaves import leaves
from .offers import Offer, PluginError
from .plugin_options import read_options

if TYPE_CHECKING:
    from .registry import Registry


#: Settings that name plugins of the engine → kind.
ENGINE_PLUGINS: Mapping[str, str] = MappingProxyType({
    "model_plugin": "model",
    "platform": "platform", "executor": "executor", "scheduling_policy": "scheduler", "attention_backend": "attention",
    "model_source": "source", "load_format": "loader",
    "structured_outputs_backend": "grammar", "pooling_type": "pooler", "metrics_sinks": "sink",
    "kv_connector": "connector", "speculator": "speculator",
})  # fmt: skip
#: The same for the text side; the engine does not use them.
TEXT_PLUGINS: Mapping[str, str] = MappingProxyType({
    "tool_call_parser": "tool-parser", "forced_call_parser": "tool-parser", "reasoning_parser": "reasoning-parser",
})  # fmt: skip


def named_plugins(config: Any, settings: Mapping[str, str] = ENGINE_PLUGINS) -> list[tuple[str, str]]:
    """(kind, name) of every plugin that a configuration names in `settings`; "auto" leaves the choice open."""
    named: list[tuple[str, str]] = []
    for setting, kind in settings.items():
        value = getattr(getattr(config, leaves()[setting].section), setting)
        names = value if isinstance(value, list) else [value]
        named += [(kind, name) for name in names if name is not None]
    return named


def check_named(registry: Registry, config: Any) -> None:
    """Raises `PluginError` for a plugin that `config` chooses by name and that cannot be chosen."""
    for kind, name in (*named_plugins(config), *named_plugins(config, TEXT_PLUGINS)):
        if name != "auto" and (name, kind) != ("none", "tool-parser"):
            registry.choose(kind, name)


def check_options(registry: Registry, config: Any) -> None:
    """Raises `PluginError` for options of a plugin that is not there, or that no plugin of that name takes."""
    owners: dict[str, list[Offer]] = {}
    for offer in registry.offers:
        for name in (offer.provider.name, *offer.provider.aliases):
            owners.setdefault(name, []).append(offer)
    for name in config.plugin:
        if name not in owners:
            raise PluginError(f"no plugin {name!r} to configure{near(name, owners)}; `frame plugins` lists them")
        usable = [offer for offer in owners[name] if offer.problem is None]
        with_options = [offer for offer in usable if offer.provider.options is not None] or usable
        errors = [error for offer in with_options if (error := _wrong_options(offer, config)) is not None]
        if errors and len(errors) == len(with_options):
            raise errors[0]


def _wrong_options(offer: Offer, config: Any) -> PluginError | None:
    try:
        read_options(offer.provider, config, f" of package {offer.package}")
    except PluginError as error:
        return error
    return None
