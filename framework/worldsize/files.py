"""Opens files that others may have replaced: by a pipe, by something endless, or in a folder that one may not enter."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes; nothing else, since opening a pipe would wait for ever.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, *, at_most: int) -> bytes:
    """Read the whole of a regular file of at most so many bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes", str(path))
    return data


def is_file(path: Path) -> bool:
    """Whether there is such a file, as far as one may know: not in a folder that one may not enter."""
    with suppress(OSError, ValueError):
        return path.is_file()
    return False


def is_folder(path: Path) -> bool:
    """Whether there is such a folder, as far as one may know; not one in a folder that one may not enter."""
    with suppress(OSError, ValueError):
        return path.is_dir()
    return False
