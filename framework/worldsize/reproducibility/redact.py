"""Keeps secrets out of what a run writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

REDACTED = "<redacted>"
_SECRET_WORDS = {
    *("token", "secret", "secrets", "password", "passwords", "passwd", "passphrase"),
    *("credential", "credentials", "apikey", "auth", "authorization"),
}
_SIGNATURES = {"sig", "signature"}  # of URLs that carry their own permission
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")  # up to the last @: a password may contain one
_URL_PARAMETER = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s'\"\],}]*)")
_KEY_IN_BRACES = re.compile(r"[\w.-]+(?=['\"]?\s*:)")


def is_secret(name: str) -> bool:
    """Whether a key or variable is named like a secret; by whole words: ``token`` is, ``tokens`` is not."""
    words = _words(name)
    pairs = {"_".join(pair) for pair in pairwise(words)}
    return bool(_SECRET_WORDS & set(words)) or bool({"api_key", "access_key", "private_key", "secret_key"} & pairs)


def _words(name: str) -> list[str]:
    """Lower-case words of snake, kebab, dotted and camel case: ``HFToken`` has ``hf`` and ``token``."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.split(r"[^a-z0-9]+", apart.lower())


def without_credentials(text: str) -> str:
    """``text`` with ``user:password@`` and the values of secret parameters taken out of every URL in it."""
    return _URL_PARAMETER.sub(_parameter, _URL_CREDENTIALS.sub("", text)) if "://" in text else text


def _parameter(found: re.Match[str]) -> str:
    hidden = is_secret(found[1]) or _SIGNATURES & set(_words(found[1]))
    return f"{found[1]}={REDACTED}" if hidden else found[0]


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
    key, equals, value = word.partition("=")
    hidden = is_secret(key) or ("{" in value and any(map(is_secret, _KEY_IN_BRACES.findall(value))))
    return f"{key}={REDACTED}" if equals and hidden else without_credentials(word)
