"""Files that other users have replaced by pipes or links do not block a reader."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from worldsize.files import is_file, is_folder, open_regular, read_regular, replace_file

FRAMEWORK = Path(__file__).parents[1] / "framework" / "worldsize"
OTHERS = {  # these read files themselves; none of the files is in a run folder that others may have written
    "api/class_recipe.py": "no file, for standard input",
    "cli/init.py": "the metadata of a package",
    "cli/templates/": "templates of worldsize",
    "config/": "sources and configurations of plugins, and composed configurations",
    "checkpoint/format.py": "the folder, to sync it",
    "core/cluster.py": "images",
    "data/": "data",
    "launch/examine.py": "the test of whether data can be opened",
    "launch/sweep.py": "a private folder of a sweep",
    "launch/host_check.py": "the lock and the sources of this installation",
    "files.py": "the function that opens the files of a run",
    "observe/health/": "what the kernel says",
    "observe/subprocess_listeners.py": "a pipe to a process of its own",
    "plan/": "what the kernel says, and measured links",
    "record/": "the project, the environment, data and images",
    "testing/": "tests",
    "net/signing.py": "keys of a run in progress",
    "healing/groups.py": "the kernel, and files of a run in progress",
    "world/": "the kernel, and files of a run in progress",
}

NO_FILES = ("_view.open", "webbrowser.open", "PEER_WAIT.open", "seal.open")
WRITES = re.compile(r"'[wax]\+?b?'|O_WRONLY|open\([12],")


def reads(source: str) -> Iterator[int]:
    """Yield the lines that open a file for reading without worldsize.files."""
    for node in ast.walk(ast.parse(source)):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        is_open = name == "open" or (name.endswith(".open") and not name.endswith(NO_FILES))
        if name.endswith((".read_text", ".read_bytes")) or (is_open and not WRITES.search(ast.unparse(node))):
            yield getattr(node, "lineno", 0)


def test_files_of_a_run_are_opened_by_one_function() -> None:
    places = {path.relative_to(FRAMEWORK).as_posix(): [*reads(path.read_text())] for path in FRAMEWORK.rglob("*.py")}
    places = {path: lines for path, lines in places.items() if lines and not path.startswith("strategies/")}
    assert {path: lines for path, lines in places.items() if not path.startswith(tuple(OTHERS))} == {}
    assert [each for each in OTHERS if not any(path.startswith(each) for path in places)] == []


def test_a_link_out_of_a_run_folder_is_refused_and_not_written_through(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "logs").mkdir(parents=True)
    outside.mkdir()
    for folder in (run, outside):
        (folder / "text").write_text(folder.name)
    links = {"file": outside / "text", "folder": outside, "nothing": outside / "new", "logs/own": run / "text"}
    for name, target in links.items():
        (run / name).symlink_to(target)
    assert read_regular(run / "folder" / "text", at_most=10) == b"outside"  # no run yet
    (run / "run_manifest.json").touch()
    for name in ("file", "folder/text"):
        with pytest.raises(OSError, match="a link points outside of the run folder"):
            read_regular(run / name, at_most=10)
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(run / "nothing", append=True)
    replace_file(run / "file", b"new")
    assert read_regular(run / "logs" / "own", at_most=10) == b"run"
    assert (run / "file").read_text() == "new"
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"text": "outside"}


def test_a_pipe_a_folder_and_a_file_that_is_too_large_are_errors_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(200 << 30)
    for name, why in (("pipe", "not a regular file"), (".", "not a regular file"), ("sparse", "larger than 10 bytes")):
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
