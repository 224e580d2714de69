"""The page of the HTTP API, from the OpenAPI document of a server with the default endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables import our_providers, shown_default, table

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import endpoint_setup
from frame.core.server.app import build_routes
from frame.testing.fake_serving import FakeServing


def page() -> str:
    """The page as Markdown."""
    config, serving = from_flat({}), FakeServing()
    registry = Registry.load()
    setup = endpoint_setup(config, serving)
    endpoints = [registry.make("endpoint", provider.name, setup, config) for provider in our_providers("endpoint")]
    document = build_routes([endpoint.router() for endpoint in endpoints]).openapi()
    admin = build_routes([endpoint.router() for endpoint in endpoints if endpoint.admin]).openapi()["paths"]
    parts = [
        "# API",
        "Every route of a server, from the document that it gives at `/openapi.json`. Packages add more. Fields that "
        "are not listed are ignored, or refused with `--strict-fields`; [Serving](../serving.md) says what they mean.",
    ]
    seen: dict[str, str] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = f"{method.upper()} {path}"
            parts.append(f"## {title}")
            if method in admin.get(path, ()):
                parts.append("On the [admin listener](../serving.md#admin-routes) only.")
            if operation.get("description"):
                parts.append(operation["description"])
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if schema is None:
                continue
            name = schema.get("title", title)
            if name in seen:
                parts.append(f"Takes the body of {seen[name]}.")
                continue
            seen[name] = title
            parts += [schema.get("description", "").split("\n\n")[0], _fields_table(schema)]
    schemas = document.get("components", {}).get("schemas", {})
    parts.append("## Parts of bodies")
    for name, schema in sorted(schemas.items()):
        if schema.get("properties") and not name.endswith("ValidationError"):
            parts += [f"### {name}", schema.get("description", "").split("\n\n")[0], _fields_table(schema)]
    return "\n\n".join(filter(None, parts))


def _fields_table(schema: Mapping[str, Any]) -> str:
    needed = set(schema.get("required", ()))
    rows = [
        (f"`{name}`", _type(field), "needed" if name in needed else shown_default(field.get("default")))
        for name, field in schema.get("properties", {}).items()
    ]
    return table(("field", "values", "default"), rows)


def _type(field: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name.rpartition('.')[2]}](#{name.lower().replace('.', '')})"
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " or ".join(dict.fromkeys(_type(one) for one in field[key] if one.get("type") != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        most = f", at most {field['maxItems']:,}" if "maxItems" in field else ""
        return f"list of {_type(field.get('items', {}))}{most}"
    words = {"integer": "integer", "number": "number", "boolean": "`true` or `false`", "string": "text"}
    kind = words.get(str(field.get("type")), str(field.get("type", "anything")))
    limits = [
        f"{sign} {field[key]:,}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in field and abs(field[key]) < 2**31 - 1
    ]
    if "maxLength" in field:
        limits.append(f"at most {field['maxLength']:,} characters")
    return " ".join([kind, ", ".join(limits)]).strip()
