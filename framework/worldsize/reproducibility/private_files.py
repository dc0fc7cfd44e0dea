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

if TYPE_CHECKING:
    from detect_secrets.plugins.base import RegexBasedDetector

PRIVATE_NAMES = (  # of files, and of folders around them
    *(".env*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*secret*", "*credential*", "*password*", "*passwd*"),
    *(".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".git-credentials", ".htpasswd", "kubeconfig*"),
    *("service[-_]account*.json", ".aws", ".azure", ".docker", ".gnupg", ".kube", ".ssh"),
)
_HUGGING_FACE = re.compile(r"\bhf_[A-Za-z]{34}\b")
_GOOGLE = re.compile(r"\bAIza[\w-]{35}\b")


def why_private(path: Path, name: str, *, include: Sequence[str] = ()) -> str | None:
    """Return why the file ``path`` must not be copied into a run folder; None if it does not seem private.

    ``name``: relative to its project, with which the patterns of ``include`` are compared, that overrule this. Of
    Python's sources no name shows anything: ``secret_sharing.py`` is a module.

    The formats of keys are those that detect-secrets knows, and two more. A mode without rights for others shows
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
    text = content.decode(errors="replace")
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

    yield "Hugging Face token", lambda text: bool(_HUGGING_FACE.search(text))
    yield "Google key", lambda text: bool(_GOOGLE.search(text))
    known: Mapping[str, type[Any]] = get_mapping_from_secret_type_to_class()
    for kind, detector in known.items():
        if issubclass(detector, RegexBasedDetector) and kind != "Public IP (ipv4)":
            yield kind, partial(_finds, detector())


def _finds(detector: RegexBasedDetector, text: str) -> bool:
    return any(detector.analyze_string(text))
