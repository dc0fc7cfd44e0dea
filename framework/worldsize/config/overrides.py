"""Parses the overrides of a command line. Imports nothing heavy."""

from __future__ import annotations


def key_of(word: str) -> str:
    """Return the key that an override sets, adds or deletes."""
    return word.partition("=")[0].lstrip("+~")
