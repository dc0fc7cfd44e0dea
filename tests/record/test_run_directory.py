"""The folders of a run's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worldsize.errors import WorldsizeError
from worldsize.record.run_directory import RunDirectory, check_entries, create_parent_folders


@pytest.mark.parametrize("rank", [0, 999, 1000, 4095])
def test_the_folder_of_a_rank_is_made_but_not_that_of_a_run_which_was_deleted(tmp_path: Path, rank: int) -> None:
    run = RunDirectory(tmp_path / "run")
    for file in (
        run.get_log_file("worker", rank),
        run.get_timing_file(rank),
        run.get_profile_file(rank),
        run.nccl_logs("host") / "log",
    ):
        with pytest.raises(FileNotFoundError):
            create_parent_folders(file, run)
    assert not run.path.exists()
    run.path.mkdir()
    for file in (
        run.get_log_file("worker", rank),
        run.get_timing_file(rank),
        run.get_profile_file(rank),
        run.nccl_logs("host") / "log",
    ):
        create_parent_folders(file, run)
        file.touch()


def test_only_within_the_folder_of_wandb_may_links_leave_a_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    (run.path / "wandb").mkdir(parents=True)
    (run.path / "wandb" / "debug.log").symlink_to(tmp_path)
    check_entries(run)
    (run.path / "wandb").rename(tmp_path / "wandb")
    (run.path / "wandb").symlink_to(tmp_path / "wandb")
    with pytest.raises(WorldsizeError, match="wandb is a symbolic link to outside of the run folder"):
        check_entries(run)


def test_an_entry_that_is_removed_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "walk", lambda path: iter([(path, ["gone"], [".draft_0"])]))
    check_entries(RunDirectory(tmp_path))
