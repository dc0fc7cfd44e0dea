"""Strict JSON output, and JSON input with limits for untrusted sources (files of a run folder, sockets)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

LARGEST = 64 << 20  # maximum bytes per text
_DEEPEST = 100  # maximum nesting depth
_LARGE_NUMBER = re.compile(r"[eE]\+?\d{3}|\d{200}")  # a text without a match has only numbers below 1e299


def sanitize_json(value: Any) -> Any:
    """Replace NaN and infinities with "nan", "inf" and "-inf", and make every key a string."""
    if isinstance(value, dict):
        return {str(key): sanitize_json(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [sanitize_json(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_strict_json(
    text: bytes | str,
    *,
    at_most: int = LARGEST,
    deepest: int = _DEEPEST,
    finite: bool = True,
    mapping: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Parse JSON from an untrusted source.

    Args:
        text: the JSON text.
        at_most: the maximum size, in bytes (for a str, in characters).
        deepest: the maximum nesting depth of lists and objects.
        finite: whether to refuse NaN, infinities and numbers that are too large for a float.
        mapping: converts the dict of each JSON object (default: keep the dict).

    Raises:
        ValueError: the text is too large, nested too deeply, not UTF-8 or not JSON, or contains a refused number.
    """
    if len(text) > at_most:
        raise ValueError(f"{len(text)} bytes exceed the limit of {at_most}")
    decoded = text.decode() if isinstance(text, bytes) else text  # a UnicodeDecodeError is a ValueError
    # a callback per number would be slow
    decimal, integer = (_parse_float, _parse_integer) if finite and _LARGE_NUMBER.search(decoded) else (None, None)
    try:
        value = json.loads(
            decoded,
            parse_constant=_reject_number if finite else None,
            parse_float=decimal,
            parse_int=integer,
            object_hook=mapping,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if decoded.count("[") + decoded.count("{") > deepest:
        _check_depth(value, deepest)
    return value


def _check_depth(value: Any, deepest: int) -> None:
    level = [value]
    for _ in range(deepest + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    if level:
        raise ValueError(f"nested more than {deepest} levels deep")


def _parse_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        _reject_number(digits)
    return number


def _parse_integer(digits: str) -> int:
    _parse_float(digits)
    return int(digits)


def _reject_number(number: str) -> NoReturn:
    raise ValueError(f"{number[:40]} is not a finite number")
