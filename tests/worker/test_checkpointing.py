"""Consequences of a failed save for the attempt: its events, whether it stops, and how it may end."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.save import Saver
from worldsize.core import CheckpointFailed, CheckpointSaved, Event, World
from worldsize.errors import CheckpointError, SaveFailedError
from worldsize.worker.checkpointing import Checkpointing

Made = Callable[..., tuple[Checkpointing, list[Event]]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Make checkpoints of steps 1, 2, ...; saves with a number in ``fails`` (from 1) meet a full disk."""
    opened: list[Checkpointing] = []

    def make(
        saves: int, fails: set[int], on_failure: Literal["stop", "continue"] = "continue"
    ) -> tuple[Checkpointing, list[Event]]:
        count, events = iter(range(1, 99)), list[Event]()

        def at(point: str) -> None:
            if point == "checkpoint:after-shard" and next(count) in fails:
                raise OSError(errno.ENOSPC, "No space left on device")

        saver = Saver(tmp_path, World.create_single(torch.device("cpu")), None, keep=Retention(last=9), at=at)
        checkpoints = Checkpointing(saver, emit=events.append, on_failure=on_failure)
        opened.append(checkpoints)
        for step in range(1, saves + 1):
            checkpoints.save({"x": torch.ones(2)}, step=step, facts={})
        checkpoints.finish()
        return checkpoints, events

    yield make
    for each in opened:
        each.close()


def test_events_count_failures_in_a_row_and_name_the_step_of_a_restart(made: Made) -> None:
    checkpoints, events = made(5, {2, 3, 5})
    failed = [(each.step, each.newest, each.in_a_row) for each in events if isinstance(each, CheckpointFailed)]
    assert failed == [(2, 1, 1), (3, 1, 2), (5, 4, 1)]
    assert [each.step for each in events if isinstance(each, CheckpointSaved)] == [1, 4]
    assert [each["step"] for each in checkpoints.list_failed_saves()] == [2, 3, 5]
    assert not checkpoints.collect_wishes().stop


def test_a_failed_save_asks_for_a_stop_only_where_the_configuration_does(made: Made) -> None:
    checkpoints, _ = made(2, {1}, "stop")
    assert checkpoints.collect_wishes().stop
    with pytest.raises(SaveFailedError, match="failed to write the checkpoint of step 1"):
        checkpoints.check_stop()


def test_a_stop_counts_as_saved_if_any_save_of_the_attempt_succeeded(made: Made) -> None:
    checkpoints, _ = made(2, {2})
    checkpoints.check_stop()
    checkpoints, _ = made(0, set())
    checkpoints.check_stop()


def test_a_stop_of_which_nothing_is_saved_is_a_failure(made: Made) -> None:
    checkpoints, _ = made(2, {1, 2})
    with pytest.raises(CheckpointError, match="before a checkpoint of this attempt was saved: .* step 2"):
        checkpoints.check_stop()


def test_an_end_is_a_failure_only_if_its_own_save_failed(made: Made) -> None:
    checkpoints, _ = made(3, {3})
    checkpoints.check_end(4)  # no save was due at this step
    with pytest.raises(
        CheckpointError, match="its last checkpoint is missing: failed to write the checkpoint of step 3"
    ):
        checkpoints.check_end(3)
