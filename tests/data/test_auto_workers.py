"""``data_workers=auto`` adds worker processes while steps become shorter, and draws the same samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import count, groupby, islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from worldsize.core import DataWorkersChanged
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.data.worker_loader import AutoWorkers, load_with_auto_workers, settling_steps

CPU = torch.device("cpu")
Times = Callable[[int], tuple[float, float]]  # seconds of wait and of the rest, by number of workers


def decided(times: Times, *, most: int = 16, steps: int = 400, batches: int = 1) -> list[tuple[int, int]]:
    """Return the changes in the number of workers, as (from, to), of a run with these step times."""
    told: list[DataWorkersChanged] = []
    auto = AutoWorkers(most, tell=told.append, rank=3)
    for step in range(1, steps + 1):
        wait, rest = times(auto.number)
        auto.record_step(step, wait=wait, rest=rest, batches=batches)
    assert all(event.rank == 3 for event in told)
    return [(event.before, event.workers) for event in told]


def loading(seconds: float, compute: float) -> Times:
    """Return the times of steps with this loading time, divided among workers, and this compute time."""

    def times(workers: int) -> tuple[float, float]:
        return (seconds if workers == 0 else max(0.0, seconds / workers - compute)), compute

    return times


def test_more_workers_are_tried_until_steps_wait_no_more() -> None:
    assert decided(loading(0.1, 0.03)) == [(0, 1), (1, 2), (2, 4)]


def test_one_worker_is_enough_where_computing_takes_longer_than_loading() -> None:
    assert decided(loading(0.02, 0.03)) == [(0, 1)]


def test_a_number_that_does_not_make_steps_shorter_is_taken_back_for_good() -> None:
    def disk(workers: int) -> tuple[float, float]:
        return (0.1 if workers == 0 else 0.05), 0.02  # a disk that is not faster with two workers

    assert decided(disk) == [(0, 1), (1, 2), (2, 1)]


def test_one_worker_that_only_takes_the_place_of_its_process_is_judged_with_a_second_one() -> None:
    def disk(workers: int) -> tuple[float, float]:
        return (0.1 if workers < 2 else 0.05), 0.001

    assert decided(disk, most=2) == [(0, 1), (1, 2)]
    assert decided(lambda workers: (0.1, 0.001)) == [(0, 1), (1, 2), (2, 0)]


def test_workers_that_take_the_cores_from_the_computation_are_taken_back() -> None:
    assert decided(lambda workers: (0.01, 0.05) if workers == 0 else (0.0, 0.06)) == [(0, 1), (1, 0)]


def test_the_cores_of_a_process_bound_its_workers() -> None:
    assert decided(loading(1.0, 0.001), most=6) == [(0, 1), (1, 2), (2, 4), (4, 6)]


@pytest.mark.parametrize(("wait", "rest"), [(0.004, 0.1), (0.0004, 0.0001)], ids=["small share", "short wait"])
def test_steps_that_hardly_wait_start_no_workers(wait: float, rest: float) -> None:
    assert decided(lambda workers: (wait, rest)) == []


def test_evaluations_and_checkpoints_between_steps_hide_no_wait() -> None:
    """An evaluation as long as 100 steps follows every tenth step."""
    number = iter(range(10_000))

    def times(workers: int) -> tuple[float, float]:
        wait, rest = loading(0.02, 0.03)(workers)
        return wait, rest + 5.0 * (next(number) % 10 == 0)

    assert decided(times) == [(0, 1)]


def test_batches_that_come_in_bursts_count_by_their_mean() -> None:
    """Two workers that take 80 ms each deliver two batches at once; the median wait of steps would be 0."""
    number = iter(range(10_000))

    def times(workers: int) -> tuple[float, float]:
        seconds = {0: 0.08, 1: 0.07}.get(workers, 0.0)
        return (0.06 * (next(number) % 3 == 0) if workers == 2 else seconds), 0.01

    assert decided(times, most=4) == [(0, 1), (1, 2), (2, 4)]


def test_the_share_that_an_event_tells_is_that_of_the_window_it_was_decided_by() -> None:
    told: list[DataWorkersChanged] = []
    auto = AutoWorkers(4, tell=told.append)
    for step in range(1, 26):
        auto.record_step(step, wait=0.03, rest=0.01, batches=1)
    (event,) = told
    assert event == DataWorkersChanged(step=25, rank=0, workers=1, before=0, waited=event.waited)
    assert event.waited == pytest.approx(0.75)


# ---------------------------------------------------------------- changes of loaders


class Loader:
    """A loader whose steps contain its number of workers; it loads nothing after its last step."""

    def __init__(self, first: int, workers: int) -> None:
        self.next, self.workers, self.last, self.closed = first + 1, workers, 10**9, False

    def load_step(self) -> list[tuple[int, int]]:
        assert self.next <= self.last
        self.next += 1
        return [(self.next - 1, self.workers)]

    def describe_position(self) -> str:
        return "here"

    def set_last_step(self, last: int) -> None:
        assert last >= self.next - 1 + settling_steps(self.workers, 1) - 5, "workers have been asked for more"
        self.last = last

    def is_at_end(self, step: int) -> bool:
        return step == self.last

    def close(self) -> None:
        assert self.next == self.last + 1, "nothing that it has loaded is lost"
        self.closed = True


def waiting_clock() -> Callable[[], float]:
    """Return a clock that advances a second per reading, so that steps wait as long as they compute."""
    ticks = count()
    return lambda: float(next(ticks))


def test_a_new_loader_goes_on_at_the_step_after_the_last_one_of_the_old() -> None:
    made: list[Loader] = []

    def make(first: int, workers: int) -> Any:
        made.append(Loader(first, workers))
        return made[-1]

    auto = AutoWorkers(2, tell=lambda event: None, clock=waiting_clock())
    drawn = [each for (each,) in islice(load_with_auto_workers(auto, make, first=7, batches=1), 200)]
    assert [step for step, _ in drawn] == list(range(8, 208))
    assert [(loader.workers, loader.closed) for loader in made] == [(0, True), (1, True), (2, True), (0, False)]
    lengths = [sum(1 for _ in group) for _, group in groupby(workers for _, workers in drawn)]
    one, two = settling_steps(1, 1), settling_steps(2, 1)  # steps from a decision to the change, and to the next check
    assert lengths[:-1] == [25 + one, one + 20 + two, two + 20 + two]


class Noisy(Dataset[Tensor]):
    """A data set with noisy samples, as from augmentation."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index)) + torch.rand(())


def test_workers_that_start_and_end_while_a_run_goes_on_leave_its_batches_as_they_are() -> None:
    """By this test's clock, steps wait less after each change, so that two workers follow one."""
    told: list[DataWorkersChanged] = []
    ticks = count()
    auto = AutoWorkers(2, tell=told.append, clock=lambda: next(ticks) / 2 ** len(told))
    order = Order(0, 4, 4, (1, 3))

    def values(workers: int | AutoWorkers) -> list[list[float]]:
        with closing(micro_batches(Noisy(), order, CPU, first=5, workers=workers)) as steps:
            return [batch.data.tolist() for step in islice(steps, 100) for batch in step]

    assert values(auto) == values(0)
    assert [event.workers for event in told] == [1, 2]
