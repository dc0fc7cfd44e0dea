"""Paths in a run's folder, and its exclusive creation, checks and lock.

The launching process holds the lock for its lifetime. A module variable stores this process's locks.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, ClassVar, final

from worldsize.errors import ConfigError, RunFolderError, WorldsizeError
from worldsize.files import ATTESTATION, RECORD, is_file, is_folder, open_regular
from worldsize.world.scratch import full_folder

LATEST = 253_402_300_799.0  # Unix time of the last second of the year 9999
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE)
_logger = logging.getLogger(__name__)

_RANKS = 1000  # maximum ranks per folder, since cluster file systems are slow for large folders


@final
class RunDirectory:
    """Paths of all files of a run; does not access any file."""

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
        self.plugins = path / "plugins"  # plugin root with copies of plugins that other hosts may lack
        self.project = path / "project"  # copy of the recorded project, for another user's run
        self.attestation = path / ATTESTATION  # signed statement about the run, for other users and tools
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.chain = path / "chain.jsonl"  # hash chain of what the run computed, for `worldsize audit`
        self.checkpoints = path / "checkpoints"
        self.operations = path / "operations"  # operations of a step, for `worldsize compare --operations`
        self.excluded = path / "excluded"  # hosts excluded as too slow, one per line
        self.transport = path / "transport.json"  # transports of an attempt, until they are in the manifest
        self.findings = path / "findings"  # files of a cluster check: one per host and process, and the first host's
        self.reserve = path / ".reserve"  # reserved disk space, to record the end of a run that filled the disk
        self.rewind = path / "rewind.json"  # request to go back before a spike, until it is in the manifest
        self.rewound = path / "rewound"  # checkpoints and metrics that a rewind has put aside
        self.control = path / "control"  # address of the launching process's socket for requests

    def get_servers_folder(self, attempt: int) -> Path:
        """Return the private folder for the registry and the keys of the attempt's servers."""
        return self.path / "servers" / f"attempt_{attempt}"

    def get_log_file(self, role: str, rank: int) -> Path:
        """Return the log file of the process ``rank`` within its role."""
        return _get_rank_folder(self.path / "logs", rank) / f"{role}_{rank:05d}.log"

    def get_error_file(self, role: str, rank: int) -> Path:
        """Return the file in which a process writes its error before it exits."""
        return _get_rank_folder(self.path / "logs", rank) / f"{role}_{rank:05d}.error.json"

    def get_hang_file(self, attempt: int) -> Path:
        """Return the file that requests flight records, created by a waiting process."""
        return self.path / "logs" / f"hang_{attempt}"

    def get_lost_link_file(self, connection: str) -> Path:
        """Return the file that one of two disconnected hosts creates to claim the run."""
        return self.path / "logs" / f"lost_{connection}"

    def listener_lock(self, name: str) -> Path:
        """Return the lock file that an attempt's process of the listener ``name`` holds."""
        return self.path / "logs" / f"{name}.lock"

    def nccl_logs(self, host: str) -> Path:
        """Return the folder for NCCL's logs, with one file per process on ``host``."""
        return self.path / "logs" / "nccl" / host

    def get_profile_file(self, rank: int) -> Path:
        """Return the JSON file with the trace of one worker."""
        return _get_rank_folder(self.path / "profile", rank) / f"worker_{rank:05d}.json"

    def get_timing_file(self, rank: int) -> Path:
        """Return the JSON-lines file of one worker's step breakdown, one line per measured step."""
        return _get_rank_folder(self.path / "timing", rank) / f"worker_{rank:05d}.jsonl"

    def get_health_file(self, node: int) -> Path:
        """Return the JSON-lines file with the health of one node, one line per sample."""
        return _get_rank_folder(self.path / "health", node) / f"node_{node:05d}.jsonl"


