"""Keep secrets out of a run's files: redact values, and detect files that contain secrets.

Such files are detected by their permissions, names and contents.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from detect_secrets.plugins.base import RegexBasedDetector


REDACTED = "<redacted>"
_SHORTEST = 8  # minimum characters of a secret to redact; shorter ones would match unrelated text
Keys = tuple[str | int, ...]  # path from the root of a configuration to a leaf
_SECRET_WORDS = {
    *("token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pat", "jwt", "webhook", "dsn"),
    *("credential", "credentials", "apikey", "auth", "authorization", "pgpass"),
}
_SECRET_PARTS = ("password", "passwd", "passphrase", "secret", "apikey", "credential", "authtoken", "accesstoken")
_NO_SECRETS = {"secretary"}
_TEXT_TOKENS = {*("bos", "cls", "eos", "eot", "image", "mask", "pad", "sep", "special", "start", "stop", "unk")}
# words before "key", "pass" or "pwd" that indicate a secret, unlike keys of data such as image_key
_OWNERS = {
    *("access", "account", "admin", "api", "app", "auth", "aws", "azure", "client", "database", "db", "deploy"),
    *("encryption", "gcp", "hf", "key", "license", "login", "master", "mysql", "openai", "pg", "postgres", "priv"),
    *("private", "redis", "root", "secret", "service", "signing", "smtp", "ssh", "storage", "stripe", "user", "wandb"),
}
_PAIRS = {("connection", "string"), ("connection", "str"), ("conn", "string"), ("conn", "str")}
_PUBLIC = {*("cache", "foreign", "group", "index", "partition", "primary", "public", "sort")}
_PLACES = re.compile(r"HOME|USER|LOGNAME|PWD|OLDPWD|HOSTNAME|SCRATCH|WORK|TMPDIR|SLURM_\w+|\w+_(DIR|HOME|PATH|ROOT)")
_SIGNATURES = {"sig", "signature"}  # parameters of presigned URLs
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")  # up to the last @, since a password may contain one
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s]*)@")
_URL_PARAMETER = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s'\"\],}]*)")
_KEY_IN_BRACES = re.compile(r"[\w.-]+(?=['\"]?\s*:)")


def is_secret(name: str) -> bool:
    """Return whether a key or variable has a name that indicates a secret.

    Most words only match as a whole, so that ``token`` matches but ``tokens`` does not. A few words also match within
    others, as in ``PGPASSWORD``.
    """
    words = _split_words(name)
    if any(part in word for word in words if word not in _NO_SECRETS for part in _SECRET_PARTS):
        return True
    pairs = set(pairwise(words))
    if any(last in ("key", "keys", "pass", "pwd") and first in _OWNERS for first, last in pairs) or _PAIRS & pairs:
        return True
    texts = {last for first, last in pairs if first in _TEXT_TOKENS}
    return bool((_SECRET_WORDS - texts) & set(words))


def is_secret_variable(name: str) -> bool:
    """Return whether a variable's name indicates a secret, as most ``*_KEY`` and ``*_PASS`` do."""
    *before, last = _split_words(name)
    owned = bool(before) and last in ("key", "pass", "pwd") and before[-1] not in _PUBLIC
    return owned or is_secret(name)


def _split_words(name: str) -> list[str]:
    """Split snake, kebab, dotted and camel case: ``HFToken`` has words ``hf`` and ``token``."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.split(r"[^a-z0-9]+", apart.lower())


def remove_credentials(text: str) -> str:
    """Remove ``user:password@`` and redact secret parameters in all URLs in ``text``."""
    return _URL_PARAMETER.sub(_parameter, _URL_CREDENTIALS.sub("", text)) if "://" in text else text


def _parameter(match: re.Match[str]) -> str:
    hidden = is_secret(match[1]) or _SIGNATURES & set(_split_words(match[1]))
    return f"{match[1]}={REDACTED}" if hidden else match[0]


def redact_tree(value: Any) -> Any:
    """Copy nested containers; redact values of secret-looking keys and credentials in URLs."""
    if isinstance(value, Mapping):
        return {key: REDACTED if is_secret(str(key)) and child else redact_tree(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(child) for child in value]
    return remove_credentials(value) if isinstance(value, str) else value


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments ``a.b=value`` with redacted values of secret-looking keys."""
    return [_argument(word) for word in arguments]


def _argument(word: str) -> str:
    key, equals, value = word.partition("=")
    hidden = is_secret(key) or ("{" in value and any(map(is_secret, _KEY_IN_BRACES.findall(value))))
    return f"{key}={REDACTED}" if equals and hidden else remove_credentials(word)


