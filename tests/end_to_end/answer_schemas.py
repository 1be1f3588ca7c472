"""Twenty JSON Schemas of different kinds whose values are bounded, by what is special in them."""

from __future__ import annotations

from typing import Any

NAME = {"type": "string", "minLength": 1, "maxLength": 12}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}


def closed(**properties: Any) -> dict[str, Any]:
    """An object of exactly these fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TREE = closed(name=NAME, leaves={"type": "array", "items": NAME, "maxItems": 2})

SCHEMAS: dict[str, dict[str, Any]] = {
    "strings by length": closed(name=NAME, code={"type": "string", "minLength": 3, "maxLength": 3}),
    "integers with bounds": closed(age={"type": "integer", "minimum": 18, "maximum": 65}, n=SMALL),
    "exclusive bounds": closed(
        x={"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
        y={"type": "integer", "minimum": 10, "maximum": 12},
    ),
    "numbers with bounds": closed(
        share={"type": "number", "minimum": 0, "maximum": 1},
        degrees={"type": "number", "minimum": -40, "maximum": 60},
    ),
    "nested objects": closed(person=closed(name=NAME, home=closed(city=NAME, zip=SMALL))),
    "enum of texts": closed(colour={"enum": ["red", "green", "blé", "蓝", "🟣"]}),
    "enum of kinds": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "const": closed(kind={"const": "cat"}, legs={"const": 4}),
    "anyOf of objects": {"anyOf": [closed(cat=NAME), closed(dog=SMALL)]},
    "anyOf of scalars": closed(value={"anyOf": [{"type": "null"}, SMALL, {"type": "boolean"}]}),
    "list of types": closed(value={"type": ["integer", "null"], "minimum": 1, "maximum": 9}),
    "pattern": closed(
        plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        day={"type": "string", "pattern": r"^20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d)$"},
    ),
    "optional fields": {
        "type": "object",
        "properties": {"a": SMALL, "b": NAME, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "array of texts": {"type": "array", "items": NAME, "minItems": 2, "maxItems": 4},
    "array of objects": {
        "type": "array",
        "items": closed(name=NAME, number=SMALL),
        "minItems": 1,
        "maxItems": 3,
    },
    "array of arrays": {
        "type": "array",
        "items": {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 2},
        "minItems": 2,
        "maxItems": 2,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [NAME, SMALL, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    },
    "references": {
        **closed(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
        "$defs": {"point": closed(x=SMALL, y=SMALL)},
    },
    "references in references": {
        **closed(tree={"$ref": "#/$defs/tree"}),
        "$defs": {
            "tree": {**TREE, "properties": {**TREE["properties"], "name": {"$ref": "#/$defs/n"}}},
            "n": NAME,
        },
    },
    "named by the model": {
        "type": "object",
        "properties": {"id": SMALL},
        "required": ["id"],
        "additionalProperties": False,
        "title": "Card",
        "description": "A card with a number",
    },
}
