"""The run's lock works within this process and between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worldsize.errors import WorldsizeError
from worldsize.record.run_directory import is_locked, run_lock

ASK = (
    "import sys; from pathlib import Path; from worldsize.record.run_directory import is_locked;"
    "print(is_locked(Path(sys.argv[1])))"
)


def locked_for_others(run: Path) -> bool:
    done = subprocess.run([sys.executable, "-c", ASK, run], capture_output=True, text=True, check=True)
    return done.stdout == "True\n"


def test_asking_in_the_holding_process_does_not_release_the_lock(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        assert is_locked(tmp_path)
        assert is_locked(tmp_path / "." / ".." / tmp_path.name)
        assert locked_for_others(tmp_path)
    assert not is_locked(tmp_path)
    assert not locked_for_others(tmp_path)


def test_one_process_cannot_take_a_lock_twice(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        with pytest.raises(WorldsizeError, match="is already being trained by this process"), run_lock(tmp_path):
            pass
        assert locked_for_others(tmp_path)
    with run_lock(tmp_path):
        assert is_locked(tmp_path)


def test_a_forked_child_neither_owns_nor_releases_its_parents_lock(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        child = os.fork()
        if child == 0:
            os._exit(0 if is_locked(tmp_path) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert locked_for_others(tmp_path)


def test_a_folder_that_was_never_locked_is_not_locked(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_gives_another_error_than_a_run_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".lock").touch()
    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(WorldsizeError, match="cannot be locked: No locks available"), run_lock(tmp_path):
        pass
    assert is_locked(tmp_path)


def test_taking_the_lock_again_does_not_change_when_the_run_last_wrote(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        os.utime(tmp_path / ".lock", (0, 0))
    with run_lock(tmp_path):
        assert (tmp_path / ".lock").stat().st_mtime == 0
