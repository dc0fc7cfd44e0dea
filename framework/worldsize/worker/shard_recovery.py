"""Keeps copies of a sharded state while a gang trains, and gives its next members the newest whole one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import final

from worldsize.checkpoint.copies import Generation, ShardCopies
from worldsize.checkpoint.pieces import PieceLayout, Place
from worldsize.checkpoint.recovery import Recovery, handed_over
from worldsize.core import Replica, World
from worldsize.record.metrics import last_row
from worldsize.record.run_directory import RunDirectory
from worldsize.train.fit import LoopConfig, TrainingProgress
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
        carried, group = self._carried, world.groups.get(f"copies/{world.role}")
        replica = make_replica()
        recovery = Recovery(
            replica.state(),
            self._left,
            group,
            self._place(world),
            facts=self._known(loop) if world.rank == 0 else None,
        )
        newest = recovery.run()
        if newest is None:
            carried.progress, carried.log.step, carried.log.evaluation = None, 0, 0
        else:
            replica.load(newest.state)
            carried.log.step, carried.log.evaluation, saved_step = recovery.facts
            # a schedule that an evaluation has advanced is not in the copy of the step before it
            evaluated = carried.log.evaluation >= newest.step and carried.settings.training.schedule_metric is None
            evaluated = evaluated or not loop.evaluates(newest.step)
            saved = saved_step is None or saved_step >= newest.step or not loop.saves(newest.step)
            carried.progress = TrainingProgress(newest.step, newest.skipped, evaluated, saved, shared=newest.shared)
        self._begin(replica, world, number, recovery.layout, newest.kept if newest else None)
        self._left = []  # only now: if this is interrupted, the next membership needs it
        return replica

    def close(self) -> None:
        """Wait until the copies on the way have arrived."""
        if self._copies:
            self._copies.close()

    def _begin(
        self, replica: Replica, world: World, number: int, layout: PieceLayout, before: Generation | None
    ) -> None:
        copies = ShardCopies(
            number,
            world.groups.get(f"copies/{world.role}"),
            self._place(world),
            device=world.device,
            before=before,
            layout=layout,
            at=self._at,
        )
        self._copies = copies
        self._carried.copy = partial(self._copy, replica, copies)

    def _place(self, world: World) -> Place:
        return Place(host_name(os.environ), self._carried.settings.strategy.data_rank(world))

    def _copy(self, replica: Replica, copies: ShardCopies, progress: TrainingProgress) -> None:
        is_new = self.step < progress.step
        if copies.is_unused or (is_new and progress.step % self._every == 0):
            copies.take(replica.state(), step=progress.step, skipped=progress.skipped, shared=progress.shared)

    def _known(self, loop: LoopConfig) -> tuple[int, int, int | None]:
        """Return the last step and the last evaluation that are recorded, and the last step whose save is done.

        The last is None if this process has done no step: who has died knew which saves are done.
        """
        step, is_evaluation = last_row(self._run.metrics)
        logged = step if not is_evaluation or loop.logs(step) else step - 1
        evaluated = step if is_evaluation or (step and not loop.logs(step)) else step - 1
        progress = self._carried.progress
        return logged, evaluated, progress and (progress.step if progress.saved else progress.step - 1)


def _nothing(progress: TrainingProgress) -> None: ...
