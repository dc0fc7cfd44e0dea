"""State of the training loop that a process keeps between memberships of its gang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

from worldsize.checkpoint.format import Checkpoint
from worldsize.checkpoint.load import find_newest
from worldsize.config.settings import Settings
from worldsize.core import Evaluated, Event, Spike, StepDone, World
from worldsize.loop.fit import TrainingProgress
from worldsize.record.run_directory import RunDirectory
from worldsize.strategies.deferred.model import state_follows


@final
@dataclass(frozen=True)
class LogState:
    """The logged steps of a run, so that repeated steps and their spikes are not logged twice.

    Attributes:
        last: The last logged step.
        missing: On rank 0, a logged step that the log may lack because its writer died; rank 0 then logs it again.
        step: The last step logged in an earlier membership.
        evaluation: The last step with an evaluation logged in an earlier membership.
    """

    last: StepDone | None = None
    missing: StepDone | None = None
    step: int = 0
    evaluation: int = 0

    def is_new(self, event: Event) -> bool:
        """Return whether an event is new: not a step or evaluation of an earlier membership."""
        match event:
            case StepDone(step=step):
                return step > self.step
            case Evaluated(step=step):
                return step > self.evaluation
            case Spike(step=step):
                return step > self.step
        return True

    def get_last_logged(self, first: TrainingProgress) -> tuple[int, bool]:
        """Return the last logged step of a run resumed at ``first``, and whether it was evaluated."""
        step = max(first.step, self.step, self.evaluation)
        return step, first.evaluated or step > first.step


@final
@dataclass(frozen=True)
class LoopState:
    """State of the training loop between two memberships.

    Attributes:
        progress: Progress of this process; None to start from ``checkpoint``.
        checkpoint: Checkpoint to start from; None if the run has none.
        log: The logged steps of all processes.
        saves: State of the save interval; empty to restore it from ``checkpoint``.
    """

    progress: TrainingProgress | None = None
    checkpoint: Checkpoint | None = None
    log: LogState = LogState()
    saves: Mapping[str, Any] = field(default_factory=dict)

    def prepare_start(
        self, settings: Settings, run: RunDirectory, world: World
    ) -> tuple[LoopState, AbstractContextManager[None]]:
        """Find the checkpoint to start from; all ranks of ``world`` must call this.

        Returns:
            The state with the checkpoint, and a context in which to create the replica. The context skips the
            initialization of weights if all weights will be loaded.

        Raises:
            CheckpointError: the newest checkpoint is damaged, and older ones must not be used.
        """
        config, initial = settings.checkpoint, settings.initial
        checkpoint = find_newest(run.checkpoints, world, allow_older=config.allow_older)
        if checkpoint is None:
            loads_all = initial is not None and initial.strict
        else:
            loads_all = "model" not in config.list_ignored_parts(checkpoint.step)
        return replace(self, checkpoint=checkpoint), state_follows() if loads_all else nullcontext()


@final
@dataclass(frozen=True)
class GangHooks:
    """Callbacks from the training loop to a healing gang; the defaults do nothing.

    Attributes:
        begin_step: Called with the number of completed steps; raises an error if the membership has ended.
        finish: Called when this process no longer needs its peers.
        copy: Copies the state to the memory of other processes.
    """

    begin_step: Callable[[int], None] = lambda done: None
    finish: Callable[[], None] = lambda: None
    copy: Callable[[TrainingProgress], None] = lambda progress: None


class MembershipTraining(Protocol):
    """The training loop of a process in one membership."""

    @property
    def state(self) -> LoopState:
        """The newest state, even after :meth:`run` raised an error."""

    def run(self) -> int:
        """Train until the run ends or this process leaves; return the exit code."""
