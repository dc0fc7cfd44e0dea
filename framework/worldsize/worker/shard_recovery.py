"""Keeps copies of a sharded state while a gang trains, and gives its next members the newest whole one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.checkpoints.copies import Generation, ShardCopies
from worldsize.checkpoints.recovery import handed_over, recovered
from worldsize.core import Replica, World
from worldsize.engine.fit import LoopConfig, TrainingProgress
from worldsize.records.metrics import last_row
from worldsize.records.run_directory import RunDirectory
from worldsize.worker.carried import Carried
from worldsize.world.environments import host_name
from worldsize.world.membership import NEWCOMER


@final
class ShardRecovery:
    """The copies that one process keeps in one membership after the other; ``every``: steps between two of them.

    ``at`` is called at named points, at which tests inject faults.
    """

    def __init__(self, run: RunDirectory, carried: Carried, *, every: int, at: Callable[[str], None]) -> None:
        self._run, self._carried, self._every, self._at = run, carried, every, at
        self._copies: ShardCopies | None = None
        self._left: list[Generation] = []  # by the memberships before

    @property
    def step(self) -> int:
        """The newest step of which this process keeps anything."""
        newest = self._copies.newest if self._copies else None
        return max((each.step for each in (*self._left, *([newest] if newest else ()))), default=NEWCOMER)

    def leave(self) -> None:
        """Wait no more for copies on the way, since the membership has ended; its groups still exist.

        What was left or handed over before stays if this process has not got as far as to keep copies since.
        """
        if self._copies:
            self._left, self._copies = self._copies.left(), None

    def hand_over(self, world: World, ranks: int) -> None:
        """Let the first ``ranks`` of ``world`` keep what only the others do, which will wait; all must call it.

        Raises:
            CheckpointError: a part of each state is lost.
        """
        self._left = handed_over(self._left, world.groups[f"copies/{world.role}"], ranks)

    def release(self) -> None:
        """Let go of the replica before, all of whose groups are left; two of them might not fit in memory."""
        self._carried.copy, self._carried.interval = _nothing, None
        gc.collect()  # it refers to itself

    def recover(self, make_replica: Callable[[], Replica], world: World, number: int, loop: LoopConfig) -> Replica:
        """Make the replica of membership ``number``, with the newest state of which no part is lost.

        All members must call it.

        Raises:
            CheckpointError: a part of each state is lost.
        """
        carried = self._carried
        before = carried.progress
        replica = make_replica()
        group = world.groups.get(f"copies/{world.role}")
        newest = recovered(replica.state(), self._left, group)
        if newest is None:
            carried.progress, carried.log.step, carried.log.evaluation = None, 0, 0
        else:
            replica.load(newest.state)
            is_past = before is not None and before.step > newest.step
            is_saved = before is None or is_past or (before.step == newest.step and before.saved)
            known: list[Any] = [*(self._logged(loop) if world.rank == 0 else (0, 0)), is_saved]
            if group is not None:  # as the member knows that logs
                dist.broadcast_object_list(known, group=group, group_src=0)
            carried.log.step, carried.log.evaluation, is_saved = known
            evaluated = carried.log.evaluation >= newest.step or not loop.evaluates(newest.step)
            saved = is_saved or not loop.saves(newest.step)
            carried.progress = TrainingProgress(newest.step, newest.skipped, evaluated, saved)
        self._begin(replica, world, number, group, newest.kept if newest else None)
        self._left = []  # only now: if this is interrupted, the next membership needs it
        return replica

    def close(self) -> None:
        """Wait until the copies on the way have arrived."""
        if self._copies:
            self._copies.close()

    def _begin(
        self, replica: Replica, world: World, number: int, group: ProcessGroup | None, before: Generation | None
    ) -> None:
        part, host = self._carried.settings.strategy.data_rank(world), host_name(os.environ)
        copies = ShardCopies(number, group, host=host, part=part, device=world.device, before=before, at=self._at)
        self._copies = copies
        self._carried.copy = partial(self._copy, replica, copies)

    def _copy(self, replica: Replica, copies: ShardCopies, progress: TrainingProgress) -> None:
        is_new = self.step < progress.step
        if copies.is_unused or (is_new and progress.step % self._every == 0):
            copies.take(replica.state(), step=progress.step, skipped=progress.skipped)

    def _logged(self, loop: LoopConfig) -> tuple[int, int]:
        """Return the last step and the last evaluation that are recorded."""
        step, is_evaluation = last_row(self._run.metrics)
        logged = step if not is_evaluation or loop.logs(step) else step - 1
        evaluated = step if is_evaluation or (step and not loop.logs(step)) else step - 1
        return logged, evaluated


def _nothing(progress: TrainingProgress) -> None: ...
