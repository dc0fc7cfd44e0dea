"""A process's copies of a sharded state outlast interrupted recoveries."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from worldsize.core import Replica, StateDict, World
from worldsize.healing.copies import ShardRecovery
from worldsize.healing.loop_state import LoopState
from worldsize.loop.fit import LoopConfig, TrainingProgress
from worldsize.record.run_directory import RunDirectory
from worldsize.testing.worlds import run_in_worlds


class Numbers:
    """A replica with a state of a few numbers."""

    def __init__(self, value: float) -> None:
        self.numbers = torch.full((5,), value)

    def state(self) -> StateDict:
        return {"model": {"numbers": self.numbers}}

    def load(self, state: StateDict) -> None:
        self.numbers = state["model"]["numbers"]


def recovery_of(run: RunDirectory) -> ShardRecovery:
    settings: Any = SimpleNamespace(
        strategy=SimpleNamespace(data_rank=lambda world: None),
        training=SimpleNamespace(schedule_metric=None),
        checkpoint=SimpleNamespace(peers=1),
        faults=SimpleNamespace(report_point=lambda point: None),
        loop=LoopConfig(steps=10, batch_size=1),
    )
    return ShardRecovery(settings, run)


def numbers(value: float) -> Replica:
    return cast(Replica, Numbers(value))


def interrupted() -> Replica:
    raise ConnectionError("a member has died")


def test_what_was_handed_over_stays_if_the_recovery_is_interrupted(tmp_path: Path) -> None:
    """The second process holds the only copies: it hands them over and waits; the first one starts twice."""
    run = RunDirectory(tmp_path)
    run.metrics.touch()

    def body(world: World) -> tuple[list[int], list[float], int]:
        recovery = recovery_of(run)
        alone, both = World.create_single(world.device), {f"copies/{world.role}": world.groups[world.role]}
        if world.rank == 1:
            recovery.recover_replica(partial(numbers, 3.0), alone, 1, LoopState())
            recovery.copy_state(TrainingProgress(3))
        recovery.leave_membership()
        recovery.hand_over(replace(world, groups=both), 1)
        steps = [recovery.step]
        with pytest.raises(ConnectionError):
            recovery.recover_replica(interrupted, alone, 2, LoopState())
        steps.append(recovery.step)
        recovery.leave_membership()
        replica, state = recovery.recover_replica(partial(numbers, 0.0), alone, 3, LoopState())
        assert state.progress is not None
        return [*steps, recovery.step], cast(Numbers, replica).numbers.tolist(), state.progress.step

    assert run_in_worlds(body, 2) == [([3, 3, 3], [3.0] * 5, 3)] * 2


def test_the_replica_before_is_gone_when_the_next_one_is_made(tmp_path: Path) -> None:
    """Two of them might not fit in memory, and a reference to the old one keeps its membership's groups."""
    run = RunDirectory(tmp_path)
    run.metrics.touch()
    recovery = recovery_of(run)
    first, _ = recovery.recover_replica(partial(numbers, 1.0), World.create_single(torch.device("cpu")), 1, LoopState())
    recovery.copy_state(TrainingProgress(3))
    gone = weakref.ref(first)
    del first
    assert gone() is not None
    recovery.leave_membership()
    recovery.release_replica()
    assert gone() is None
