"""What platforms begin before torch is imported, which takes seconds and needs one processor. Knows no device."""

from __future__ import annotations

import logging

from ..config.tree import FrameConfig
from ..plugin_host.offers import PluginError, import_target
from ..plugin_host.registry import Registry

logger = logging.getLogger(__name__)

#: The tag of a platform's provider that names what to call, `"package.module:function"`.
EARLY = "early"


def begin_platforms(config: FrameConfig, registry: Registry) -> None:
    """Calls `function(config)` of each platform that may be chosen: it begins what it will need, and returns at once.

    What it raises changes nothing: the platform will meet the same fault when it is chosen, and say so.
    """
    name = config.executor.platform
    try:
        providers = registry.providers("platform") if name == "auto" else [registry.choose("platform", name)]
    except PluginError:
        return  # said once the platform is chosen
    for provider in providers:
        if target := provider.tags.get(EARLY):
            try:
                import_target(target, f"platform {provider.name!r}")(config)
            except Exception as error:
                logger.debug("platform %r began nothing early: %s", provider.name, error, exc_info=error)
