"""Files that others have replaced by something else keep nobody waiting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worldsize.files import is_file, is_folder, open_regular, read_regular


def test_a_pipe_a_folder_and_a_file_that_is_too_large_are_errors_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(200 << 30)
    for name, why in (("pipe", "no regular file"), (".", "no regular file"), ("sparse", "more than 10 bytes")):
        with pytest.raises(OSError, match=why):
            read_regular(tmp_path / name, at_most=10)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")


def test_what_one_may_not_look_at_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    assert is_file(tmp_path / "file")
    assert is_folder(tmp_path)
    assert not is_file(tmp_path / ("x" * 300))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    assert not is_file(tmp_path / "file")
    assert not is_folder(tmp_path)
