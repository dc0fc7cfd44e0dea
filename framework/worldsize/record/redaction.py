"""Keeps secrets out of what a run writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, final

REDACTED = "<redacted>"
_SHORTEST = 8  # characters of a value that is looked for: shorter ones are also found where they mean nothing
Keys = tuple[str | int, ...]  # from the root of a configuration to a leaf
_SECRET_WORDS = {
    *("token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pat", "jwt", "webhook", "dsn"),
    *("credential", "credentials", "apikey", "auth", "authorization", "pgpass"),
}
_SECRET_PARTS = ("password", "passwd", "passphrase", "secret", "apikey", "credential", "authtoken", "accesstoken")
_NO_SECRETS = {"secretary"}
_TEXT_TOKENS = {*("bos", "cls", "eos", "eot", "image", "mask", "pad", "sep", "special", "start", "stop", "unk")}
# what stands before "key", "pass" or "pwd" if these are secret; a key of data, such as image_key, is none
_OWNERS = {
    *("access", "account", "admin", "api", "app", "auth", "aws", "azure", "client", "database", "db", "deploy"),
    *("encryption", "gcp", "hf", "key", "license", "login", "master", "mysql", "openai", "pg", "postgres", "priv"),
    *("private", "redis", "root", "secret", "service", "signing", "smtp", "ssh", "storage", "stripe", "user", "wandb"),
}
_PAIRS = {("connection", "string"), ("connection", "str"), ("conn", "string"), ("conn", "str")}
_PUBLIC = {*("cache", "foreign", "group", "index", "partition", "primary", "public", "sort")}
_PLACES = re.compile(r"HOME|USER|LOGNAME|PWD|OLDPWD|HOSTNAME|SCRATCH|WORK|TMPDIR|SLURM_\w+|\w+_(DIR|HOME|PATH|ROOT)")
_SIGNATURES = {"sig", "signature"}  # of URLs that carry their own permission
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")  # up to the last @: a password may contain one
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s]*)@")
_URL_PARAMETER = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s'\"\],}]*)")
_KEY_IN_BRACES = re.compile(r"[\w.-]+(?=['\"]?\s*:)")


def is_secret(name: str) -> bool:
    """Return whether a key or variable is named like a secret.

    By whole words, so that ``token`` is and ``tokens`` is not; a few words also inside of others, as in ``PGPASSWORD``.
    """
    words = _words(name)
    if any(part in word for word in words if word not in _NO_SECRETS for part in _SECRET_PARTS):
        return True
    pairs = set(pairwise(words))
    if any(last in ("key", "keys", "pass", "pwd") and first in _OWNERS for first, last in pairs) or _PAIRS & pairs:
        return True
    texts = {last for first, last in pairs if first in _TEXT_TOKENS}
    return bool((_SECRET_WORDS - texts) & set(words))


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable is named like a secret; there every ``..._KEY`` and ``..._PASS`` is."""
    *before, last = _words(name)
    owned = bool(before) and last in ("key", "pass", "pwd") and before[-1] not in _PUBLIC
    return owned or is_secret(name)


def _words(name: str) -> list[str]:
    """Lower-case words of snake, kebab, dotted and camel case: ``HFToken`` has ``hf`` and ``token``."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.split(r"[^a-z0-9]+", apart.lower())


def without_credentials(text: str) -> str:
    """``text`` with ``user:password@`` and the values of secret parameters taken out of every URL in it."""
    return _URL_PARAMETER.sub(_parameter, _URL_CREDENTIALS.sub("", text)) if "://" in text else text


def _parameter(match: re.Match[str]) -> str:
    hidden = is_secret(match[1]) or _SIGNATURES & set(_words(match[1]))
    return f"{match[1]}={REDACTED}" if hidden else match[0]


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


def scrubber(config: Any, environ: Mapping[str, str], netrc: Path, *, interpolated: Iterable[str] = ()) -> Scrubber:
    """Know the values of secret-looking variables and keys, and the passwords of a netrc file.

    Variables that the configuration takes by ``${oc.env:NAME}`` are ``interpolated``: who does not want to write a
    value down has a reason, unless it is a place, such as ``HOME`` or ``DATA_DIR``.

    Values of fewer than 8 characters are not looked for.
    """
    values = {value for name, value in environ.items() if is_secret_variable(name)}
    values |= {environ.get(name, "") for name in interpolated if not _PLACES.fullmatch(name)}
    kept_out = [str(value) for _, value in withheld(config, redacted(config))]
    values |= {value for value in kept_out if "://" not in value}
    values |= {password for value in kept_out for password in _URL_PASSWORD.findall(value)}
    values |= set(re.findall(r"\bpassword\s+(\S+)", netrc.read_text())) if os.access(netrc, os.R_OK) else set()
    return _scrubber_of(values)


def process_scrubber(secrets: Mapping[str, str]) -> Scrubber:
    """Return the scrubber for errors in this process: its environment, netrc, and the values of ``Plan.secrets``."""
    given = json.loads({**os.environ, **secrets}.get("WORLDSIZE_SECRETS", "[]"))
    values = {str(value) for _, value in given}
    netrc = Path("~/.netrc")
    with suppress(RuntimeError):  # the user has no home folder
        netrc = netrc.expanduser()
    return _scrubber_of({*values, *scrubber({}, os.environ, netrc).secrets})


def _scrubber_of(values: Iterable[str]) -> Scrubber:
    """Return the scrubber of values that are long enough, the longest first: it may contain a shorter one."""
    return Scrubber(tuple(sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)))


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
        return [place for key, child in config.items() for place in missing(child, (*path, key))]
    if isinstance(config, list):
        return [place for index, child in enumerate(config) for place in missing(child, (*path, index))]
    return [path] if isinstance(config, str) and REDACTED in config else []
