"""What may not be read is said in a sentence by every command that takes a run."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from worldsize.app import _call
from worldsize.errors import WorldsizeError
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import opened, view
from worldsize.reproducibility.checkout import checked_out, read_patch

LONG = Path("/tmp") / ("x" * 300)  # raises OSError where it is looked at, as a folder does that one may not enter


@pytest.mark.parametrize("command", ["status", "logs", "compare", "report", "watch", "cancel"])
def test_a_run_that_cannot_be_looked_at_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(LONG)] * (2 if command == "compare" else 1)
    monkeypatch.setattr(sys, "argv", ["worldsize", command, *runs])
    with pytest.raises(SystemExit) as ended:
        _call()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(LONG) in error


def test_an_error_about_a_file_is_a_sentence_and_any_other_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [OSError(errno.EACCES, "Permission denied", "/a/run"), BrokenPipeError(errno.EPIPE, "Broken pipe")]

    def fail() -> None:
        raise errors.pop(0)

    monkeypatch.setattr("worldsize.app.status.main", fail)
    monkeypatch.setattr(sys, "argv", ["worldsize", "status"])
    with pytest.raises(SystemExit):
        _call()
    assert capsys.readouterr().err == "/a/run cannot be read or written: Permission denied.\n"
    monkeypatch.setattr(sys, "argv", ["worldsize", "status"])
    with pytest.raises(BrokenPipeError):
        _call()


def test_what_one_may_not_enter_is_no_run_and_no_candidate(tmp_path: Path) -> None:
    with pytest.raises(WorldsizeError, match="cannot be read: File name too long"):
        view(LONG)
    with pytest.raises(WorldsizeError, match="cannot be read: File name too long"), opened(RunDirectory(LONG)):
        pass
    code = {"commit": "c0" * 20, "folder": ".", "remote": None}
    with (
        pytest.raises(WorldsizeError, match="is in no repository here"),
        checked_out(code, b"", tmp_path / "code", [LONG]),
    ):
        pass


def test_a_patch_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(WorldsizeError, match="not to be read"):
        read_patch(tmp_path, "ab", approximate=False)
    assert read_patch(tmp_path, "ab", approximate=True) == b""
    with pytest.raises(WorldsizeError, match="is lost"):
        read_patch(tmp_path / "absent", "ab", approximate=False)
