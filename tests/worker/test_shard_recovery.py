"""What a process keeps of a sharded state outlasts recoveries that are interrupted."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from worldsize.config.settings import Settings
from worldsize.core import Replica, StateDict, World
from worldsize.record.run_directory import RunDirectory
from worldsize.testing.worlds import run_in_worlds
from worldsize.train.fit import LoopConfig, TrainingProgress
from worldsize.worker.carried import Carried, LoggedEvents
from worldsize.worker.save_interval import SaveInterval
from worldsize.worker.shard_recovery import ShardRecovery

LOOP = LoopConfig(steps=10, batch_size=1)


class Numbers:
    """A replica whose state is a few numbers."""

    def __init__(self, value: float) -> None:
        self.numbers = torch.full((5,), value)

    def state(self) -> StateDict:
        return {"model": {"numbers": self.numbers}}

    def load(self, state: StateDict) -> None:
        self.numbers = state["model"]["numbers"]


def recovered(recovery: ShardRecovery, world: World, number: int, value: float) -> torch.Tensor:
    """Return the numbers that a replica that begins with ``value`` has in a membership."""
    made = recovery.recover(lambda: cast(Replica, Numbers(value)), world, number, LOOP)
    return cast(Numbers, made).numbers


def interrupted() -> Replica:
    raise ConnectionError("another member has died")


def test_what_was_handed_over_stays_if_the_recovery_is_interrupted(tmp_path: Path) -> None:
    """The second process, which alone keeps anything, hands it over and waits; the first one starts twice."""
    run = RunDirectory(tmp_path)
    run.metrics.touch()

    def body(world: World) -> tuple[list[int], list[float], int]:
        settings = SimpleNamespace(strategy=SimpleNamespace(data_rank=lambda world: None))
        carried: Any = SimpleNamespace(settings=settings, progress=None, log=LoggedEvents(), copy=None)
        recovery = ShardRecovery(run, carried, every=1, at=lambda point: None)
        alone, both = World.alone(world.device), {f"copies/{world.role}": world.groups[world.role]}
        if world.rank == 1:
            recovered(recovery, alone, 1, 3.0)
            carried.copy(TrainingProgress(3))
        recovery.leave()
        recovery.hand_over(replace(world, groups=both), 1)
        steps = [recovery.step]
        with pytest.raises(ConnectionError):
            recovery.recover(interrupted, alone, 2, LOOP)
        steps.append(recovery.step)
        recovery.leave()
        return [*steps, recovery.step], recovered(recovery, alone, 3, 0.0).tolist(), carried.progress.step

    assert run_in_worlds(body, 2) == [([3, 3, 3], [3.0] * 5, 3)] * 2


def test_the_replica_before_is_gone_when_the_next_one_is_made(tmp_path: Path) -> None:
    """Two of them might not fit in memory, and whoever knows one keeps the groups that its membership has left."""
    run = RunDirectory(tmp_path)
    run.metrics.touch()
    settings = SimpleNamespace(strategy=SimpleNamespace(data_rank=lambda world: None))
    carried = Carried(cast(Settings, settings), None)
    recovery = ShardRecovery(run, carried, every=1, at=lambda point: None)
    alone = World.alone(torch.device("cpu"))
    first = recovery.recover(lambda: cast(Replica, Numbers(1.0)), alone, 1, LOOP)
    carried.copy(TrainingProgress(3))
    carried.interval = SaveInterval(
        None, lambda failures, seconds: 1.0, emit=partial(print, first)
    )  # as training makes it
    gone = weakref.ref(first)
    del first
    assert gone() is not None
    recovery.leave()
    recovery.release()
    assert gone() is None
