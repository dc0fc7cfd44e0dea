"""The folders of a run's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from worldsize.records.run_directory import RunDirectory, make_folder_of


@pytest.mark.parametrize("rank", [0, 999, 1000, 4095])
def test_the_folder_of_a_rank_is_made_but_not_that_of_a_run_which_was_deleted(tmp_path: Path, rank: int) -> None:
    run = RunDirectory(tmp_path / "run")
    for file in (run.log("worker", rank), run.timing(rank), run.profile(rank), run.nccl_logs("host") / "log"):
        with pytest.raises(FileNotFoundError):
            make_folder_of(file, run)
    assert not run.path.exists()
    run.path.mkdir()
    for file in (run.log("worker", rank), run.timing(rank), run.profile(rank), run.nccl_logs("host") / "log"):
        make_folder_of(file, run)
        file.touch()
