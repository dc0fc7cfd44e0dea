"""Private temporary folders that go with the process that made them.

Their names say which process that is: its host, number and start. So the folders of a process that was killed can be
told from those of living ones, and the next command removes them.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "worldsize_"


def private_folder(parent: Path | None = None, *, prefix: str = PREFIX) -> Path:
    """Make a folder that only this user can enter, in the system's folder for temporary files if ``parent`` is None.

    Whoever makes it removes it; what is left when this process exits, or is killed, is removed then or by
    :func:`leftovers`.
    """
    pid = os.getpid()
    name = f"{prefix}{_process_space()}_{pid}_{_start_of(pid)}_"
    folder = Path(tempfile.mkdtemp(prefix=name, dir=parent))  # mode 0700
    atexit.register(_remove_own, folder, pid)
    return folder


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a private folder that is removed when the context ends."""
    folder = private_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def leftovers(parent: Path | None = None, *, prefix: str = PREFIX) -> list[Path]:
    """List this user's private folders whose processes ran on this host and live no longer."""
    if _start_of(os.getpid()) is None:  # no process is seen here
        return []
    with suppress(OSError), os.scandir(parent or tempfile.gettempdir()) as entries:
        return [Path(entry.path) for entry in entries if _is_leftover(entry, prefix)]
    return []


def _is_leftover(entry: os.DirEntry[str], prefix: str) -> bool:
    named = re.fullmatch(rf"{re.escape(prefix)}([0-9a-f]{{8}})_(\d+)_(\d+)_\w{{8}}", entry.name, re.ASCII)
    if not named or named[1] != _process_space():
        return False
    is_own = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return is_own and _start_of(int(named[2])) != int(named[3])


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _process_space() -> str:
    """Name the space in which process numbers count: a boot of a host, or a container.

    Several of them may share a folder.
    """
    facts = [platform.node()]
    with suppress(OSError):
        facts = [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]


def _start_of(pid: int) -> int | None:
    """Return when a process began, in clock ticks since the boot (0 where only Linux could say); None if it is dead."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except PermissionError:  # it is another user's
            return 0
        except (ProcessLookupError, OverflowError):
            return None
        return 0
    try:
        facts = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if facts[0] in ("Z", "X") else int(facts[19])  # dead, though its parent has not taken note
