"""A wait for data is reported, fails with the location of the hang, and ends early if all ranks stop."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from worldsize.data import data_wait
from worldsize.data.data_wait import DataWait, DataWaitError, Patience, StopBetweenSteps, own_place
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.data.permutation import Shuffle
from worldsize.data.worker_process import WorkerStacks

BOUND = 120.0  # seconds
HANGS = multiprocessing.Event()  # set by the hanging process


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_wait, "_LOOK", 0.01)
    monkeypatch.setattr(data_wait, "_WARNED", 0.02)


def _hang() -> None:
    lock = threading.Lock()
    lock.acquire()
    HANGS.set()
    lock.acquire()


class Hanging(Dataset[torch.Tensor]):
    """Sample 5 waits for ever."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            _hang()
        return torch.tensor([float(index)])


def _steps(workers: int) -> Iterator[object]:
    order = Order(0, 2, 1, (0,), False, Shuffle(enabled=False))
    patience = Patience(BOUND, speaks=True)
    return micro_batches(Hanging(), order, torch.device("cpu"), workers=workers, patience=patience)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_hangs_is_an_error_with_its_place(
    workers: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    HANGS.clear()
    now = [0.0]

    def monotonic() -> float:
        now[0] += HANGS.is_set()  # time stands still before
        return now[0]

    monkeypatch.setattr(data_wait, "time", SimpleNamespace(monotonic=monotonic))
    steps = _steps(workers)
    with caplog.at_level(logging.WARNING, "worldsize"):
        next(steps), next(steps)
        with pytest.raises(DataWaitError) as error:
            next(steps)
    for text in (str(error.value), caplog.records[-1].getMessage()):
        assert text.startswith("step 3 has been waiting for data for ")
        assert "in _hang" in text
    assert [record.getMessage()[:7] for record in caplog.records].count("step 3 ") == 1
    assert "increase cluster.timeout" in str(error.value)
    assert ("It is loading sample 5. Stack" in str(error.value)) == (workers == 1)


def test_stacks_of_workers_leave_no_open_file() -> None:
    stacks = WorkerStacks()
    file = stacks._file
    os.fstat(file)
    del stacks
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_stop_ends_the_wait_before_the_step_and_no_other_wait() -> None:
    wait = DataWait(Patience(60.0, stops=lambda step: step == 2))
    with wait.run_watchdog():
        with wait.monitor_step(1, own_place):
            threading.Event().wait(3 * data_wait._LOOK)
        with pytest.raises(StopBetweenSteps), wait.monitor_step(2, own_place):
            _hang()


def test_data_that_come_during_a_vote_do_not_undo_it() -> None:
    votes, came = threading.Event(), threading.Event()

    def stops(_: int) -> bool:
        votes.set()
        return came.wait(BOUND)

    def receive() -> None:
        assert votes.wait(BOUND)
        came.set()

    wait = DataWait(Patience(60.0, stops=stops))
    with wait.run_watchdog(), pytest.raises(StopBetweenSteps), wait.monitor_step(1, own_place):
        receive()


def test_a_vote_that_fails_ends_the_wait_with_its_error() -> None:
    def stops(_: int) -> bool:
        raise ConnectionError("the store is gone")

    wait = DataWait(Patience(60.0, stops=stops))
    with (
        wait.run_watchdog(),
        pytest.raises(ConnectionError, match="the store is gone"),
        wait.monitor_step(1, own_place),
    ):
        threading.Event().wait(BOUND)


def test_a_place_that_cannot_be_described_does_not_end_the_watch() -> None:
    def describe() -> str:
        raise LookupError("no worker")

    wait = DataWait(Patience(3 * data_wait._LOOK))
    with wait.run_watchdog(), pytest.raises(DataWaitError, match="no worker"), wait.monitor_step(1, describe):
        threading.Event().wait(BOUND)


def test_a_wait_within_its_bound_ends_with_the_data() -> None:
    wait = DataWait(Patience(60.0))
    with wait.run_watchdog(), wait.monitor_step(1, own_place):
        threading.Event().wait(3 * data_wait._LOOK)
