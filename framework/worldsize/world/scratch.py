"""Private temporary folders that are removed with their process, and this user's cache folder.

The names of temporary folders contain the host, process id and start time of that process. The next command can
therefore distinguish the folders of a killed process from those of a living one, and removes them. The cache folder
holds everything that can be made again.
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

from worldsize.errors import ConfigError

PREFIX = "worldsize_"
_LONGEST = 103  # bytes of the path of a Unix socket, on the strictest system
_IN_FOLDER = 72  # of these for the names of the private folder and of a socket in it
_LEAST_BYTES = 64 << 10  # free space, for heartbeats and the like


def private_folder(parent: Path | None = None, *, prefix: str = PREFIX) -> Path:
    """Make a folder that only this user can enter, by default in the system's folder for temporary files.

    The caller removes it. If it does not, it is removed when this process exits; if the process is killed,
    :func:`leftovers` lists it.

    Raises:
        ConfigError: the system's folder has no room.
    """
    pid = os.getpid()
    name = f"{prefix}{_process_space()}_{pid}_{_start_of(pid)}_"
    if parent is None and is_full(Path(tempfile.gettempdir())):
        raise ConfigError(
            f"{tempfile.gettempdir()}, the folder for temporary files, has no room. Set TMPDIR to one that has."
        )
    folder = Path(tempfile.mkdtemp(prefix=name, dir=parent))  # mode 0700
    atexit.register(_remove_own, folder, pid)
    return folder


def socket_folder() -> Path:
    """Make a private folder for Unix sockets, elsewhere than in TMPDIR if their paths would be too long there."""
    return private_folder(short_folder())


def short_folder() -> Path | None:
    """Return a folder for sockets; None: that for temporary files is short enough for their paths.

    Raises:
        ConfigError: no other can be written.
    """
    folder = Path(tempfile.gettempdir())
    if len(os.fsencode(folder)) <= _LONGEST - _IN_FOLDER:
        return None
    for other in (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")):
        if os.access(other, os.W_OK | os.X_OK):
            return other
    raise ConfigError(f"TMPDIR={folder} is too long for the paths of sockets. Set a shorter one.")


def full_folder(other: Path) -> str | None:
    """Return the folder for temporary files if its disk is full and that of ``other`` is not."""
    folder = Path(tempfile.gettempdir())
    return f"{folder} (TMPDIR)" if is_full(folder) and not is_full(other) else None


def is_full(folder: Path) -> bool:
    """Return whether the disk with ``folder`` has no room for small files."""
    return shutil.disk_usage(folder).free < _LEAST_BYTES


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a private folder that is removed when the context ends."""
    folder = private_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def leftovers(parent: Path | None = None, *, prefix: str = PREFIX) -> list[Path]:
    """List this user's private folders whose processes ran on this host and have ended."""
    if _start_of(os.getpid()) is None:  # processes are invisible here
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
    """Name the PID namespace: a boot of a host, or a container.

    Several of these may share a folder for temporary files.
    """
    facts = [platform.node()]
    with suppress(OSError):
        facts = [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]


def _start_of(pid: int) -> int | None:
    """Return when a process began, in clock ticks since the boot (0: not on Linux); None if it is dead."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except PermissionError:  # a process of another user
            return 0
        except (ProcessLookupError, OverflowError):
            return None
        return 0
    try:
        facts = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if facts[0] in ("Z", "X") else int(facts[19])  # a zombie is dead


_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder() -> Path:
    """Return ``worldsize`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worldsize"


def keep_compiled_code() -> None:
    """Let torch's compiler keep its code in :func:`cache_folder`, for all processes of this user, not in ``/tmp``.

    Raises:
        ConfigError: others can write there, and torch runs what it finds.
    """
    if _COMPILED in os.environ:
        return
    folder = cache_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ConfigError(
            f"{folder}, which keeps compiled code, belongs to somebody else or may be written by others. Remove it, or "
            f"name another folder with {_COMPILED}."
        )
    os.environ[_COMPILED] = str(folder)
