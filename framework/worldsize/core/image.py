"""The container image in which the processes of a run start."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})\Z")
_FILES = (".sif", ".sqsh", ".squashfs")


@final
@dataclass(frozen=True)
class ContainerImage:
    """An image, and what tells it from others of its name.

    Attributes:
        name: Its name as it was given, such as "trainer:1" or "trainer@sha256:...", or the path of a file.
        digest: "sha256:" and 64 hexadecimal digits: in its name, or the SHA-256 of the file. None: a tag names it,
            which may be another image tomorrow, or this machine does not see the file.
    """

    name: str
    digest: str | None

    @staticmethod
    def named(name: str) -> ContainerImage:
        """Return the image of a name; a file is read whole."""
        if match := _DIGEST.search(name):
            return ContainerImage(name, match[1])
        file = Path(name)
        if is_image_file(name) and file.is_file():
            status = file.stat()
            return ContainerImage(name, f"sha256:{_digest(file, status.st_mtime_ns, status.st_size)}")
        return ContainerImage(name, None)


def is_image_file(name: str) -> bool:
    """Return whether an image's name is the path of a file, as Apptainer and enroot have them."""
    return "://" not in name and name.endswith(_FILES)


@cache
def _digest(file: Path, time_ns: int, size: int) -> str:
    """Hash ``file``; its time and size distinguish it from what was there before."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
