"""Data that never arrive end a run with their location, and a signal saves the steps completed by all ranks."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.support.own_recipe import write_recipe
from tests.support.runs import REPOSITORY

_CODE = """
import threading
from torch.utils.data import Dataset
from worldsize.testing.recipes import Chain

class Hanging(Dataset):
    def __init__(self, rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, index):
        if index >= 8:
            lock = threading.Lock()
            lock.acquire(), lock.acquire()
        return self.rows[index]

class Own(Chain):
    def data(self, split):
        return Hanging(super().data(split)) if split == "train" else super().data(split)
"""
_TEXT = """# @package _global_
# own
steps: 20
batch_size: 4
log_every: 1
data_workers: 1
shuffle: {enabled: false}
recipe: {_target_: recipes.own.recipe.Own}
"""
_WORDS = ("recipe=own", "cluster.processes=2", "cluster.threads=1", "logger=none")


def test_the_sample_and_the_line_are_named_where_all_ranks_wait(train: Any, tmp_path: Path) -> None:
    write_recipe(tmp_path, "own", _CODE, own=_TEXT)
    run = train(*_WORDS, "cluster.timeout=8")
    assert run.code == 1
    first, cause = run.error.split("\n", 1)
    assert " failed at step " in first
    assert cause.startswith("step 3 has been waiting for data for ")
    assert "It is loading sample " in cause
    assert "recipes/own/recipe.py" in cause
    assert "did not respond" not in run.error


def test_a_signal_while_all_ranks_wait_for_data_saves_the_last_step(
    tmp_path: Path, environment_without_wandb: dict[str, str], begun: Any, warm_python: Path
) -> None:
    write_recipe(tmp_path, "own", _CODE, own=_TEXT)
    process = subprocess.Popen(
        [warm_python, str(REPOSITORY / "train.py"), *_WORDS, "launcher.save_grace=120"],
        cwd=tmp_path,
        env=environment_without_wandb,
    )
    folder = begun(tmp_path, after=0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(110) == 75
    assert [each.name for each in (folder / "checkpoints").glob("step_*")] == ["step_0000002"]
