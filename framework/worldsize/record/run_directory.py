"""Names, exclusive creation, checks and lock of a run's folder.

A launching process holds the lock while it lives; this process's locks are in a module variable.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, ClassVar, final

from worldsize.errors import ConfigError, RunFolderError, WorldsizeError
from worldsize.files import RECORD, is_file, is_folder, open_regular
from worldsize.world.scratch import full_folder

LATEST = 253_402_300_799.0  # Unix time of the last second of the year 9999
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE)
_logger = logging.getLogger(__name__)

_RANKS = 1000  # whose files lie in one folder: file systems of clusters are slow with more


@final
class RunDirectory:
    """Paths of everything that belongs to one run. It touches no file."""

    MANIFEST: ClassVar[str] = RECORD

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.manifest = path / self.MANIFEST
        self.config = path / "config.yaml"
        self.overrides = path / "overrides.yaml"
        self.result = path / "result.json"
        self.environment = path / "environment"
        self.patch = path / "code.patch"
        self.plugins = path / "plugins"  # a root of plugins: copies of those that other hosts could not find elsewhere
        self.project = (
            path / "project"
        )  # of a run that was another user's: copies of what its project is recorded to have
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.excluded = path / "excluded"  # hosts that were too slow, a line each: the run goes on without them
        self.transport = path / "transport.json"  # which way the bytes of an attempt went, until the manifest has it
        self.findings = path / "findings"  # of an examination of the cluster: a file a host, a process, and the first
        self.reserve = path / ".reserve"  # room on the disk for saying how a run ended that has filled it
        self.control = path / "control"  # names the socket at which the launching process takes requests

    def servers(self, attempt: int) -> Path:
        """The folder in which servers and their clients find each other; only the run's user may read it."""
        return self.path / "servers" / f"attempt_{attempt}"

    def log(self, role: str, rank: int) -> Path:
        """The file with the output of one process, ``rank`` within its role."""
        return _of_rank(self.path / "logs", rank) / f"{role}_{rank:05d}.log"

    def error(self, role: str, rank: int) -> Path:
        """The file to which a failing process writes its error."""
        return _of_rank(self.path / "logs", rank) / f"{role}_{rank:05d}.error.json"

    def hang(self, attempt: int) -> Path:
        """The file by which a process that waits for others asks all to write what they do."""
        return self.path / "logs" / f"hang_{attempt}"

    def lost_link(self, connection: str) -> Path:
        """The file that belongs to one of the two hosts which have lost this connection: the one that creates it."""
        return self.path / "logs" / f"lost_{connection}"

    def listener_lock(self, name: str) -> Path:
        """The lock file of the listeners of that name, one per attempt."""
        return self.path / "logs" / f"{name}.lock"

    def nccl_logs(self, host: str) -> Path:
        """The folder in which NCCL writes a file for each process on one host."""
        return self.path / "logs" / "nccl" / host

    def profile(self, rank: int) -> Path:
        """The trace of one worker, JSON."""
        return _of_rank(self.path / "profile", rank) / f"worker_{rank:05d}.json"

    def timing(self, rank: int) -> Path:
        """The file with the step breakdown of one worker, a JSON line for each measured step."""
        return _of_rank(self.path / "timing", rank) / f"worker_{rank:05d}.jsonl"

    def health(self, node: int) -> Path:
        """The file with the health of one node, a JSON line for each sample."""
        return _of_rank(self.path / "health", node) / f"node_{node:05d}.jsonl"


def _of_rank(folder: Path, rank: int) -> Path:
    """Return the folder below ``folder`` for the files of a rank or node: each thousand after the first has its own."""
    return folder / f"{rank // _RANKS * _RANKS:05d}" if rank >= _RANKS else folder


def make_folder_of(file: Path, run: RunDirectory) -> None:
    """Create the folder of one of the run's files, and those between it and the run's own folder.

    Raises:
        FileNotFoundError: the run's own folder was deleted. It is never created again.
    """
    for folder in reversed(file.parents):
        if run.path in folder.parents:
            folder.mkdir(exist_ok=True)


def last_written(directory: RunDirectory) -> float:
    """Return the Unix time in seconds of the run's last write, limited to the year 9999."""
    last = max(file.stat().st_mtime for file in directory.path.rglob("*") if is_file(file))
    return min(max(last, 0.0), LATEST)


