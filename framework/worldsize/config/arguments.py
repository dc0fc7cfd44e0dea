"""Parsers for command-line arguments: numbers within the limits of a setting, and keys of overrides."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from worldsize.core.limits import Limit

T = TypeVar("T", int, float)


def build_number_parser(limit: Limit) -> Callable[[str], float]:
    """Return a parser for numbers within ``limit``, for use as ``type`` of an argument."""
    return lambda text: _parse_within_limit(text, float, limit)


def build_integer_parser(limit: Limit) -> Callable[[str], int]:
    """Return a parser for integers within ``limit``, for use as ``type`` of an argument."""
    return lambda text: _parse_within_limit(text, int, limit)


def _parse_within_limit(text: str, kind: Callable[[str], T], limit: Limit) -> T:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {'an integer' if kind is int else 'a number'}.") from None
    if refusal := limit.describe_violation(value):
        raise argparse.ArgumentTypeError(f"{text} {refusal}")
    return value


def parse_override_key(word: str) -> str:
    """Return the key that an override sets, adds or deletes."""
    return word.partition("=")[0].lstrip("+~")