@final
@dataclass(frozen=True)
class Scrubber:
    """Redacts the values of known secrets wherever they appear in output."""

    secrets: tuple[str, ...]

    def scrub_text(self, text: str) -> str:
        """Redact all known secrets in ``text``."""
        for secret in self.secrets:
            text = text.replace(secret, REDACTED)
        return text

    def scrub_tree(self, value: Any) -> Any:
        """Copy nested containers like :func:`redact_tree`; also redact known secrets."""
        return _map_strings(redact_tree(value), self.scrub_text)

    def scrub_arguments(self, arguments: Sequence[str]) -> list[str]:
        """Redact arguments like :func:`redact_arguments`; also redact known secrets."""
        return [self.scrub_text(word) for word in redact_arguments(arguments)]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_strings(child, change) for key, child in value.items()}
    if isinstance(value, list):
        return [_map_strings(child, change) for child in value]
    return change(value) if isinstance(value, str) else value


def scrubber(config: Any, environ: Mapping[str, str], netrc: Path, *, interpolated: Iterable[str] = ()) -> Scrubber:
    """Create a scrubber for values of secret-looking names, and passwords in a netrc file.

    ``interpolated`` are the variables that the configuration reads with ``${oc.env:NAME}``. Their values are treated as
    secrets, since the user kept them out of the configuration. Locations such as ``HOME`` or ``DATA_DIR`` are not
    secrets.

    Values with fewer than 8 characters are ignored.
    """
    values = {value for name, value in environ.items() if is_secret_variable(name)}
    values |= {environ.get(name, "") for name in interpolated if not _PLACES.fullmatch(name)}
    kept_out = [str(value) for _, value in withheld(config, redact_tree(config))]
    values |= {value for value in kept_out if "://" not in value}
    values |= {password for value in kept_out for password in _URL_PASSWORD.findall(value)}
    values |= set(re.findall(r"\bpassword\s+(\S+)", netrc.read_text())) if os.access(netrc, os.R_OK) else set()
    return _create_scrubber(values)


def process_scrubber(secrets: Mapping[str, str]) -> Scrubber:
    """Create a scrubber for this process, from its environment, netrc and ``Plan.secrets``."""
    given = json.loads({**os.environ, **secrets}.get("WORLDSIZE_SECRETS", "[]"))
    values = {str(value) for _, value in given}
    netrc = Path("~/.netrc")
    with suppress(RuntimeError):  # the user does not have a home folder
        netrc = netrc.expanduser()
    return _create_scrubber({*values, *scrubber({}, os.environ, netrc).secrets})


def _create_scrubber(values: Iterable[str]) -> Scrubber:
    """Create a scrubber for values of sufficient length that redacts longer ones first."""
    return Scrubber(tuple(sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)))


def withheld(config: Any, written: Any, path: Keys = ()) -> list[tuple[Keys, Any]]:
    """Return the leaves of ``config`` with a different value in ``written``, with their keys."""
    if isinstance(config, Mapping) and isinstance(written, Mapping):
        return [leaf for key in config for leaf in withheld(config[key], written[key], (*path, key))]
    if isinstance(config, list) and isinstance(written, list):
        pairs = enumerate(zip(config, written, strict=True))
        return [leaf for index, (one, other) in pairs for leaf in withheld(one, other, (*path, index))]
    return [] if config == written else [(path, config)]


def restore_secrets(config: Any, secrets: Iterable[tuple[Sequence[str | int], Any]]) -> None:
    """Insert withheld leaves into ``config``, in place."""
    for (*parents, last), value in secrets:
        node = config
        for key in parents:
            node = node[key]
        node[last] = value


def find_redacted_keys(config: Any, path: Keys = ()) -> list[Keys]:
    """List the keys with a redacted value in ``config``."""
    if isinstance(config, Mapping):
        return [place for key, child in config.items() for place in find_redacted_keys(child, (*path, key))]
    if isinstance(config, list):
        return [place for index, child in enumerate(config) for place in find_redacted_keys(child, (*path, index))]
    return [path] if isinstance(config, str) and REDACTED in config else []


