"""Processes that measure at the same time wait for each other."""

from __future__ import annotations

import os
import time
from functools import partial
from itertools import repeat
from pathlib import Path

import pytest
import torch

from worldsize.plan.dry_run import measure_medians, run_concurrently

CPU = torch.device("cpu")


def _one_is_slow(folder: Path) -> list[float]:
    """Sleep only in the first process, and record each process's measurement."""
    try:
        (folder / "slow").mkdir()
        seconds = 0.05
    except FileExistsError:
        seconds = 0.0
    measured = measure_medians(repeat([partial(time.sleep, seconds), lambda: None]), CPU, 0.0)
    (folder / f"{os.getpid()}").write_text(str(measured))
    return measured


def test_each_turn_takes_as_long_as_its_slowest_process_and_all_agree_on_it(tmp_path: Path) -> None:
    slow, idle = run_concurrently(3, 1, _one_is_slow, tmp_path)
    assert slow >= 0.05 > idle
    assert [file.read_text() for file in tmp_path.iterdir() if file.is_file()] == [str([slow, idle])] * 3


def _count(least_seconds: float) -> int:
    turns = 0

    def step() -> None:
        nonlocal turns
        turns += 1
        time.sleep(0.001)

    measure_medians(repeat([step]), CPU, least_seconds)
    return turns


def test_measuring_goes_on_until_it_has_taken_long_enough() -> None:
    assert run_concurrently(1, 1, _count, 0.0) == 2 + 11
    assert 2 + 11 < run_concurrently(1, 1, _count, 0.3) <= 2 + 300


def _fails_once(folder: Path) -> None:
    (folder / "failed").mkdir()  # succeeds only in the first process
    measure_medians(repeat([lambda: None]), CPU, 0.0)


def test_the_others_do_not_wait_for_one_that_fails(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        run_concurrently(2, 1, _fails_once, tmp_path)
