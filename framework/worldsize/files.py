"""Safe access to files that other users may have replaced with a pipe, device, link or unreadable folder."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

RECORD = "run_manifest.json"  # a folder with this file is a run folder
ATTESTATION = "attestation.json"  # a signed statement about a run, in its folder


def open_regular(path: Path, *, append: bool = False) -> BinaryIO:
    """Open a regular file for reading bytes, or with ``append`` for reading and appending (created if missing).

    Files of other types are refused, since opening a pipe could block forever. In a run folder, links to files outside
    of the folder are also refused.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is outside of its run folder.
    """
    access = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW if append else os.O_RDONLY
    descriptor = os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        run = next((each for each in path.absolute().parents if os.path.lexists(each / RECORD)), None)
        if run is not None:
            # The resolved path; on Linux, read from the open descriptor, so that the file cannot be swapped meanwhile.
            real = Path(f"/proc/self/fd/{descriptor}").readlink() if sys.platform == "linux" else path.resolve()
            if not real.is_relative_to(run.resolve()):
                raise OSError(errno.ELOOP, "a link points outside of the run folder", str(path))
        return os.fdopen(descriptor, "a+b" if append else "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, *, at_most: int) -> bytes:
    """Read a regular file of at most ``at_most`` bytes, with the checks of :func:`open_regular`.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger.
    """
    with open_regular(path) as file:
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise OSError(errno.EFBIG, f"larger than {at_most:,} bytes", str(path))
    return data


def replace_file(path: Path, data: bytes) -> None:
    """Write a file durably and atomically, replacing an existing file or link at ``path``.

    Raises:
        OSError: the folder cannot be written.
    """
    draft = path.with_name(f".draft_{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:  # tempfile would make it unreadable for other users
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


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
