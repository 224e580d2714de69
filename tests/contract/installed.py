"""One test class for each plugin of ours, so that a new one is tested by being there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frame.core.plugin_host.registry import Registry
from frame.testing import PluginSuite

PACKAGE = "frame-llm"


def classes(suite: type[PluginSuite], **attributes: Mapping[str, Any]) -> dict[str, type[PluginSuite]]:
    """Test classes by name; `attributes[plugin]` are set on the class of that plugin."""
    made = {}
    registry, spec_type = Registry.load(), getattr(suite, "spec_type", None)
    for offer in registry.offers:
        if offer.kind == suite.kind and offer.package == PACKAGE:
            if spec_type is not None and registry.resolve(offer.provider).spec_type is not spec_type:
                continue  # another kind of backend
            name = offer.provider.name
            title = "Test" + "".join(word[0].upper() + word[1:] for word in name.split("-"))
            values = {"plugin": f"{PACKAGE}:{name}", "__module__": __name__, **attributes.get(name, {})}
            made[title] = type(title, (suite,), values)
    return made
