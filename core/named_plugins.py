"""The plugins that a configuration names and sets up, and whether they are there. Builds none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config.errors import near
from .offers import Offer, PluginError
from .plugin_options import read_options

if TYPE_CHECKING:
    from .registry import Registry


def named_plugins(config: Any) -> list[tuple[str, str]]:
    """(kind, name) of every plugin that a configuration names; "auto" leaves the choice open."""
    named = [
        ("platform", config.executor.platform),
        ("executor", config.executor.executor),
        ("scheduler", config.scheduler.scheduling_policy),
        ("attention", config.attention.attention_backend),
        ("loader", config.load.load_format),
        ("grammar", config.structured_outputs.structured_outputs_backend),
        ("pooler", config.pooler.pooling_type),
    ]
    named += [("sink", name) for name in config.observability.metrics_sinks]
    if config.transfer.kv_connector is not None:
        named.append(("connector", config.transfer.kv_connector))
    if config.speculation.speculator is not None:
        named.append(("speculator", config.speculation.speculator))
    return named


def named_parsers(config: Any) -> list[tuple[str, str]]:
    """(kind, name) of the plugins of the text side that a configuration names; the engine has no use for them."""
    server = config.server
    named = [("tool-parser", server.tool_call_parser), ("reasoning-parser", server.reasoning_parser)]
    return [(kind, name) for kind, name in named if name is not None]


def check_named(registry: Registry, config: Any) -> None:
    """Raises `PluginError` for a plugin that `config` chooses by name and that cannot be chosen."""
    for kind, name in (*named_plugins(config), *named_parsers(config)):
        if name != "auto":
            registry.choose(kind, name)
    if config.server.enable_auto_tool_choice and config.server.tool_call_parser is None:
        known = ", ".join(sorted(provider.name for provider in registry.providers("tool-parser")))
        raise PluginError(f"--enable-auto-tool-choice needs --tool-call-parser; there are: {known}")


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
