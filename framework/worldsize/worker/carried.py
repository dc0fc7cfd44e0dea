"""Holds what a process keeps while the other members of its gang change, and frees their process groups.

Whoever frees a group of gloo waits until its collectives have ended, and one that sends to a process that was killed
goes on until the timeout of the group.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, final

from torch.distributed import ProcessGroup, Work

from worldsize.checkpoint.format import Checkpoint
from worldsize.checkpoint.load import newest
from worldsize.checkpoint.save import Saver
from worldsize.collectives.peer_waits import INTERRUPTION
from worldsize.config.settings import Settings
from worldsize.core import Evaluated, Event, Listener, RunStarted, StepDone, World
from worldsize.record.determinism import seed_generators, stream
from worldsize.record.run_directory import RunDirectory
from worldsize.strategies.deferred.model import state_follows
from worldsize.train.before_update import BeforeUpdate
from worldsize.train.fit import TrainingProgress
from worldsize.worker.evaluation import EvaluationData
from worldsize.worker.save_interval import SaveInterval
from worldsize.world.processes import Heartbeat
from worldsize.world.world import existing_groups


@final
@dataclass
class LoggedEvents:
    """Remembers what of the run is logged, so that steps that are done again are not logged again."""

    last: StepDone | None = None
    """The last logged step that this process knows of."""
    missing: StepDone | None = None
    """A logged step of which the process that logged it perhaps knew nothing."""
    step: int = 0
    """The last step that was logged before steps were done again."""
    evaluation: int = 0
    """The last step whose evaluation was logged before."""
    _told: list[Listener] = field(default_factory=list)  # those that know that the run has started

    def is_new(self, event: Event) -> bool:
        """Return whether an event is not of a step that is done again."""
        match event:
            case StepDone(step=step):
                return step > self.step
            case Evaluated(step=step):
                return step > self.evaluation
        return True

    def known(self, first: TrainingProgress) -> tuple[int, bool]:
        """Return the last logged step of a run that goes on from ``first``, and whether its evaluation is done."""
        step = max(first.step, self.step, self.evaluation)
        return step, first.evaluated or step > first.step

    def tell_started(self, event: RunStarted, listeners: Sequence[Listener], *, passing: Sequence[Listener]) -> None:
        """Tell those of ``listeners`` that do not know it that the run has started.

        Those that are ``passing`` are gone with the membership, and must not be remembered: they know its replica.
        """
        before = self._told
        self._told = [each for each in listeners if not any(each is other for other in passing)]
        for listener in listeners:
            if not any(listener is told for told in before):
                listener(event)


@final
@dataclass
class Carried:
    """The data sets of a process, the thread that saves, and where its training stands."""

    settings: Settings
    heartbeat: Path | None
    begin_step: Callable[[int], None] = lambda done: None  # raises if the gang of this process has ended
    finish: Callable[[], None] = lambda: None  # called when this process needs no other any more
    progress: TrainingProgress | None = None
    """What this process has done; None: nothing yet, so that it begins at ``checkpoint``."""
    checkpoint: Checkpoint | None = None
    """The checkpoint that :meth:`beginning` has found; None: there is none, and training begins anew."""
    log: LoggedEvents = field(default_factory=LoggedEvents)
    """What was logged, also by other processes."""
    copy: Callable[[TrainingProgress], None] = lambda progress: None
    """Called with what this process has done, to keep copies of its state in memory."""
    interval: SaveInterval | None = None
    """Chooses when saves are due in the present membership; None: the configuration does."""
    saves: Mapping[str, Any] = field(default_factory=dict)
    """What the interval of the next membership begins with; empty: with what the newest checkpoint says."""
    _beats: Heartbeat | None = None
    _saver: Saver | None = None

    @cached_property
    def before_update(self) -> BeforeUpdate:
        """The function that each replica of this process calls in a step."""
        return BeforeUpdate()

    @cached_property
    def train(self) -> Any:
        """The training data that the recipe returns."""
        return self.settings.recipe.data("train")

    @cached_property
    def evaluation(self) -> EvaluationData:
        """The data of evaluations."""
        return EvaluationData(self.settings)

    def build(self, world: World) -> None:
        """Build the data sets now, so that the members of a gang do not wait for a newcomer that builds its own."""
        seed_generators(stream(self.settings.training.seed, "data"), world.device)  # the data set may draw its order
        assert self.train is not None
        self.evaluation.build(self.settings.evaluation.splits)

    def beginning(self, run: RunDirectory, world: World) -> AbstractContextManager[None]:
        """Find the checkpoint from which training begins; return a context for making the replica.

        Within it, nothing is drawn for weights that are then loaded. All ranks of ``world`` must call this.

        Raises:
            CheckpointError: the newest checkpoint is damaged, and no older one may be used.
        """
        config, initial = self.settings.checkpoint, self.settings.initial
        self.checkpoint = newest(run.checkpoints, world, allow_older=config.allow_older)
        if self.checkpoint is None:
            loads_all = initial is not None and initial.strict
        else:
            loads_all = "model" not in config.ignored(self.checkpoint.step)
        return state_follows() if loads_all else nullcontext()

    def saver(self, run: RunDirectory, world: World, group: ProcessGroup | None) -> Saver:
        """Return the writer of checkpoints, for the ranks of ``world``, in whose ``group`` nothing else communicates.

        They have one thread in all memberships, so that a save that was interrupted ends before the next begins.
        """
        if self._saver is not None:
            self._saver = self._saver.regrouped(world, group)
            return self._saver
        self._saver = Saver(
            run.checkpoints,
            world,
            group,
            keep=self.settings.checkpoint.keep,
            finite=self.settings.numerics.nonfinite == "stop",
            owner=run.manifest,
            at=self.settings.faults.at,
        )
        return self._saver

    def beats(self, first: int) -> Heartbeat | None:
        """Return the heartbeat of this process, which began after step ``first``."""
        if self._beats is None and self.heartbeat is not None:
            self._beats = Heartbeat(self.heartbeat, first)
        return self._beats

    def note(self, progress: TrainingProgress) -> None:
        """Record what this process has done."""
        self.progress = progress


_Left = list[tuple[list[Work], list[ProcessGroup]]]  # of each membership: what goes on, and all groups


@final
class LeftGroups:
    """The groups that this process has left and not freed."""

    def __init__(self) -> None:
        self._left: _Left = []

    def keep(self) -> None:
        """Keep the groups of this process, which it is about to leave."""
        self._left.append((INTERRUPTION.unfinished(), existing_groups()))

    def free(self) -> None:
        """Free the groups to which nothing else refers but garbage, unless collectives in them go on.

        A thread frees them: torch may have started collectives by itself, of which nobody knows whether they go on.
        """
        gc.collect()  # replicas and their groups refer to themselves
        before, self._left = self._left, []
        ended: _Left = []
        while before:  # no name refers to a group when the thread begins
            (self._left if _go_on(before[-1][0]) else ended).append(before.pop())
        threading.Thread(target=ended.clear, daemon=True, name="groups").start()


def _go_on(works: list[Work]) -> bool:
    return not all(map(Work.is_completed, works))


LEFT_GROUPS = LeftGroups()  # for as long as this process lives, also after the last membership