def _get_rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder for files of a rank or node; above 1,000 ranks, one per thousand."""
    return folder / f"{rank // _RANKS * _RANKS:05d}" if rank >= _RANKS else folder


def create_parent_folders(file: Path, run: RunDirectory) -> None:
    """Create the parent folders of one of the run's files, up to but excluding the run folder.

    Raises:
        FileNotFoundError: the run folder was deleted; it is never recreated.
    """
    for folder in reversed(file.parents):
        if run.path in folder.parents:
            folder.mkdir(exist_ok=True)


def last_written(directory: RunDirectory) -> float:
    """Return the latest modification time of the run's files, at most :data:`LATEST`."""
    last = max(file.stat().st_mtime for file in directory.path.rglob("*") if is_file(file))
    return min(max(last, 0.0), LATEST)


def is_missing(path: Path) -> bool:
    """Return whether a file definitely does not exist; False for other errors."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


@contextmanager
def wrap_write_errors(directory: RunDirectory) -> Iterator[None]:
    """Convert errors in the block to RunFolderError if the run folder is gone or unwritable."""
    try:
        yield
    except OSError as error:
        if is_missing(directory.manifest):
            text = f"the run folder {directory.path} was deleted during training, so nothing more can be saved."
            raise RunFolderError(text) from error
        file = error.filename if isinstance(error.filename, str) else None  # None for an error in write()
        is_inside = file is not None and Path(file).is_relative_to(directory.path)
        if error.errno not in _STORAGE_ERRORS and not is_inside:
            raise
        place = f"the run folder {directory.path}" if is_inside or file is None else file
        place = place if file is not None else full_folder(directory.path) or place
        text = f"failed to write to {place}: {error.strerror or error}. Fix the problem, then resume the run."
        raise RunFolderError(text) from error


def create_private_folder(folder: Path) -> Path:
    """Create ``folder``, and its parent if missing, accessible only by this user; return it."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


def plan_run_directory(root: Path, recipe: str, name: str | None) -> RunDirectory:
    """Return the path of a new run, by default with a unique name, without creating it."""
    unique = f"{datetime.now():%Y-%m-%d_%H%M%S}_{secrets.token_hex(3)}"
    return RunDirectory(root.resolve() / recipe / (name or unique))


def runs_below(root: Path) -> list[RunDirectory]:
    """List the runs in a folder at any depth, sorted by path, without runs inside of runs.

    Unreadable folders are skipped with a warning.

    Raises:
        WorldsizeError: ``root`` cannot be read.
    """

    def leave_out(error: OSError) -> None:
        if Path(error.filename) != root:
            _logger.warning("%s cannot be read (%s); skipping the runs inside.", error.filename, error.strerror)
        elif not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise WorldsizeError(f"{root} cannot be read: {error.strerror}.")

    runs = []
    for folder, inside, files in os.walk(root, onerror=leave_out):
        if RunDirectory.MANIFEST in files:
            runs.append(RunDirectory(Path(folder)))
            inside.clear()
    return sorted(runs, key=lambda run: run.path)


def find_run(run: str | Path, root: Path = Path("runs")) -> RunDirectory:
    """Return the run with this folder or manifest; "last": the most recent one in ``root``.

    Raises:
        WorldsizeError: ``run`` is "last", and there are no runs in ``root``.
    """
    if str(run) != "last":
        path = Path(run)
        is_manifest = path.name == RunDirectory.MANIFEST or is_file(path)
        return RunDirectory((path.parent if is_manifest else path).resolve())
    runs = runs_below(root)
    if not runs:
        raise WorldsizeError(
            f"no runs found in {root.resolve()}. Pass a run folder, or change to the folder that contains {root}."
        )
    return RunDirectory(max(runs, key=_get_write_time).path.resolve())


def _get_write_time(run: RunDirectory) -> float:
    try:
        return run.manifest.stat().st_mtime
    except OSError:  # deleted in the meantime
        return 0.0


def check_entries(directory: RunDirectory) -> None:
    """Raise WorldsizeError if an entry would block the run, or redirect its writes elsewhere.

    The folder ``wandb`` is not checked, since only wandb writes through its links to logs. Other loggers'
    folders are checked. Entries that vanish during the check are ignored.
    """
    for folder, folders, files in os.walk(directory.path):
        for path in (Path(folder, name) for name in (*folders, *files)):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue
            is_inside = stat.S_ISLNK(mode) and path.resolve().is_relative_to(directory.path.resolve())
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_inside):
                kind = "a symbolic link to outside of the run folder" if stat.S_ISLNK(mode) else "not a regular file"
                raise WorldsizeError(f"{path} is {kind}. Remove it, or replace it with a copy; nothing was started.")
        if Path(folder) == directory.path and "wandb" in folders:
            folders.remove("wandb")