PRIVATE_NAMES = (  # patterns for files and their parent folders
    *(".env*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*secret*", "*credential*", "*password*", "*passwd*"),
    *(".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".git-credentials", ".htpasswd", "kubeconfig*"),
    *("service[-_]account*.json", ".aws", ".azure", ".docker", ".gnupg", ".kube", ".ssh"),
)
_KEYS = {  # key formats that detect-secrets does not support, or only in quadratic time
    "Anthropic key": r"\bsk-ant-[\w-]{40}",
    "Databricks token": r"\bdapi[0-9a-f]{32}",
    "DigitalOcean token": r"\bdo[opr]_v1_[0-9a-f]{64}\b",
    "GitHub fine-grained token": r"\bgithub_pat_\w{50}",
    "Google key": r"\bAIza[\w-]{35}\b",
    "Groq key": r"\bgsk_[A-Za-z0-9]{40}",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{34}\b",
    "JSON Web Token": r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]+={0,2}\.[A-Za-z0-9_-]",  # starts only at a word start
    "npm token": r"\bnpm_[A-Za-z0-9]{36}\b|:_authToken=[ \t]*[A-Fa-f0-9-]{36}",
    "OpenAI Token": r"[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}",
    "OpenAI key": r"\bsk-(proj|svcacct)-[\w-]{40}",
    "Replicate token": r"\br8_[A-Za-z0-9]{37}\b",
    "Vault token": r"\bhv[bs]\.[\w-]{24}",
}
_UNUSED = {"Public IP (ipv4)"}  # detectors of detect-secrets to ignore, since they do not detect keys
_QUADRATIC = {"NPM tokens", "JSON Web Token", "OpenAI Token"}  # slow on long lines; replaced by patterns above
_ASSIGNED = re.compile(  # linear time: a match starts only at a word start, and "=" only occurs at a value's end
    r"(?<![\w.-])([\w.-]{1,80})[\"']?[ \t]*[:=][ \t]*[\"']?"
    r"(?:(?:Bearer|Basic|token)[ \t]+)?([A-Za-z0-9+/_~-]{16,}={0,2})"
    r"(?=[\s\"',;&})\]]|$)"  # otherwise probably code, such as a call
)
_SPACES = re.compile(r" {2,}")  # detect-secrets takes cubic time in the number of spaces
_RANDOM = re.compile(r"[0-9a-f-]{32,}|(?=.*[a-z])(?=.*[A-Z])(?=.*\d).*")


def why_private(path: Path, name: str, *, include: Sequence[str] = ()) -> str | None:
    """Return why a file must not be copied into a run folder; None if it does not seem private.

    ``name`` is the path relative to the project. Files that match a pattern in ``include`` are never private. Names of
    ``.py`` files are ignored, since ``secret_sharing.py`` is a module.

    Keys are detected by the formats of detect-secrets and some others, and as random text assigned to a name such as
    ``DB_PASSWORD`` or ``Authorization``. File permissions are ignored if the user's umask makes all files private.
    """
    if path.is_symlink() or any(fnmatch(name, pattern) for pattern in include):
        return None
    parts = () if path.suffix == ".py" else PurePath(name.lower()).parts
    if any(fnmatch(part, pattern) for part in parts for pattern in PRIVATE_NAMES):
        return "private file name"
    if not stat.S_IMODE(path.stat().st_mode) & 0o077 and _read_umask() & 0o077 != 0o077:
        return "readable only by its owner"
    content = path.read_bytes()
    if b"\0" in content[:8192]:
        return None
    text = _SPACES.sub(" ", content.decode(errors="replace"))
    return next((f"possible secret: {kind}" for kind, finds in _detectors() if finds(text)), None)


@cache
def _read_umask() -> int:
    """Return this process's umask, on Linux without changing it temporarily."""
    status = Path("/proc/self/status")
    if sys.platform == "linux" and (line := re.search(r"^Umask:\s*(\d+)", status.read_text(), re.MULTILINE)):
        return int(line[1], 8)
    umask = os.umask(0o022)
    os.umask(umask)
    return umask


@cache
def _detectors() -> Sequence[tuple[str, Callable[[str], bool]]]:
    return tuple(_create_detectors())


def _create_detectors() -> Iterator[tuple[str, Callable[[str], bool]]]:
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class  # takes 0.2 s
    from detect_secrets.plugins.base import RegexBasedDetector

    for kind, pattern in _KEYS.items():
        yield kind, partial(_has_match, re.compile(pattern))
    yield "random string assigned to the name of a secret", _assigns_secret
    known: Mapping[str, type[Any]] = get_mapping_from_secret_type_to_class()
    for kind, detector in known.items():
        if issubclass(detector, RegexBasedDetector) and kind not in _UNUSED | _QUADRATIC:
            yield kind, partial(_has_secret, detector())


def _has_match(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.search(text) is not None


def _assigns_secret(text: str) -> bool:
    return any(is_secret(name) and _RANDOM.fullmatch(value) for name, value in _ASSIGNED.findall(text))


def _has_secret(detector: RegexBasedDetector, text: str) -> bool:
    return any(detector.analyze_string(text))
