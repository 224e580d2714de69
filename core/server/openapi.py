"""The OpenAPI document, with the schemas of request bodies moved to where its references point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Object = dict[str, Any]

_LOCAL = "#/$defs/"
_SHARED = "#/components/schemas/"


def with_shared_definitions(document: Object) -> Object:
    """The document with the definitions inside bodies moved to its components, under unique names."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for path in document.get("paths", {}).values():
        for operation in path.values():
            for media in operation.get("requestBody", {}).get("content", {}).values():
                media["schema"] = _share(media["schema"], schemas)
    return document


def _share(schema: Object, schemas: Object) -> Object:
    definitions = schema.get("$defs")
    if not definitions:
        return schema
    title = schema.get("title", "Body")

    def named(reference: str) -> str:
        return f"{_SHARED}{title}.{reference.removeprefix(_LOCAL)}" if reference.startswith(_LOCAL) else reference

    for name, definition in definitions.items():
        schemas[f"{title}.{name}"] = _rename(definition, named)
    rest = {key: value for key, value in schema.items() if key != "$defs"}
    shared: Object = _rename(rest, named)
    return shared


def _rename(value: Any, named: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_rename(item, named) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: named(item) if key == "$ref" and isinstance(item, str) else _rename(item, named)
        for key, item in value.items()
    }
