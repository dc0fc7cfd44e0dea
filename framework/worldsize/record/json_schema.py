"""Checks types and bounds of a value against a JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": NoneType,
}


def check(value: Any, schema: Mapping[str, Any], name: str = "") -> None:
    """Check the fields that are present; patterns and required fields are not checked.

    Args:
        value: the decoded JSON value.
        schema: may use type, enum, const, anyOf, properties, additionalProperties, items, minItems, maxItems, minimum
            and maximum.
        name: the dotted key of the value; empty: the top level.

    Raises:
        ValueError: a field is invalid; the message names it.
    """
    if not _is_of_type(value, schema):
        raise ValueError(f"{name or 'it'} is {str(value)[:40]!r}, which is of the wrong type")
    if not _is_within(value, schema):
        raise ValueError(f"{name or 'it'} is {str(value)[:40]!r}, which is out of bounds")
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, child in value.items():
            rule = known.get(key, others)
            if type(child) is str and rule.get("type") == "string" and "enum" not in rule and "const" not in rule:
                continue  # as most fields are, such as the versions of packages: nothing else is checked of them
            if rule:
                check(child, rule, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and (rule := schema.get("items")):
        for number, child in enumerate(value):
            check(child, rule, f"{name}[{number}]")


def _is_of_type(value: Any, schema: Mapping[str, Any]) -> bool:
    if options := schema.get("anyOf"):
        return any(_is_of_type(value, option) for option in options)
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    named = schema.get("type", list(_TYPES))
    names = [named] if isinstance(named, str) else named
    return any(isinstance(value, _TYPES[each]) and (each == "boolean" or not isinstance(value, bool)) for each in names)


def _is_within(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, list):
        return bool(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)))
    if isinstance(value, int | float):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True
