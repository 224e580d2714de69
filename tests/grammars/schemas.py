"""200 JSON schemas, no two the same. Strings and lists are short, so that outputs end soon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "größe", "a b", "", 'quo"te', "back\\slash", "日本", "x.y", "$ref", "0")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "duration")
PATTERNS = (
    "^[a-z]{1,6}$", "^\\d{3}-\\d{4}$", "^(red|green|blue)$", "^[A-Z][a-z]{0,4} [A-Z][a-z]{0,4}$", "^#[0-9a-f]{6}$",
    "^a.b$", "^[^x]{2}$", "^(ab|c){1,3}$", "^\\w+@\\w+\\.com$", "^[\\u00e0-\\u00ff]{2,4}$",
)  # fmt: skip
WORD: Schema = {"type": "string", "maxLength": 6}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}


def closed(required: bool = True, **properties: Schema) -> Schema:
    """An object with these properties and no others."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(properties)} if required else schema


def strings() -> Iterator[Schema]:
    for low, high in ((0, 0), (0, 1), (1, 1), (3, 8), (12, 12), (0, 30)):
        yield {"type": "string", "minLength": low, "maxLength": high}
    for pattern in PATTERNS:
        yield {"type": "string", "pattern": pattern}
    for name in FORMATS:
        yield {"type": "string", "format": name}
    for name in NAMES:
        yield {"const": f"constant {name}"}
    for count in (1, 2, 5, 40):
        yield {"enum": [f"{NAMES[number % 10]}{number}" for number in range(count)]}


