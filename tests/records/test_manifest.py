"""The manifest on disk stays readable and intact, and ``look`` records only runs that have died."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from worldsize.errors import WorldsizeError
from worldsize.records import manifest as module
from worldsize.records.lock import RunLock, is_locked
from worldsize.records.manifest import begin_attempt, end_attempt, look, read_manifest, write_manifest
from worldsize.reproducibility.data import fingerprint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that says "running" though nothing holds its lock."""
    path = tmp_path / "run_manifest.json"
    write_manifest(path, {"attempts": [], "results": None})
    with RunLock(tmp_path):
        begin_attempt(path, hosts=["h"], world_size=1)
    return tmp_path


def test_a_manifest_is_as_readable_as_the_other_files_of_its_run(run: Path) -> None:
    (run / "other").touch()
    modes = {stat.S_IMODE((run / name).stat().st_mode) for name in ("run_manifest.json", "other")}
    assert len(modes) == 1


def test_the_next_attempt_records_that_the_last_was_killed(run: Path) -> None:
    with RunLock(run):
        assert begin_attempt(run / "run_manifest.json", hosts=["h"], world_size=1) == 2
        killed, running = read_manifest(run / "run_manifest.json")["attempts"]
    assert (killed["exit_reason"], running["exit_reason"]) == ("killed", "running")
    assert killed["start_at"] <= killed["end_at"] <= running["start_at"]


def test_a_manifest_that_cannot_be_written_leaves_the_old_one_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    before = (run / "run_manifest.json").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(run / "run_manifest.json", {"attempts": []})
    assert (run / "run_manifest.json").read_bytes() == before
    assert not list(run.glob(".manifest_*"))


def test_a_killed_run_ended_when_it_last_wrote_and_keeps_its_results(run: Path) -> None:
    (run / "metrics.jsonl").touch()
    for path in run.iterdir():
        os.utime(path, (0, 0))
    os.utime(run / "metrics.jsonl", (86400, 86400))
    manifest = look(run)
    last = manifest["attempts"][-1]
    assert (last["exit_reason"], last["exit_code"], last["end"]) == (
        "killed",
        None,
        "1970-01-02T00:00:00+00:00",
    )
    assert manifest["results"] is None
    assert look(run) == manifest


def test_a_run_that_ends_while_it_is_looked_at_keeps_its_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_meanwhile(run_dir: Path) -> bool:
        end_attempt(run / "run_manifest.json", exit_reason="completed", exit_code=0, results={"loss": 1})
        return is_locked(run_dir)

    monkeypatch.setattr(module, "is_locked", ends_meanwhile)
    assert look(run)["attempts"][-1]["exit_reason"] == "completed"
    assert read_manifest(run / "run_manifest.json")["results"]["loss"] == 1


def test_a_run_whose_lock_is_taken_while_it_is_looked_at_is_left_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_locked", lambda _: False)
    with RunLock(run):
        assert look(run)["attempts"][-1]["exit_reason"] == "running"


def test_a_data_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorldsizeError, match=r"the data file 'train' cannot be read from .*missing: No such file"):
        fingerprint({"train": tmp_path / "missing"})
