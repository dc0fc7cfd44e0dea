"""Keeps secrets out of what a run writes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, final

REDACTED = "<redacted>"
Keys = tuple[str | int, ...]  # from the root of a configuration to a leaf
_SECRET_WORDS = {
    *("token", "secret", "secrets", "password", "passwords", "passwd", "passphrase"),
    *("credential", "credentials", "apikey", "auth", "authorization"),
}
_SIGNATURES = {"sig", "signature"}  # of URLs that carry their own permission
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")  # up to the last @: a password may contain one
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s]*)@")
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


@final
@dataclass(frozen=True)
class Scrubber:
    """Takes the values of known secrets out of everything that is written, wherever they appear."""

    secrets: tuple[str, ...]

    def text(self, text: str) -> str:
        """Replace every known secret in ``text``."""
        for secret in self.secrets:
            text = text.replace(secret, REDACTED)
        return text

    def tree(self, value: Any) -> Any:
        """A copy of nested containers without secret values, values of secret-looking keys and URLs' credentials."""
        return _mapped(redacted(value), self.text)

    def words(self, arguments: Sequence[str]) -> list[str]:
        """Command-line words without known secrets and values of secret-looking keys."""
        return [self.text(word) for word in redacted_arguments(arguments)]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(child, change) for key, child in value.items()}
    if isinstance(value, list):
        return [_mapped(child, change) for child in value]
    return change(value) if isinstance(value, str) else value


def scrubber(config: Any, environ: Mapping[str, str], netrc: Path) -> Scrubber:
    """Knows the values of secret-looking variables and keys, and the passwords of a netrc file.

    Values of fewer than 8 characters are not looked for: they would also be found where they mean nothing.
    """
    found = {value for name, value in environ.items() if is_secret(name)}
    kept_out = [str(value) for _, value in withheld(config, redacted(config))]
    found |= {value for value in kept_out if "://" not in value}
    found |= {password for value in kept_out for password in _URL_PASSWORD.findall(value)}
    found |= set(re.findall(r"\bpassword\s+(\S+)", netrc.read_text())) if os.access(netrc, os.R_OK) else set()
    return Scrubber(tuple(sorted((value for value in found if len(value) >= 8), key=len, reverse=True)))


def withheld(config: Any, written: Any, path: Keys = ()) -> list[tuple[Keys, Any]]:
    """The leaves of ``config`` that are another value in ``written``, with where they are."""
    if isinstance(config, Mapping) and isinstance(written, Mapping):
        return [leaf for key in config for leaf in withheld(config[key], written[key], (*path, key))]
    if isinstance(config, list) and isinstance(written, list):
        pairs = enumerate(zip(config, written, strict=True))
        return [leaf for index, (one, other) in pairs for leaf in withheld(one, other, (*path, index))]
    return [] if config == written else [(path, config)]


def restore(config: Any, secrets: Iterable[tuple[Sequence[str | int], Any]]) -> None:
    """Put withheld leaves back in place."""
    for (*parents, last), value in secrets:
        node = config
        for key in parents:
            node = node[key]
        node[last] = value


def missing(config: Any, path: Keys = ()) -> list[Keys]:
    """List the keys at which ``config`` still has a placeholder for a secret."""
    if isinstance(config, Mapping):
        return [found for key, child in config.items() for found in missing(child, (*path, key))]
    if isinstance(config, list):
        return [found for index, child in enumerate(config) for found in missing(child, (*path, index))]
    return [path] if isinstance(config, str) and REDACTED in config else []
