"""A run whose folder is deleted or rejects writes ends at once and reports the cause in one sentence."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_disk import mounted
from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.save import Saver
from worldsize.core import Outcome, World
from worldsize.errors import CheckpointError, RunFolderError
from worldsize.launch.interruption import FolderWatch
from worldsize.record import run_record
from worldsize.record.manifest import read_manifest, write_manifest
from worldsize.record.run_directory import RunDirectory, wrap_write_errors
from worldsize.record.run_record import open_record, refresh_run

REPOSITORY = Path(__file__).parents[2]
OPTIONS = ("recipe=digits", "recipe.width=4", "cluster.threads=1", "cluster.processes=2", "logger=none", "log_every=1")

# a strategy that fills the run's disk, in the launching process or in a worker
FILLING = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from dataclasses import dataclass
from pathlib import Path
from tests.support.small_disk import fill
from worldsize.strategies.ddp import DDP

@dataclass(frozen=True)
class Filling(DDP):
    where: str = "launch"
    def prepare(self, folder):
        if self.where == "launch":
            fill(Path("runs"))
    def replica(self, recipe, context):
        if self.where == "worker" and context.world.rank == 0:
            fill(Path("runs"))
        return super().replica(recipe, context)
"""


def deleted(folder: Path) -> None:
    """Delete a folder while others may create files in it."""
    deadline = time.monotonic() + 120
    while folder.exists():
        assert time.monotonic() < deadline, "somebody creates it again and again"
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_whose_folder_is_deleted_ends_and_does_not_create_it_again(
    tmp_path: Path, environment_without_wandb: dict[str, str], begun: Any, warm_python: Path
) -> None:
    slow = "faults=[{action: sleep, seconds: 0.2, attempt: null}]"
    process = subprocess.Popen(
        [warm_python, str(REPOSITORY / "train.py"), *OPTIONS, "steps=1000", "checkpoint.every=1", slow],
        cwd=tmp_path,
        env=environment_without_wandb,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = begun(tmp_path)
    deleted(folder)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert said == f"the run folder {folder} was deleted during training, so nothing more can be saved.\n"
    assert list(folder.parent.iterdir()) == []


def test_a_checkpoint_is_not_saved_into_a_folder_without_a_manifest(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.manifest.touch()
    saver = Saver(run.checkpoints, World.create_single(torch.device("cpu")), None, keep=Retention(), owner=run.manifest)
    saver.save({"x": torch.ones(2)}, step=1, facts={})
    saver.finish()
    run.manifest.unlink()
    saver.save({"x": torch.ones(2)}, step=2, facts={})
    with pytest.raises(CheckpointError, match="the run folder .* was deleted"):
        saver.finish()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_0000001"]
    shutil.rmtree(run.path)
    saver.save({"x": torch.ones(2)}, step=3, facts={})
    with pytest.raises(CheckpointError, match="the run folder .* was deleted"):
        saver.finish()
    saver.close()
    assert not run.path.exists()


def test_a_manifest_counts_as_deleted_when_it_is_missing_twice_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderWatch, "interval", 0.0)
    manifest = tmp_path / "run" / "manifest"
    never_there = FolderWatch(manifest)
    manifest.parent.mkdir()
    manifest.touch()
    watch = FolderWatch(manifest)
    for is_there, is_deleted in ((False, False), (True, False), (False, False), (False, True), (True, True)):
        manifest.unlink(missing_ok=True)
        if is_there:
            manifest.touch()
        assert watch.is_folder_deleted() == is_deleted
        assert not never_there.is_folder_deleted()


def test_the_folder_is_looked_at_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    monkeypatch.setattr("worldsize.launch.interruption.is_missing", looks.append)
    (tmp_path / "manifest").touch()
    watch = FolderWatch(tmp_path / "manifest")
    begun, elapsed = time.monotonic(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: begun + sum(elapsed))
    for _ in range(350):
        elapsed.append(0.01)
        watch.is_folder_deleted()
    assert len(looks) == 3


# ---------------------------------------------------------------- full disks


@pytest.mark.parametrize("where", ["launch", "worker"])
def test_a_disk_that_fills_after_the_record_ends_the_run_as_failed_with_a_sentence(
    train: Any, command: Any, environment_without_wandb: dict[str, str], tmp_path: Path, where: str
) -> None:
    folder = tmp_path / "plugins" / "filling"
    (folder / "conf" / "strategy").mkdir(parents=True)
    (folder / "strategy.py").write_text(FILLING)
    yaml = (REPOSITORY / "conf" / "strategy" / "ddp.yaml").read_text()
    yaml = yaml.replace("worldsize.strategies.ddp.DDP", "plugins.filling.strategy.Filling") + f"where: {where}\n"
    (folder / "conf" / "strategy" / "filling.yaml").write_text(yaml)
    with mounted(tmp_path / "runs", "1m"):
        run = train(*OPTIONS, "steps=3", "strategy=filling")
        assert run.code == 1, run.error
        assert "Traceback" not in run.error
        shown = "the disk with .* is full" if where == "worker" else "failed to write to the run folder .*: "
        assert re.search(shown, run.error)
        assert len(run.error.splitlines()) == (3 if where == "worker" else 1), run.error
        status = command("status", cwd=tmp_path, environment=environment_without_wandb)
        assert "failed" in status.stdout
        manifest = run.json("run_manifest.json")
        assert [attempt["exit_reason"] for attempt in manifest["attempts"]] == ["failed"]
        (tmp_path / "runs" / "ballast").unlink()
        words = ("resume", str(run.folder), "strategy.where=nowhere", "--ignore", "strategy")
        done = command(*words, cwd=tmp_path, environment=environment_without_wandb)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run_record.create_record(run, {}, config="", overrides="")
    return run


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_how_an_attempt_ended_is_noted_in_the_room_that_was_kept_for_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a write needs the reserve, in place of a full disk."""

    def on_full_disk(path: Path, manifest: Any, *, own: bool = True) -> dict[str, Any]:
        if run.reserve.exists():
            full()
        return write_manifest(path, manifest, own=own)

    with open_record(run) as record:
        record.begin_attempt([], world_size=1)
        monkeypatch.setattr(run_record, "write_manifest", on_full_disk)
        record.end_attempt(Outcome("failed", 1))
        assert not run.reserve.exists()
        with pytest.raises(OSError, match="No space"):
            record.begin_attempt([], world_size=1)
        record.give_up("no room")
    assert [attempt["exit_reason"] for attempt in refresh_run(run).attempts] == ["failed", "failed"]
    assert [attempt["number"] for attempt in refresh_run(run).attempts] == [1, 2]


def test_an_attempt_that_has_ended_is_not_given_up(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_record(run) as record:
        record.begin_attempt([], world_size=1)
        monkeypatch.setattr(run_record, "write_result", full)
        with pytest.raises(OSError, match="No space"):
            record.end_attempt(Outcome("interrupted", 130))
        record.give_up("no room")
    assert [attempt["exit_reason"] for attempt in refresh_run(run).attempts] == ["interrupted"]


def test_a_record_that_can_no_longer_be_written_at_all_is_given_up_in_silence(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_record(run) as record:
        record.begin_attempt([], world_size=1)
        monkeypatch.setattr(run_record, "write_manifest", full)
        record.give_up("no room")
        shutil.rmtree(run.path)
        record.give_up("no room")
    assert not run.path.exists()


def test_a_run_is_not_resumed_on_a_full_disk(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_record(run) as record:
        record.begin_attempt([], world_size=1)
    monkeypatch.setattr(run_record, "write_manifest", full)
    with pytest.raises(RunFolderError, match="No space left on device"), open_record(run):
        pass


def test_an_error_that_is_not_the_folders_keeps_its_type(run: RunDirectory) -> None:
    for error in (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), FileNotFoundError(errno.ENOENT, "", "sbatch")):
        with pytest.raises(type(error)), wrap_write_errors(run):
            raise error
    with (
        pytest.raises(RunFolderError, match=r"failed to write to the run folder .*: Permission denied"),
        wrap_write_errors(run),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(run.metrics))
    with (
        pytest.raises(RunFolderError, match=r"^failed to write to /elsewhere/x: No space left on device"),
        wrap_write_errors(run),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/elsewhere/x")


def test_a_manifest_without_room_for_the_reserve_is_not_begun(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_record(run) as record:
        run.reserve.unlink()
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            record.begin_attempt([], world_size=1)
        record.give_up("no room")
    assert json.loads(run.manifest.read_text()) == read_manifest(run.manifest)
    assert [attempt["exit_reason"] for attempt in refresh_run(run).attempts] == ["failed"]
