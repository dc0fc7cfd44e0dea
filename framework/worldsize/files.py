"""Safe access to files that other users may have replaced by a pipe, an endless device or an unreadable folder."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes. Anything else is refused: opening a pipe could block for ever.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, *, at_most: int) -> bytes:
    """Read a regular file of no more than ``at_most`` bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes", str(path))
    return data


def is_file(path: Path) -> bool:
    """Return whether ``path`` is a file; False if this user may not enter its folder."""
    with suppress(OSError, ValueError):
        return path.is_file()
    return False


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder; False if this user may not enter its parent."""
    with suppress(OSError, ValueError):
        return path.is_dir()
    return False
