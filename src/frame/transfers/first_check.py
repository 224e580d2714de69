"""Asks a KV connector's own check of its options before anything is loaded."""

from __future__ import annotations

import logging

from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.mesh import Mesh
from frame.core.interfaces.provider import Provider
from frame.core.plugin_host.kinds import KINDS
from frame.core.plugin_host.offers import PluginError, import_target
from frame.core.plugin_host.registry import Registry
from frame.quoting import quoted

from .children import CHILDREN, with_options

logger = logging.getLogger("frame.transfers")

#: The tag of a connector's provider that names what is called, `"package.module:function"`.
CHECK = "check"


def check_connector(config: FrameConfig, mesh: Mesh, registry: Registry) -> None:
    """Raises `ConfigError` with the reason for which the connector's check refuses its options.

    It is called with them, the workers of the engine, and on how many machines they are. A tag that is a kind of
    plugins names the option that names one, which must be there. The connectors that it holds are checked too; they
    hold no others. The first engine of a server names options of other connectors in the log.
    """
    used = list[Provider]()
    if (name := config.transfer.kv_connector) is not None:
        used = _check(config, mesh, registry, name, f"KV connector {name!r}")
    if config.data_parallel.data_parallel_rank_local:
        return
    has = f"this engine's KV connector is {quoted(name)}" if used else "this engine has no KV connector"
    for given, values in config.plugin.items():
        owners = [offer for offer in registry.offers if given in offer.names]
        unused = not any(offer.kind != "connector" or offer.provider in used for offer in owners)
        if owners and values and unused:
            logger.warning("options of KV connector %r have no effect (%s): %s", given, ", ".join(values), has)


def _check(config: FrameConfig, mesh: Mesh, registry: Registry, name: str, where: str) -> list[Provider]:
    """Returns the connector and those that it holds."""
    provider = registry.choose("connector", name)
    options = registry.options(provider, config)
    if (target := provider.tags.get(CHECK)) is not None:
        check = import_target(target, where)
        try:
            check(options, mesh.engine_size, config.executor.nnodes)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    for kind, option in provider.tags.items():
        if kind in KINDS and (named := getattr(options, option, None)) is not None:
            try:
                registry.choose(kind, named)
            except PluginError as error:
                raise ConfigError(f"{where}: option {option}: {error}") from None
    found = [provider]
    for child in getattr(options, provider.tags.get(CHILDREN, ""), ()):
        held = registry.choose("connector", child.kv_connector)
        if CHILDREN in held.tags:
            raise ConfigError(f"{where}: it cannot hold {quoted(child.kv_connector)}, which holds connectors itself")
        own = with_options(config, registry, held, child.options)
        found += _check(own, mesh, registry, child.kv_connector, f"{where}, {quoted(child.kv_connector)} in it")
    return found
