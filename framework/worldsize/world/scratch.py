"""Private temporary folders, removed when their process exits, and the cache folder.

The name of a temporary folder contains its process's host, ID and start time. The next command can therefore
distinguish folders of killed processes from those in use, and removes the former. The cache folder holds everything
that can be recreated.
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
_LONGEST = 103  # maximum bytes in the path of a Unix socket, on the strictest system
_IN_FOLDER = 72  # bytes of _LONGEST reserved for the names of the private folder and of a socket in it
_LEAST_BYTES = 64 << 10  # minimum free space, for heartbeats and other small files


def private_folder(parent: Path | None = None, *, prefix: str = PREFIX) -> Path:
    """Create a folder that only this user can access, by default in the temporary directory.

    The caller should remove the folder. Otherwise it is removed when this process exits; if the process is killed,
    :func:`leftovers` lists the folder.

    Raises:
        ConfigError: the disk with the temporary directory is full.
    """
    pid = os.getpid()
    name = f"{prefix}{_process_space()}_{pid}_{_read_start_time(pid)}_"
    if parent is None and is_full(Path(tempfile.gettempdir())):
        raise ConfigError(
            f"the temporary folder {tempfile.gettempdir()} is full. Set TMPDIR to a folder with free space."
        )
    folder = Path(tempfile.mkdtemp(prefix=name, dir=parent))  # mode 0700
    atexit.register(_remove_own, folder, pid)
    return folder


def socket_folder() -> Path:
    """Create a private folder for Unix sockets, outside TMPDIR if its path is too long."""
    return private_folder(short_folder())


def short_folder() -> Path | None:
    """Return a folder with a short path for Unix sockets; None if the temporary folder's path is short enough.

    Raises:
        ConfigError: the temporary folder's path is too long, and no alternative folder is writable.
    """
    folder = Path(tempfile.gettempdir())
    if len(os.fsencode(folder)) <= _LONGEST - _IN_FOLDER:
        return None
    for other in (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")):
        if os.access(other, os.W_OK | os.X_OK):
            return other
    raise ConfigError(f"TMPDIR={folder} is too long for Unix socket paths. Set a shorter path.")


def full_folder(other: Path) -> str | None:
    """Return the temporary folder, for an error message, if its disk is full but the disk of ``other`` is not."""
    folder = Path(tempfile.gettempdir())
    return f"{folder} (TMPDIR)" if is_full(folder) and not is_full(other) else None


def is_full(folder: Path) -> bool:
    """Return whether the disk that holds ``folder`` lacks space for small files."""
    return shutil.disk_usage(folder).free < _LEAST_BYTES


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a private folder that is removed when the context exits."""
    folder = private_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def leftovers(parent: Path | None = None, *, prefix: str = PREFIX) -> list[Path]:
    """List this user's private folders left by processes that ran on this host and have exited."""
    if _read_start_time(os.getpid()) is None:  # /proc is hidden, so any folder may be in use
        return []
    with suppress(OSError), os.scandir(parent or tempfile.gettempdir()) as entries:
        return [Path(entry.path) for entry in entries if _is_leftover(entry, prefix)]
    return []


def _is_leftover(entry: os.DirEntry[str], prefix: str) -> bool:
    named = re.fullmatch(rf"{re.escape(prefix)}([0-9a-f]{{8}})_(\d+)_(\d+)_\w{{8}}", entry.name, re.ASCII)
    if not named or named[1] != _process_space():
        return False
    is_own = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return is_own and _read_start_time(int(named[2])) != int(named[3])


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _process_space() -> str:
    """Return an identifier of the PID namespace: one boot of a host, or one container.

    Several namespaces may share a folder for temporary files.
    """
    facts = [platform.node()]
    with suppress(OSError):
        facts = [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]


def _read_start_time(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot (0 if not on Linux); None if dead."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except PermissionError:  # another user's process
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
    """Return ``worldsize`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worldsize"


def keep_compiled_code() -> None:
    """Let torch.compile cache its code in :func:`cache_folder`, instead of in ``/tmp``.

    Raises:
        ConfigError: the folder belongs to another user, or others can write to it; torch would run their code.
    """
    if _COMPILED in os.environ:
        return
    folder = cache_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ConfigError(
            f"the compile cache {folder} belongs to another user or is writable by others. Remove it, or "
            f"set {_COMPILED} to a different folder."
        )
    os.environ[_COMPILED] = str(folder)
