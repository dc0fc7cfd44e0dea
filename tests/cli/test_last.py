"""Commands accept "last", and default to the newest run below ``runs``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.observe.run_folders import write_run
from worldsize.cli import run_and_overrides, run_folder
from worldsize.errors import WorldsizeError
from worldsize.record.run_directory import find_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two runs below ``runs``: the second comes first by name, but was written later."""
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / "runs" / "digits" / name for name in ("b", "a")]
    for age, folder in zip((20, 10), folders, strict=True):
        write_run(folder)
        written = (folder / "run_manifest.json").stat().st_mtime - age
        os.utime(folder / "run_manifest.json", (written, written))
    return folders


def test_the_newest_run_is_the_last_and_what_is_meant_without_a_name(runs: list[Path]) -> None:
    earlier, newest = runs
    assert find_run("last").path == run_folder("last") == newest
    assert find_run(earlier / "run_manifest.json").path == run_folder(str(earlier)) == earlier
    assert run_and_overrides([]) == (newest, [])
    assert run_and_overrides(["steps=3"]) == (newest, ["steps=3"])
    assert run_and_overrides([str(earlier), "steps=3"]) == (earlier, ["steps=3"])


def test_without_any_run_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorldsizeError, match=f"no runs found in {tmp_path}/runs"):
        run_and_overrides(["steps=3"])
