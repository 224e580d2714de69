"""Lets platforms begin what they will wait for while torch is imported, which takes seconds on one processor."""

from __future__ import annotations

import logging

from ..config.tree import FrameConfig
from ..interfaces.setup import Setup
from ..plugin_host.offers import PluginError, import_target
from ..plugin_host.registry import Registry

logger = logging.getLogger(__name__)

#: The tag of a platform's provider that names what to call, `"package.module:function"`.
EARLY = "early"


def begin_platforms(config: FrameConfig, registry: Registry) -> None:
    """Calls the tagged function of each platform that may be chosen, as `function(setup, options)`.

    The function begins what the platform will need, and returns at once. Errors that it raises are ignored: the
    platform will raise them again when it is chosen.
    """
    name = config.executor.platform
    try:
        providers = registry.providers("platform") if name == "auto" else [registry.choose("platform", name)]
    except PluginError:
        return  # whoever chooses the platform raises the error
    for provider in providers:
        if target := provider.tags.get(EARLY):
            try:
                setup = Setup(plugin=registry.offer_of(provider).full_name)
                import_target(target, f"platform {provider.name!r}")(setup, registry.options(provider, config))
            except Exception as error:
                logger.debug("platform %r began nothing early: %s", provider.name, error, exc_info=error)
