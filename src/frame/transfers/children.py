"""Builds plugins for a KV connector: its tier's policy, or other connectors that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.provider import Provider
from frame.core.interfaces.setup import Setup
from frame.core.plugin_host.registry import Registry

#: The tag of a connector's provider that names the option which lists the connectors that it holds: each has a
#: `kv_connector`, the name, and `options`, over those that the user set for all of that name.
CHILDREN = "children"


class Make(Protocol):
    """See `ConnectorSetup.make`."""

    def __call__(
        self, kind: str, name: str, setup: Setup, options: Mapping[str, Any] | None = None, part: str = ""
    ) -> Any:
        """Returns the plugin."""


def maker(registry: Registry, config: FrameConfig) -> Make:
    """What `ConnectorSetup.make` is where `config` says which options plugins have."""

    def make(kind: str, name: str, setup: Setup, options: Mapping[str, Any] | None = None, part: str = "") -> Any:
        provider = registry.choose(kind, name)
        return registry.make(kind, provider, setup, with_options(config, registry, provider, options or {}), part=part)

    return make


def with_options(
    config: FrameConfig, registry: Registry, provider: Provider, options: Mapping[str, Any]
) -> FrameConfig:
    """`config` with `options` of a plugin over those that it has by any of its names."""
    names = registry.offer_of(provider).names
    given = {key: value for name in names for key, value in config.plugin.get(name, {}).items()}
    others = {name: values for name, values in config.plugin.items() if name not in names}
    return config.model_copy(update={"plugin": {**others, provider.name: {**given, **options}}})
