"""Every command that takes a run reports unreadable files in one sentence."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from tests.observe.run_folders import write_run
from worldsize.cli import _run_command
from worldsize.errors import WorldsizeError
from worldsize.observe.report.page import render_page
from worldsize.record.code import check_out_code, read_patch
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import open_record, read_run

LONG = Path("/tmp") / ("x" * 300)  # raises OSError when it is inspected, like a folder without permission to enter


@pytest.mark.parametrize("command", ["status", "logs", "compare", "report", "watch", "cancel"])
def test_a_run_that_cannot_be_looked_at_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(LONG)] * (2 if command == "compare" else 1)
    monkeypatch.setattr(sys, "argv", ["worldsize", command, *runs])
    with pytest.raises(SystemExit) as ended:
        _run_command()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(LONG) in error


def test_a_folder_that_one_may_not_read_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "seen" / "a", steps=1)
    (tmp_path / "unseen").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "unseen":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert [run.path.name for run in runs_below(tmp_path)] == ["a"]
    assert caplog.messages == [f"{tmp_path / 'unseen'} cannot be read (Permission denied); skipping the runs inside."]
    for refused in (lambda: runs_below(tmp_path / "unseen"), lambda: render_page([tmp_path / "unseen"])):
        with pytest.raises(WorldsizeError, match="unseen cannot be read: Permission denied"):
            refused()
    assert runs_below(tmp_path / "absent") == []


def test_an_error_about_a_file_is_a_sentence_and_any_other_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [OSError(errno.EACCES, "Permission denied", "/a/run"), BrokenPipeError(errno.EPIPE, "Broken pipe")]

    def fail() -> None:
        raise errors.pop(0)

    monkeypatch.setattr("worldsize.cli.status.main", fail)
    monkeypatch.setattr(sys, "argv", ["worldsize", "status"])
    with pytest.raises(SystemExit):
        _run_command()
    assert capsys.readouterr().err == "failed to read or write /a/run: Permission denied.\n"
    monkeypatch.setattr(sys, "argv", ["worldsize", "status"])
    with pytest.raises(BrokenPipeError):
        _run_command()


def test_what_one_may_not_enter_is_no_run_and_no_candidate(tmp_path: Path) -> None:
    with pytest.raises(WorldsizeError, match="cannot be read: File name too long"):
        read_run(LONG)
    with pytest.raises(WorldsizeError, match="cannot be read: File name too long"), open_record(RunDirectory(LONG)):
        pass
    code = {"commit": "c0" * 20, "folder": ".", "remote": None}
    with (
        pytest.raises(WorldsizeError, match="not found in"),
        check_out_code(code, b"", tmp_path / "code", [LONG]),
    ):
        pass


def test_a_patch_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(WorldsizeError, match="is unreadable"):
        read_patch(tmp_path, "ab", approximate=False)
    assert read_patch(tmp_path, "ab", approximate=True) == b""
    with pytest.raises(WorldsizeError, match="is missing"):
        read_patch(tmp_path / "absent", "ab", approximate=False)
