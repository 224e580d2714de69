"""The typed options of a plugin, read from a configuration. Builds no plugin."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from ..interfaces.provider import Provider
from .offers import PluginError, import_target


def read_options(provider: Provider, config: Any, source: str) -> BaseModel | None:
    """The options from `config.plugin[name]`; None for a provider without any. `source` names its package in errors.

    Without a `config` they have their defaults.

    Raises `PluginError` naming the field when a value is unknown or wrong.
    """
    given: dict[str, Any] = {}
    for name in (provider.name, *provider.aliases):
        given.update({} if config is None else config.plugin.get(name, {}))
    model = provider.options
    if model is None:
        if given:
            raise PluginError(f"plugin {provider.name!r} takes no options, got {', '.join(sorted(given))}")
        return None
    if isinstance(model, str):
        model = import_target(model, f"options of plugin {provider.name!r}{source}")
    if not issubclass(model, BaseModel):
        raise PluginError(f"options of plugin {provider.name!r} must be a pydantic model, got {model.__name__}")
    unknown = sorted(set(given) - set(model.model_fields))
    if unknown:
        choices = ", ".join(sorted(model.model_fields))
        raise PluginError(f"plugin {provider.name!r} has no option {unknown[0]!r}; there are: {choices}")
    try:
        options: BaseModel = model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = f"option {where} of plugin {provider.name!r}" if where else f"options of plugin {provider.name!r}"
        raise PluginError(f"{said}: {first['msg']}") from None
    return options
