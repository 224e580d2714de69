"""How much of a worker's device its KV connector takes beside the KV cache, which gets that much less. Knows no device.

A connector whose worker side takes memory of the device says how much before the cache is divided into blocks.
"""

from __future__ import annotations

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.offers import import_target
from frame.core.plugin_host.registry import Registry

from .children import CHILDREN, with_options

#: The tag of a connector's provider that names what is called, `"package.module:function"`.
DEVICE_BYTES = "device_bytes"


def device_bytes(config: FrameConfig, registry: Registry, device_type: str) -> int:
    """What the connector's function returns, and those of the connectors that it holds, added up.

    It is called with its options, the engine's role, and torch's name of the device type.
    """
    name = config.transfer.kv_connector
    return 0 if name is None else _bytes_of(config, registry, name, config.transfer.kv_role, device_type)


def _bytes_of(config: FrameConfig, registry: Registry, name: str, role: str, device_type: str) -> int:
    provider = registry.choose("connector", name)
    options, num_bytes = registry.options(provider, config), 0
    if (target := provider.tags.get(DEVICE_BYTES)) is not None:
        num_bytes = int(import_target(target, f"KV connector {name!r}")(options, role, device_type))
    for child in getattr(options, provider.tags.get(CHILDREN, ""), ()):
        own = with_options(config, registry, registry.choose("connector", child.kv_connector), child.options)
        held_role = getattr(child, "kv_role", None) or role
        num_bytes += _bytes_of(own, registry, child.kv_connector, held_role, device_type)
    return num_bytes
