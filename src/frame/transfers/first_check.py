"""Asks a KV connector's own check of its options before anything is loaded."""

from __future__ import annotations

from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.mesh import Mesh
from frame.core.plugin_host.offers import import_target
from frame.core.plugin_host.registry import Registry

#: The tag of a connector's provider that names what is called, `"package.module:function"`.
CHECK = "check"


def check_connector(config: FrameConfig, mesh: Mesh, registry: Registry) -> None:
    """Raises `ConfigError` with the reason for which the connector's check refuses its options.

    It is called with them, the workers of the engine, and on how many machines they are.
    """
    if (name := config.transfer.kv_connector) is None:
        return
    provider = registry.choose("connector", name)
    if (target := provider.tags.get(CHECK)) is not None:
        check = import_target(target, f"KV connector {name!r}")
        try:
            check(registry.options(provider, config), mesh.engine_size, config.executor.nnodes)
        except ValueError as error:
            raise ConfigError(f"KV connector {name!r}: {error}") from None
