"""Reads from a configuration which plugins it names and their options. Builds no plugin."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from frame.findings import predicate
from frame.quoting import quoted, shortened

from ..config.errors import near
from ..config.leaves import leaves
from .offers import Offer, PluginError, import_target

if TYPE_CHECKING:
    from .registry import Registry


#: Settings that name plugins of the engine → the plugins' kind.
ENGINE_PLUGINS: Mapping[str, str] = MappingProxyType({
    "model_plugin": "model",
    "platform": "platform", "executor": "executor", "scheduling_policy": "scheduler", "attention_backend": "attention",
    "model_source": "source", "load_format": "loader", "tokenizer_mode": "tokenizer",
    "structured_outputs_backend": "grammar", "pooling_type": "pooler", "metrics_sinks": "sink",
    "kv_connector": "connector", "expert_exchange": "exchange",
    "expert_balancer": "balancer", "speculator": "speculator", "worker_extension": "extension",
    "quantization": "quantization", "adapter_plugin": "adapters",
})  # fmt: skip
#: Settings that name plugins of the API processes, which an engine does not use → the plugins' kind.
TEXT_PLUGINS: Mapping[str, str] = MappingProxyType({
    "tool_call_parser": "tool-parser", "forced_call_parser": "tool-parser", "reasoning_parser": "reasoning-parser",
    "lora_resolver": "adapter-resolver",
})  # fmt: skip


def named_plugins(config: Any, settings: Mapping[str, str] = ENGINE_PLUGINS) -> list[tuple[str, str]]:
    """Returns (kind, name) of each plugin that `config` names in `settings`; the name "auto" leaves the choice open."""
    named: list[tuple[str, str]] = []
    for setting, kind in settings.items():
        value = getattr(getattr(config, leaves()[setting].section), setting)
        names = value if isinstance(value, list) else [value]
        named += [(kind, name) for name in names if name is not None]
    return named


def check_named(registry: Registry, config: Any) -> None:
    """Raises `PluginError` for a plugin that `config` names and that is not there or cannot be used."""
    for kind, name in (*named_plugins(config), *named_plugins(config, TEXT_PLUGINS)):
        if name != "auto" and (name, kind) != ("none", "tool-parser"):
            registry.choose(kind, name)


def check_options(registry: Registry, config: Any) -> None:
    """Raises `PluginError` for options of a plugin that is not there, or that no plugin of that name takes."""
    for name in config.plugin:
        owners = [offer for offer in registry.offers if name in offer.names]
        if not owners:
            known = {name for offer in registry.offers for name in offer.names}
            raise PluginError(f"no plugin {quoted(name)} to configure{near(name, known)}; `frame plugins` lists them")
        usable = [offer for offer in owners if offer.problem is None]
        with_options = [offer for offer in usable if offer.provider.options is not None] or usable
        errors = []
        for offer in with_options:
            try:
                read_options(offer, config)
            except PluginError as error:
                errors.append(error)
        if errors and len(errors) == len(with_options):
            raise errors[0]


def read_options(offer: Offer, config: Any) -> BaseModel | None:
    """The plugin's own options, set from `config.plugin[name]` (all defaults where `config` is None).

    None for a provider without options. Raises `PluginError` naming an option that is unknown or wrong.
    """
    name = offer.provider.name
    given: dict[str, Any] = {}
    for own in offer.names if config is not None else ():
        given.update(config.plugin.get(own, {}))
    model = offer.provider.options
    if model is None:
        if given:
            raise PluginError(f"plugin {quoted(name)} takes no options, got {', '.join(sorted(given))}")
        return None
    if isinstance(model, str):
        model = import_target(model, f"options of {offer}")
    if not issubclass(model, BaseModel):
        raise PluginError(f"options of {offer} must be a pydantic model, got {model.__name__}")
    unknown = sorted(set(given) - set(model.model_fields))
    if unknown:
        choices = ", ".join(sorted(model.model_fields))
        raise PluginError(f"plugin {quoted(name)} has no option {quoted(unknown[0])}; there are: {choices}")
    try:
        options: BaseModel = model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(shortened(part) for part in first["loc"])
        if "Secret" in str(getattr(model.model_fields.get(where.partition(".")[0]), "annotation", "")):
            first["input"] = "…"  # pydantic's types of secrets hide them in a model, not in its errors
        said = f"option {where} of plugin {quoted(name)}" if where else f"options of plugin {quoted(name)}"
        colon = ":" if first["type"] == "value_error" else ""
        raise PluginError(f"{said}{colon} {predicate(first)}") from None
    return options
