"""Bounds what indices take on disk: those unused for longest go first, and none that a process uses."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from worldsize.data.storage.byte_files import Opened

FACTS = "index.json"


def in_use(folder: Path) -> Opened | None:
    """Mark an index as used just now, and keep all processes from removing it while what is returned lives.

    Returns:
        None if there is no such index, or if it is being removed.
    """
    try:
        opened = Opened(folder / FACTS)
        with suppress(OSError):
            os.utime(opened.descriptor)
        _lock(opened, fcntl.LOCK_SH)
        return opened if os.path.samestat(os.fstat(opened.descriptor), (folder / FACTS).stat()) else None
    except OSError:
        return None


def _lock(opened: Opened, kind: int) -> None:
    """Take a lock at once; on a file system without locks nothing is removed, so that one needs none there.

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(opened.descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        if kind == fcntl.LOCK_EX:
            raise


def make_room(indices: Path, capacity: float) -> None:
    """Remove the indices unused for longest until all take at most ``capacity`` bytes, and what killed processes left.

    Args:
        indices: the folder that has a folder of each.
    """
    with FileLock(indices.with_suffix(".lock")):
        for left in indices.glob(".*"):
            with suppress(Timeout, OSError), FileLock(indices / f"{left.name.split('.')[1]}.lock", timeout=0):
                shutil.rmtree(left)
        entries = []
        for facts in indices.glob(f"*/{FACTS}"):
            with suppress(OSError):
                size = sum(each.stat().st_size for each in facts.parent.iterdir())
                entries.append((facts.stat().st_mtime_ns, size, facts.parent))
        taken = sum(size for _, size, _ in entries)
        for _, size, folder in sorted(entries):
            if taken <= capacity:
                return
            taken -= size if _removed(folder) else 0


def _removed(folder: Path) -> bool:
    """Remove an index unless a process uses it; say whether it is gone."""
    try:
        opened = Opened(folder / FACTS)
        _lock(opened, fcntl.LOCK_EX)
        aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        folder.rename(aside)  # so that nobody finds a part of it
        shutil.rmtree(aside)
    except OSError:
        return False
    return True