def is_missing(path: Path) -> bool:
    """Return whether the file certainly does not exist; False if the file server does not answer."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


@contextmanager
def writing(directory: RunDirectory) -> Iterator[None]:
    """Convert errors inside the context that the run's folder is gone or cannot be written to RunFolderError."""
    try:
        yield
    except OSError as error:
        if is_missing(directory.manifest):
            text = f"the run folder {directory.path} was deleted while the run trained, so nothing more can be saved."
            raise RunFolderError(text) from error
        file = error.filename if isinstance(error.filename, str) else None  # unknown when a write fails
        is_inside = file is not None and Path(file).is_relative_to(directory.path)
        if error.errno not in _STORAGE_ERRORS and not is_inside:
            raise
        place = f"the run folder {directory.path}" if is_inside or file is None else file
        place = place if file is not None else full_folder(directory.path) or place
        text = f"{place} cannot be written any more ({error.strerror or error}); resume the run once that is repaired."
        raise RunFolderError(text) from error


def private(folder: Path) -> Path:
    """Make ``folder``, readable only by this user, and its parent if it is missing; return it."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


def planned(root: Path, recipe: str, name: str | None) -> RunDirectory:
    """Return a run folder with a unique name, unless ``name`` is given; nothing is created."""
    unique = f"{datetime.now():%Y-%m-%d_%H%M%S}_{secrets.token_hex(3)}"
    return RunDirectory(root.resolve() / recipe / (name or unique))


def runs_below(root: Path) -> list[RunDirectory]:
    """List the runs in a folder, at any depth, by name; folders inside a run are not searched.

    Folders that this user may not read are left out with a warning.

    Raises:
        WorldsizeError: this user may not read ``root``.
    """

    def leave_out(error: OSError) -> None:
        if Path(error.filename) != root:
            _logger.warning("%s cannot be read (%s); runs in it are left out.", error.filename, error.strerror)
        elif not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise WorldsizeError(f"{root} cannot be read: {error.strerror}.")

    runs = []
    for folder, inside, files in os.walk(root, onerror=leave_out):
        if RunDirectory.MANIFEST in files:
            runs.append(RunDirectory(Path(folder)))
            inside.clear()
    return sorted(runs, key=lambda run: run.path)


def check_entries(directory: RunDirectory) -> None:
    """Raise WorldsizeError if the folder has an entry through which a run would write elsewhere, or block.

    Entries in ``wandb`` are not examined, since wandb links its log there: only wandb writes through them. The
    folders of other loggers are examined like all others. Another process may remove entries meanwhile.
    """
    for folder, folders, files in os.walk(directory.path):
        for path in (Path(folder, name) for name in (*folders, *files)):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue
            is_inside = stat.S_ISLNK(mode) and path.resolve().is_relative_to(directory.path.resolve())
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_inside):
                kind = "a link out of the run folder" if stat.S_ISLNK(mode) else "no regular file"
                raise WorldsizeError(f"{path} is {kind}. Remove it, or put a copy in its place; nothing was started.")
        if Path(folder) == directory.path and "wandb" in folders:
            folders.remove("wandb")


@contextmanager
def created(run: RunDirectory, *, is_private: bool) -> Iterator[RunDirectory]:
    """Create the folder exclusively, and remove it if the block fails.

    Only this user may read a private folder.

    Raises:
        ConfigError: the folder exists, or cannot be written.
    """
    before = _existing_parent(run.path)
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir(mode=0o700 if is_private else 0o777)
        yield run
    except FileExistsError:
        raise ConfigError(f"the run folder {run.path} exists. Choose another run.name, or leave it out.") from None
    except OSError as error:
        _remove(run.path, before)
        raise ConfigError(
            f"the run folder {run.path} cannot be written: {error.strerror}. "
            "Set run.root to a folder with room that you may write."
        ) from error
    except BaseException:
        _remove(run.path, before)
        raise


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.parents if is_folder(parent))


def _remove(path: Path, before: Path) -> None:
    """Remove the run's folder, and the parents that its creation made, if they are empty."""
    shutil.rmtree(path, ignore_errors=True)
    for parent in path.parents:
        if parent == before:
            return
        try:
            parent.rmdir()
        except OSError:
            return


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
