"""Keeps secrets out of what a run writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

REDACTED = "<redacted>"
_SECRET_WORDS = {"token", "secret", "password", "passwd", "credential", "credentials", "apikey", "auth"}
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Whether a key or variable is named like a secret; by whole words: ``token`` is, ``tokens`` is not."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    pairs = {"_".join(pair) for pair in pairwise(words)}
    return bool(_SECRET_WORDS & set(words)) or bool({"api_key", "access_key", "private_key", "secret_key"} & pairs)


def without_credentials(text: str) -> str:
    """``text`` with ``user:password@`` taken out of every URL in it."""
    return _URL_CREDENTIALS.sub("", text)


def redacted(value: Any) -> Any:
    """A copy of nested containers in which the values of secret-looking keys are replaced."""
    if isinstance(value, Mapping):
        return {key: REDACTED if is_secret(str(key)) and child else redacted(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(child) for child in value]
    return without_credentials(value) if isinstance(value, str) else value


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Command-line words ``a.b=value`` with the value of a secret-looking key replaced."""
    return [_argument(word) for word in arguments]


def _argument(word: str) -> str:
    key, equals, _ = word.partition("=")
    return f"{key}={REDACTED}" if equals and is_secret(key) else without_credentials(word)
