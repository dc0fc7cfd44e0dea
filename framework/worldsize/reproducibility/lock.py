"""The lock that a launching process holds on its run folder for as long as it lives."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import final

from worldsize.errors import WorldsizeError

_NAME = ".lock"


@final
class RunLock:
    """A context. The kernel releases the lock when the process ends, however it ends.

    A POSIX record lock (``lockf``), not ``flock``: forked workers must not inherit it, or a run whose
    launcher was killed would look alive until its last process has ended.

    Raises:
        WorldsizeError: another process holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def __enter__(self) -> RunLock:
        self._file = (self._run_dir / _NAME).open("w")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise WorldsizeError(
                f"the run {self._run_dir} is being trained by another process. Wait for its end, or cancel it."
            ) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def is_locked(run_dir: Path) -> bool:
    """Whether another process holds the run's lock."""
    if not (run_dir / _NAME).exists():
        return False
    with (run_dir / _NAME).open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