def numbers() -> Iterator[Schema]:
    for low, high in ((0, 9), (-5, 5), (100, 110), (-1000000, -999990), (7, 7), (0, 2**31), (-(2**31), 2**31)):
        yield {"type": "integer", "minimum": low, "maximum": high}
    for low, high in ((0, 10), (-3, 3), (98, 102)):
        yield {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
    for step in (2, 3, 5, 10, 25):
        yield {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": step}
    for low, high in ((0, 1), (-1.5, 1.5), (0.25, 0.5), (1e3, 1e4)):
        yield {"type": "array", "items": {"type": "number", "minimum": low, "maximum": high}, "maxItems": 2}
    yield {"enum": [1, 2.5, -3, 1e10]}
    yield {"const": 42}


def simple() -> Iterator[Schema]:
    yield {"type": "boolean"}
    yield {"type": "null"}
    yield {"const": None}
    yield {"const": {"a": [1, "b", None, True]}}
    yield {"enum": [None, True, "text", 1, [1], {"k": "v"}]}
    for kinds in (["boolean", "null"], ["null", "boolean"]):
        yield {"type": kinds}
    for schema in (WORD, DIGIT, {"type": "boolean"}):
        yield {"anyOf": [schema, {"type": "null"}]}


def arrays() -> Iterator[Schema]:
    items: tuple[Schema, ...] = (WORD, DIGIT, {"type": "boolean"}, {"enum": ["x", "y"]}, {"type": "null"})
    for item in items:
        for low, high in ((0, 0), (0, 3), (1, 1), (2, 4), (5, 5)):
            yield {"type": "array", "items": item, "minItems": low, "maxItems": high}
    yield {"type": "array", "prefixItems": [WORD, DIGIT], "items": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [WORD, DIGIT], "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
    for depth in (2, 3, 6):
        nested: Schema = DIGIT
        for _ in range(depth):
            nested = {"type": "array", "items": nested, "minItems": 1, "maxItems": 2}
        yield nested


def objects() -> Iterator[Schema]:
    for name in NAMES:
        yield closed(**{name: DIGIT})
    for count in (2, 4, 9):
        chosen = {name: (WORD, DIGIT, {"type": "boolean"})[number % 3] for number, name in enumerate(NAMES[:count])}
        yield closed(**chosen)
        yield closed(required=False, **chosen)
        yield {**closed(**chosen), "required": list(chosen)[: count // 2]}
    for extra in (WORD, DIGIT, {"type": "boolean"}, {"enum": ["on", "off"]}):
        yield {**closed(id=DIGIT), "additionalProperties": extra, "maxProperties": 3}
        yield {"type": "object", "properties": {"id": DIGIT, "of": WORD}, "required": ["id", "of"],
               "additionalProperties": extra, "maxProperties": 4}  # fmt: skip
    yield {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 2}
    yield {**closed(), "properties": {}}
    for pattern in ("^k_[a-z]{1,3}$", "^[0-9]{2}$"):
        yield {"type": "object", "patternProperties": {pattern: DIGIT}, "additionalProperties": False,
               "minProperties": 1, "maxProperties": 2}  # fmt: skip
    for depth in (2, 4, 8):
        nested = closed(leaf=WORD)
        for level in range(depth):
            nested = closed(**{f"level{level}": nested, "n": DIGIT})
        yield nested
    wide = {f"field_{number}": (WORD, DIGIT, {"type": "boolean"}, {"type": "null"})[number % 4] for number in range(30)}
    yield closed(**wide)


def combined() -> Iterator[Schema]:
    circle = closed(kind={"const": "circle"}, radius=DIGIT)
    square = closed(kind={"const": "square"}, side=DIGIT)
    for word in ("anyOf", "oneOf"):
        yield {word: [circle, square]}
        yield {word: [WORD, DIGIT, {"type": "boolean"}]}
        yield closed(shape={word: [circle, square]}, tag=WORD)
        yield {"type": "array", "items": {word: [circle, DIGIT]}, "minItems": 1, "maxItems": 3}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]}
    yield {"allOf": [{"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
                     {"type": "object", "properties": {"b": WORD}, "required": ["b"]}],
           "maxProperties": 2}  # fmt: skip
    yield {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]}
    yield {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False,
           "allOf": [{"properties": {"a": {"maxLength": 3}}}]}  # fmt: skip


def references() -> Iterator[Schema]:
    yield {"$defs": {"word": WORD}, **closed(first={"$ref": "#/$defs/word"}, last={"$ref": "#/$defs/word"})}
    yield {"definitions": {"d": DIGIT}, "type": "array", "items": {"$ref": "#/definitions/d"}, "maxItems": 3}
    yield {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": DIGIT}, "$ref": "#/$defs/a"}
    chain = closed(value=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]})
    yield {"$defs": {"chain": chain}, "$ref": "#/$defs/chain"}
    tree = closed(name=WORD, child={"anyOf": [{"type": "null"}, {"$ref": "#"}]})
    yield tree
    leaves = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    yield {"$defs": {"node": closed(id=DIGIT, children=leaves)}, "$ref": "#/$defs/node"}
    even = {"anyOf": [{"const": "end"}, closed(odd={"$ref": "#/$defs/odd"})]}
    odd = {"anyOf": [{"const": "end"}, closed(even={"$ref": "#/$defs/even"})]}
    yield {"$defs": {"even": even, "odd": odd}, "$ref": "#/$defs/even"}


def documents() -> Iterator[Schema]:
    """What people ask for."""
    address = closed(street=WORD, zip={"type": "string", "pattern": "^\\d{5}$"}, country={"enum": ["DE", "JP", "BR"]})
    yield closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 130}, email={
        "type": "string", "pattern": "^[a-z]{1,5}@[a-z]{1,5}\\.org$"}, address=address)  # fmt: skip
    yield closed(answer={"type": "boolean"}, confidence={"type": "integer", "minimum": 0, "maximum": 100})
    yield closed(steps={"type": "array", "items": closed(explanation=WORD, output=WORD), "maxItems": 3}, final=WORD)
    yield closed(name={"const": "get_weather"}, arguments=closed(city=WORD, unit={"enum": ["C", "F"]}))
    for count in range(2, 8):
        lines = {"type": "array", "items": closed(sku=WORD, count=DIGIT), "minItems": 1, "maxItems": count}
        yield closed(order={"type": "integer", "minimum": 1, "maximum": 10**count}, lines=lines,
                     paid={"type": "boolean"}, note={"anyOf": [{"type": "null"}, WORD]})  # fmt: skip
    for count in range(1, 90):
        fields = {f"{NAMES[(count + number) % 10]}_{number}": (WORD, DIGIT, {"enum": ["p", "q", number]}, {
            "type": "array", "items": DIGIT, "maxItems": number}, {"type": ["boolean", "null"]},
            closed(inner={"type": "string", "maxLength": count % 7}))[(count * 7 + number * 5) % 6]
            for number in range(1 + count % 5)}  # fmt: skip
        yield {**closed(**fields), "required": list(fields)[: 1 + count % 3]}


_ALL = [
    schema for part in (strings, numbers, simple, arrays, objects, combined, references, documents) for schema in part()
]
SCHEMAS: list[Schema] = list({repr(schema): schema for schema in _ALL}.values())[:200]
