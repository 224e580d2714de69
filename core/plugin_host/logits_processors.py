"""Finds the logits processors of an engine: those that packages offer, then those that the configuration names.

It imports torch only with a processor's module, since processes without torch ask as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from frame.quoting import quoted

from ..interfaces.provider import Provider
from ..interfaces.sampling import SamplingParams
from .isolation import is_configured, run_or_leave_out
from .offers import PluginError, import_target

if TYPE_CHECKING:
    from ..config.tree import FrameConfig
    from .registry import Registry


class FoundProcessor(NamedTuple):
    """A class of logits processors, the name by which it was found, its options, and the provider if there is one.

    `named`: the configuration names it, so that its failure ends the start.
    """

    name: str
    kind: type[Any]
    options: Any = None
    provider: Provider | None = None
    named: bool = True


def request_check(config: FrameConfig, registry: Registry) -> Callable[[SamplingParams], None]:
    """Returns a function that raises `ValueError` when a processor refuses the parameters of a request."""
    checks: list[Callable[[SamplingParams], None]] = [_check_callables]
    for found in processor_classes(config, registry):
        checks.append(getattr(found.kind, "validate", None) or found.kind.validate_params)

    def check(params: SamplingParams) -> None:
        for one in checks:
            one(params)

    return check


def _check_callables(params: SamplingParams) -> None:
    if params.logits_processors:
        from ..interfaces.logits import takes_prompt

        for processor in params.logits_processors:
            if not callable(processor):
                raise ValueError(f"logits_processors must be callables, got {quoted(processor)}")
            takes_prompt(processor)


def processor_classes(config: FrameConfig, registry: Registry) -> list[FoundProcessor]:
    """Returns every processor once: all that packages offer, and those that only the configuration names."""
    given = config.model.logits_processors
    typed = {one.rpartition(":")[2] for one in given if isinstance(one, str)}
    found, offered = list[FoundProcessor](), set[str]()
    for provider in registry.providers("processor"):
        own = {provider.name, *provider.aliases}
        offered |= own
        named = is_configured(provider, config) or not typed.isdisjoint(own)
        if one := run_or_leave_out(registry, provider, partial(_load, registry, provider, config, named), named=named):
            found.append(one)
    for item in given:
        if isinstance(item, str) and item.rpartition(":")[2] in offered:
            registry.choose("processor", item)
        elif not any(item is other.kind for other in found):
            kind = _import(item, sorted(offered)) if isinstance(item, str) else item
            _check_class(kind)
            found.append(FoundProcessor(str(item), kind))
    return found


def _load(registry: Registry, provider: Provider, config: FrameConfig, named: bool) -> FoundProcessor:
    kind = registry.resolve(provider)
    _check_class(kind)
    return FoundProcessor(provider.name, kind, registry.options(provider, config), provider, named)


def _import(name: str, offered: list[str]) -> Any:
    """Imports the class that "package.module:Class" or "package.module.Class" names."""
    target = name
    if ":" not in name:
        module, dot, path = name.rpartition(".")
        if not dot:
            known = ", ".join(offered) or "none"
            raise PluginError(f"no logits processor {quoted(name)}; there are: {known}; or give 'package.module:Class'")
        target = f"{module}:{path}"
    return import_target(target, f"logits processor {quoted(name)}")


def _check_class(kind: Any) -> None:
    from ..interfaces.logits import ForeignLogitsProcessor, LogitsProcessor

    if not inspect.isclass(kind) or not issubclass(kind, (LogitsProcessor, ForeignLogitsProcessor)):
        raise ValueError(
            f"{kind!r} is no logits processor: derive it from frame.interfaces.LogitsProcessor or BatchLogitsProcessor"
        )
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"logits processor {kind.__qualname__} lacks {', '.join(missing)}")
