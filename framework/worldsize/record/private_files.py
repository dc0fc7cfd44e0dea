"""Recognises files that contain secrets, by their permissions, names and contents."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from worldsize.record.redaction import is_secret

if TYPE_CHECKING:
    from detect_secrets.plugins.base import RegexBasedDetector

PRIVATE_NAMES = (  # of files, and of folders around them
    *(".env*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*secret*", "*credential*", "*password*", "*passwd*"),
    *(".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".git-credentials", ".htpasswd", "kubeconfig*"),
    *("service[-_]account*.json", ".aws", ".azure", ".docker", ".gnupg", ".kube", ".ssh"),
)
_KEYS = {  # formats of keys that detect-secrets lacks, or finds in quadratic time
    "Anthropic key": r"\bsk-ant-[\w-]{40}",
    "Databricks token": r"\bdapi[0-9a-f]{32}",
    "DigitalOcean token": r"\bdo[opr]_v1_[0-9a-f]{64}\b",
    "GitHub fine-grained token": r"\bgithub_pat_\w{50}",
    "Google key": r"\bAIza[\w-]{35}\b",
    "Groq key": r"\bgsk_[A-Za-z0-9]{40}",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{34}\b",
    "JSON Web Token": r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]+={0,2}\.[A-Za-z0-9_-]",  # begins where no other can
    "npm token": r"\bnpm_[A-Za-z0-9]{36}\b|:_authToken=[ \t]*[A-Fa-f0-9-]{36}",
    "OpenAI Token": r"[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}",
    "OpenAI key": r"\bsk-(proj|svcacct)-[\w-]{40}",
    "Replicate token": r"\br8_[A-Za-z0-9]{37}\b",
    "Vault token": r"\bhv[bs]\.[\w-]{24}",
}
_UNUSED = {"Public IP (ipv4)"}  # of detect-secrets: it is no key
_QUADRATIC = {"NPM tokens", "JSON Web Token", "OpenAI Token"}  # of detect-secrets, in a long line; ours are above
_ASSIGNED = re.compile(  # linear time: a match begins only where a word does, and a value has "=" only at its end
    r"(?<![\w.-])([\w.-]{1,80})[\"']?[ \t]*[:=][ \t]*[\"']?"
    r"(?:(?:Bearer|Basic|token)[ \t]+)?([A-Za-z0-9+/_~-]{16,}={0,2})"
    r"(?=[\s\"',;&})\]]|$)"  # else it is code, such as a call
)
_SPACES = re.compile(r" {2,}")  # patterns of detect-secrets take cubic time in their number
_RANDOM = re.compile(r"[0-9a-f-]{32,}|(?=.*[a-z])(?=.*[A-Z])(?=.*\d).*")


def why_private(path: Path, name: str, *, include: Sequence[str] = ()) -> str | None:
    """Return why the file ``path`` must not be copied into a run folder; None if it does not seem private.

    ``name``: relative to its project, with which the patterns of ``include`` are compared, that overrule this. Of
    Python's sources no name shows anything: ``secret_sharing.py`` is a module.

    The formats of keys are those that detect-secrets knows, some more, and a random text that is assigned to a name
    such as ``DB_PASSWORD`` or ``Authorization``. A mode without rights for others shows
    nothing where the user's files all have it.
    """
    if path.is_symlink() or any(fnmatch(name, pattern) for pattern in include):
        return None
    parts = () if path.suffix == ".py" else PurePath(name.lower()).parts
    if any(fnmatch(part, pattern) for part in parts for pattern in PRIVATE_NAMES):
        return "its name"
    if not stat.S_IMODE(path.stat().st_mode) & 0o077 and _umask() & 0o077 != 0o077:
        return "nobody else may read it"
    content = path.read_bytes()
    if b"\0" in content[:8192]:
        return None
    text = _SPACES.sub(" ", content.decode(errors="replace"))
    return next((f"it seems to hold: {kind}" for kind, finds in _detectors() if finds(text)), None)


@cache
def _umask() -> int:
    """Return this user's umask: the permission bits that new files lack."""
    status = Path("/proc/self/status")
    if sys.platform == "linux" and (line := re.search(r"^Umask:\s*(\d+)", status.read_text(), re.MULTILINE)):
        return int(line[1], 8)
    umask = os.umask(0o022)
    os.umask(umask)
    return umask


@cache
def _detectors() -> Sequence[tuple[str, Callable[[str], bool]]]:
    return tuple(_known_formats())


def _known_formats() -> Iterator[tuple[str, Callable[[str], bool]]]:
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class  # takes 0.2 s
    from detect_secrets.plugins.base import RegexBasedDetector

    for kind, pattern in _KEYS.items():
        yield kind, partial(_has, re.compile(pattern))
    yield "a random text assigned to a name of a secret", _assigns_secret
    known: Mapping[str, type[Any]] = get_mapping_from_secret_type_to_class()
    for kind, detector in known.items():
        if issubclass(detector, RegexBasedDetector) and kind not in _UNUSED | _QUADRATIC:
            yield kind, partial(_finds, detector())


def _has(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.search(text) is not None


def _assigns_secret(text: str) -> bool:
    return any(is_secret(name) and _RANDOM.fullmatch(value) for name, value in _ASSIGNED.findall(text))


def _finds(detector: RegexBasedDetector, text: str) -> bool:
    return any(detector.analyze_string(text))
