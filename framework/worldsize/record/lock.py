"""The lock that a launching process holds on its run folder while it lives."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from worldsize.errors import WorldsizeError
from worldsize.files import open_regular

_NAME = ".lock"
_FLOCK = struct.Struct("hhqqixxxx")  # struct flock of Linux on 64 bits: l_type, l_whence, l_start, l_len, l_pid

# A process loses a record lock as soon as it closes any descriptor of the file, so a folder that this
# process has locked must not be opened again. The pid tells a forked child that the lock is not its own.
_held: dict[Path, int] = {}


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock within the context; the kernel releases it when the process ends, however it ends.

    It is a POSIX record lock (``lockf``), not ``flock``: forked workers must not inherit it, or a run whose launcher
    was killed would seem alive until its last process has ended.

    Raises:
        WorldsizeError: a process holds the lock already, or the file system has no locks.
    """
    if _is_own(run_dir):
        raise WorldsizeError(f"the run {run_dir} is being trained by this process. Wait for it.")
    with _file(run_dir, append=True) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _refusal(run_dir, error) from None
        _held[run_dir.resolve()] = os.getpid()
        try:
            yield
        finally:
            _held.pop(run_dir.resolve(), None)


def _file(run_dir: Path, *, append: bool = False) -> BinaryIO:
    try:
        return open_regular(run_dir / _NAME, append=append)
    except OSError as error:
        raise _refusal(run_dir, error) from None


def _refusal(run_dir: Path, error: OSError) -> WorldsizeError:
    if error.errno in (errno.EACCES, errno.EAGAIN):
        return WorldsizeError(f"the run {run_dir} is being trained by another process. Wait for its end, or cancel it.")
    if os.path.lexists(lock := run_dir / _NAME) and not stat.S_ISREG(lock.lstat().st_mode):
        return WorldsizeError(f"{lock} is no regular file, which no worldsize made. Remove it.")
    return WorldsizeError(
        f"the run {run_dir} cannot be locked: {error.strerror}. Set run.root to a file system with locks."
    )


def is_locked(run_dir: Path) -> bool:
    """Return whether a process holds the run's lock; also True if the file system cannot tell."""
    if _is_own(run_dir):
        return True
    if not os.path.lexists(run_dir / _NAME):
        return False
    with _file(run_dir) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: it may be a run of another user
        except OSError:
            return True
    return False


def holder_of(run_dir: Path) -> int | None:
    """Return the process on this host that holds the run's lock, according to the kernel; None if there is none.

    A process id in the run folder could have been written by another user.
    """
    if _is_own(run_dir):
        return os.getpid()
    if sys.platform != "linux" or not os.path.lexists(run_dir / _NAME):
        return None
    with _file(run_dir) as file:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def _is_own(run_dir: Path) -> bool:
    return _held.get(run_dir.resolve()) == os.getpid()
