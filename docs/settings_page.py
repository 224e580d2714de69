"""The page of settings, from the configuration tree and the options of the default plugins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tables import our_providers, shown_default, table

from frame.core.config.leaves import Leaf, leaves, sections
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.provider import Provider


def page() -> str:
    """The page as Markdown."""
    parts = [
        "# Settings",
        "Every setting has one name: `--max-model-len` on the command line, `max_model_len` in a YAML file, in "
        "`LLM(max_model_len=…)` and in `EngineArgs`. The command line beats the file, the file beats the default. "
        "Whole numbers may be written `4k` (4000) or `4K` (4096). A switch that is on is turned off by `--no-NAME`. "
        "`--hf-overrides.a.b 1` sets one key of a mapping.",
    ]
    for section, about in sections().items():
        fields = _section_fields(section)
        rows = [
            (f"`{own.name}`", _values(own, fields[own.name]), shown_default(own.default), own.help)
            for own in leaves().values()
            if own.section == section
        ]
        parts += [f"## {section}", about, table(("setting", "values", "default", "meaning"), rows)]
    parts += [
        "## plugin",
        "Settings of plugins: `--plugin.NAME.FIELD VALUE`, or `plugin: {NAME: {FIELD: VALUE}}` in the file and in "
        "Python.",
    ]
    for provider in our_providers(None):
        if provider.options is not None:
            parts.append(_option_table(provider))
    return "\n\n".join(parts)


def _section_fields(section: str) -> Mapping[str, FieldInfo]:
    kind = FrameConfig.model_fields[section].annotation
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        raise TypeError(f"section {section!r} is no model")
    return kind.model_fields


def _option_table(provider: Provider) -> str:
    options = provider.options
    if isinstance(options, str):
        module, _, name = options.partition(":")
        options = getattr(import_module(module), name)
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise TypeError(f"options of {provider.name!r} are no pydantic model: {provider.options!r}")
    rows = [
        (
            f"`plugin.{provider.name}.{name}`",
            _bounds(field),
            "needed" if field.is_required() else shown_default(field.get_default(call_default_factory=True)),
            field.description or "",
        )
        for name, field in options.model_fields.items()
    ]
    return table(("setting", "values", "default", "meaning"), rows)


def _values(own: Leaf, field: FieldInfo) -> str:
    if own.choices:
        return ", ".join(f"`{choice}`" for choice in own.choices)
    words = {"bool": "switch", "int": "integer", "float": "number", "mapping": "JSON object"}
    return f"{words.get(own.kind, own.kind)} {_bounds(field)}".strip()


def _bounds(field: FieldInfo) -> str:
    signs = {annotated_types.Ge: "≥", annotated_types.Gt: ">", annotated_types.Le: "≤", annotated_types.Lt: "<"}
    found = []
    for bound in field.metadata:
        for kind, sign in signs.items():
            if isinstance(bound, kind):
                found.append(f"{sign} {getattr(bound, kind.__name__.lower())}")
    return ", ".join(found)