@contextmanager
def create_run_folder(run: RunDirectory, *, is_private: bool) -> Iterator[Callable[[], None]]:
    """Create the run folder exclusively; yield a function that removes it.

    The folder is also removed if the block fails. With ``is_private``, only this user can access the folder.

    Raises:
        ConfigError: the folder exists, or cannot be written.
    """
    remove = partial(_remove_run_folder, run.path, _existing_parent(run.path))
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir(mode=0o700 if is_private else 0o777)
        yield remove
    except FileExistsError:
        raise ConfigError(
            f"the run folder {run.path} already exists. Choose a different run.name, or omit run.name."
        ) from None
    except OSError as error:
        remove()
        raise ConfigError(
            f"failed to write to the run folder {run.path}: {error.strerror}. "
            "Set run.root to a writable folder with free space."
        ) from error
    except BaseException:
        remove()
        raise


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.parents if is_folder(parent))


def _remove_run_folder(path: Path, before: Path) -> None:
    """Remove the run folder, and empty parents below ``before``."""
    shutil.rmtree(path, ignore_errors=True)
    for parent in path.parents:
        if parent == before:
            return
        try:
            parent.rmdir()
        except OSError:
            return


_NAME = ".lock"
_FLOCK = struct.Struct("hhqqixxxx")  # struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid

# A process loses a record lock as soon as it closes any descriptor of the file, so it must not open the lock file
# again while it holds the lock. In a forked child, the stored PID shows that the lock belongs to the parent.
_held: dict[Path, int] = {}


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock within the block; the kernel releases it on any exit of the process.

    This is a POSIX record lock (``lockf``) instead of ``flock``, since forked workers must not inherit it: otherwise, a
    run with a killed launcher would seem alive until its last process exits.

    Raises:
        WorldsizeError: a process already holds the lock, or the file system does not support locks.
    """
    if _is_own(run_dir):
        raise WorldsizeError(f"the run {run_dir} is already being trained by this process. Wait until it has ended.")
    with _open_lock_file(run_dir, append=True) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _create_lock_error(run_dir, error) from None
        _held[run_dir.resolve()] = os.getpid()
        try:
            yield
        finally:
            _held.pop(run_dir.resolve(), None)


def _open_lock_file(run_dir: Path, *, append: bool = False) -> BinaryIO:
    try:
        return open_regular(run_dir / _NAME, append=append)
    except OSError as error:
        raise _create_lock_error(run_dir, error) from None


def _create_lock_error(run_dir: Path, error: OSError) -> WorldsizeError:
    if error.errno in (errno.EACCES, errno.EAGAIN):
        return WorldsizeError(
            f"the run {run_dir} is already being trained by another process. Wait until it has ended, or cancel it."
        )
    if os.path.lexists(lock := run_dir / _NAME) and not stat.S_ISREG(lock.lstat().st_mode):
        return WorldsizeError(f"{lock} is not a regular file created by worldsize. Remove it.")
    return WorldsizeError(
        f"the run {run_dir} cannot be locked: {error.strerror}. Set run.root to a file system that supports locks."
    )


def is_locked(run_dir: Path) -> bool:
    """Return whether a process holds the run's lock; True on file systems without locks."""
    if _is_own(run_dir):
        return True
    if not os.path.lexists(run_dir / _NAME):
        return False
    with _open_lock_file(run_dir) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, since another user's file may be read-only
        except OSError:
            return True
    return False


def find_lock_holder(run_dir: Path) -> int | None:
    """Return the ID of the local process that holds the run's lock, or None if there is none.

    The ID is from the kernel, since other users could forge one in the run folder.
    """
    if _is_own(run_dir):
        return os.getpid()
    if sys.platform != "linux" or not os.path.lexists(run_dir / _NAME):
        return None
    with _open_lock_file(run_dir) as file:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def _is_own(run_dir: Path) -> bool:
    return _held.get(run_dir.resolve()) == os.getpid()
