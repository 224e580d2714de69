"""Checks the adapters of `lora_modules` before a server starts anything. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.offers import import_target
from frame.core.plugin_host.registry import Registry
from frame.quoting import quoted, shortened

from .modules import read_module

#: The tag of an adapter plugin's provider that names what is called with a folder, `"package.module:function"`.
CHECK = "check"


def check_modules(config: FrameConfig, registry: Registry) -> None:
    """Raises `ConfigError` for a folder that is not there, or that the plugin's check calls no adapter.

    The check knows no model, so that more may be wrong with an adapter.
    """
    modules, name = [read_module(text) for text in config.adapters.lora_modules], config.adapters.adapter_plugin
    if not modules:
        return
    known = registry.providers("adapters") if name == "auto" else [registry.choose("adapters", name)]
    target = known[0].tags.get(CHECK) if known else None
    for module, path, _ in modules:
        if not Path(path).is_dir():
            raise ConfigError(f"lora_modules: there is no folder {shortened(path)} for the adapter {quoted(module)}")
        if target is not None:
            try:
                import_target(target, f"adapter plugin {known[0].name!r}")(Path(path))
            except ValueError as error:
                raise ConfigError(f"lora_modules: {error}") from None
