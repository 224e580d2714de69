"""Chooses the tool parser of a checkpoint where the settings name none. Knows no parser by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..interfaces.provider import Provider
    from ..plugin_host.registry import Registry
    from .front import Front

ANY_MODEL = "*"


def suited_parser(registry: Registry, front: Front) -> Provider | None:
    """The tool parser that was written for the model, or None.

    A provider's tag `models` lists model types, as config.json has them, and its tag `marker` a text of their chat
    templates: a model whose chat template lacks that text writes its calls in another format than its family.
    """
    model_type, template = front.checkpoint.model_type, template_text(front)
    for provider in registry.providers("tool-parser"):
        named = model_type in provider.tags.get("models", "").split()
        if named and (not template or provider.tags.get("marker", "") in template):
            return provider
    return None


def parser_of_any_model(registry: Registry) -> Provider | None:
    """The tool parser that infers the format of calls from the chat template: its tag `models` is "*"."""
    providers = registry.providers("tool-parser")
    return next((each for each in providers if each.tags.get("models") == ANY_MODEL), None)


def template_text(front: Front) -> str:
    """The chat template that is used, all of them where a tokenizer has several; "" without one."""
    tokenizer = front.source.get_or_none()
    template: Any = front.chat_template
    if template is None and tokenizer is not None:
        template = tokenizer.chat_template
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else ""
