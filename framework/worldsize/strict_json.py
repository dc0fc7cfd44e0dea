"""JSON as we write it, and a reader for what others may have written: files of a run folder, sockets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

LARGEST = 64 << 20  # bytes of one text
_LARGE_NUMBER = re.compile(r"[eE]\+?\d{3}|\d{300}")


def strict(value: Any) -> Any:
    """Write NaN and infinities, which JSON lacks, as "nan", "inf" and "-inf", and every key as a string."""
    if isinstance(value, dict):
        return {str(key): strict(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [strict(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse(text: bytes | str, *, at_most: int = LARGEST, mapping: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse JSON that may come from anybody.

    ``at_most``: size that is accepted, in bytes (of a str, in characters). ``mapping`` makes what stands for each
    object (default: a dict).

    Raises:
        ValueError: it is too large, nested too deeply, no UTF-8, no JSON, or has a number that is not finite.
    """
    if len(text) > at_most:
        raise ValueError(f"it has {len(text)} bytes, which is more than {at_most}")
    decoded = text.decode() if isinstance(text, bytes) else text  # a UnicodeDecodeError is a ValueError
    number = _finite if _LARGE_NUMBER.search(decoded) else None  # a function for each number would be slow
    try:
        return json.loads(decoded, parse_constant=_refuse, parse_float=number, object_hook=mapping)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        _refuse(digits)
    return number


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number[:40]} is no finite number")
