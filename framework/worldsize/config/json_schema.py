"""Derives a JSON Schema of the configuration from the dataclasses of its sections, for editors.

It describes files with ``# @package _global_``: each sets some keys, so none is required. A value may be an
interpolation, or ``???`` for a value that is still missing. A keyword of JSON Schema restricts only values of its type,
so ``{"type": ["integer", "string"], "minimum": 1, "pattern": ...}`` accepts positive integers and interpolations.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import cleandoc
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from omegaconf import MISSING as REQUIRED

from worldsize.config.schema import ClusterSchema, Schema
from worldsize.core.limits import JsonSchema, Limit, read_annotations

_INTERPOLATION = r"\$\{|^\?\?\?$"
_TYPES = {int: "integer", float: "number", bool: "boolean", NoneType: "null", list: "array"}
_CHOICE: JsonSchema = {  # an option of a group: the keys depend on its class
    "type": ["object", "null", "string"],
    "properties": {
        "_target_": {"type": "string", "description": "Class or function to call with the other keys as arguments."}
    },
    "pattern": _INTERPOLATION,
}
_OF_HYDRA: JsonSchema = {
    "defaults": {
        "description": "Options to compose, in order, such as `override /recipe: digits`; `_self_` is this file.",
        "type": "array",
        "items": {
            "type": ["string", "object"],
            "additionalProperties": {"type": ["string", "null", "array"], "items": {"type": "string"}},
        },
    },
    "hydra": {"description": "Configuration of Hydra itself, such as its sweeper.", "type": "object"},
}


def build_config_schema() -> JsonSchema:
    """Return the JSON Schema of the configuration, draft 7 as in yaml-language-server."""
    section = _describe_section(Schema, _OF_HYDRA)
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "worldsize", "type": "object", **section}


def _describe_section(kind: type, more: JsonSchema | None = None) -> JsonSchema:
    """Describe the keys of a section, plus ``more`` keys; only ``cluster`` accepts others, for its launcher."""
    hints, meanings = read_annotations(kind), _read_meanings(kind)
    keys = {each.name: _describe_key(each, hints[each.name], meanings.get(each.name)) for each in fields(kind)}
    return {"properties": {**(more or {}), **keys}, "additionalProperties": kind is ClusterSchema}


def _describe_key(key: Field[Any], hint: Any, meaning: str | None) -> JsonSchema:
    """Describe a key: its meaning (or else its section's), type, limits and default."""
    if meaning is None and is_dataclass(hint):
        meaning = _format_meaning(str(hint.__doc__).partition("\n")[0])
    described = {"description": meaning} if meaning else {}
    value = key.default if key.default_factory is MISSING else key.default_factory()
    default = {} if value is MISSING or value == REQUIRED or is_dataclass(value) else {"default": value}
    return {**described, **(_CHOICE if hint is Any else _describe_type(hint)), **default}


def _describe_type(hint: Any) -> JsonSchema:
    """Describe the valid values of a type; interpolations are always valid."""
    limits = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Limit)]
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    options = get_args(bare) if get_origin(bare) in (Union, UnionType) else (bare,)
    if Any in options:
        return {}
    keywords = {name: value for limit in limits for name, value in limit.build_json_schema().items()}
    keywords |= {name: value for option in options for name, value in _describe_option(option).items()}
    words, pattern = keywords.pop("enum", None), keywords.pop("pattern", None)
    if pattern or words or str not in options:
        keywords["pattern"] = f"{pattern}|{_INTERPOLATION}" if pattern else _INTERPOLATION
    names = [_TYPES.get(get_origin(option) or option, "object") for option in options if option is not str]
    if str in options and not words:
        names.append("number")  # an unquoted number is valid text
    described: JsonSchema = {"type": [*names, "string"], **keywords}
    return {"anyOf": [{"enum": words}, described]} if words else described


def _describe_option(option: Any) -> JsonSchema:
    """Describe the content of a mapping, a list or a section."""
    if get_origin(option) is dict:
        return {"additionalProperties": _describe_type(get_args(option)[1])}
    if get_origin(option) is list:
        return {"items": _describe_type(get_args(option)[0])}
    return _describe_section(option) if is_dataclass(option) and isinstance(option, type) else {}


def _read_meanings(kind: type) -> dict[str, str]:
    """Read the meanings of a section's keys from ``Attributes:`` in its docstring and those of its bases."""
    text = "\n".join(cleandoc(each.__doc__ or "") for each in kind.__mro__)
    return {name: _format_meaning(said) for name, said in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.M)}


def _format_meaning(text: str) -> str:
    """Rewrite the text of a docstring for writers of YAML, on one line."""
    text = re.sub(r"(?::\w+:)?`{1,2}([^`]+)`{1,2}", r"`\1`", " ".join(text.split()))
    return re.sub(r"\bNone\b", "null", text)
