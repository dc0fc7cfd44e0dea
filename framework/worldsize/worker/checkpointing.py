"""Saves during training: the consequence of a failed save, and the history that a checkpoint keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from torch import Tensor

from worldsize.checkpoint.save import Saver
from worldsize.core import CheckpointFailed, CheckpointSaved, Emit, Evaluated, Event, RunStarted, StateDict, StepDone
from worldsize.errors import CheckpointError, SaveFailedError
from worldsize.record.metrics import last_metrics
from worldsize.train.agreement import Wishes
from worldsize.worker.save_interval import SaveInterval


@final
class Checkpointing:
    """The saves of one attempt; every rank calls the same methods in the same order.

    All ranks learn of the same failures, though not before the same step; nothing that they decide between two saves
    depends on when.

    Args:
        saver: Writes the checkpoints.
        emit: Takes each event.
        on_failure: What training does when storage refuses a save.
        interval: Chooses after which steps saves are due; None: the configuration does.
    """

    def __init__(
        self,
        saver: Saver,
        *,
        emit: Emit,
        on_failure: Literal["stop", "continue"],
        interval: SaveInterval | None = None,
    ) -> None:
        self._saver, self._emit, self._on_failure, self._interval = saver, emit, on_failure, interval
        self._failures: list[CheckpointFailed] = []
        self._in_a_row = 0
        self._has_saved = False

    def save(
        self, state: StateDict, *, step: int, facts: Mapping[str, Any], streams: Mapping[str, Tensor] | None = None
    ) -> None:
        """Wait for the previous save and start the next one, as :meth:`Saver.save` does.

        ``streams``: uint8 [bytes] each, by name.

        Raises:
            CheckpointError: the previous save failed, and the next one would, too.
        """
        interval = self._interval
        with interval.saving(step) if interval else nullcontext():
            self.finish()
            if interval:
                interval.agree(step)
                facts = {**facts, "save_interval": interval.facts()}
            self._saver.save(state, step=step, facts=facts, streams=streams)

    def resume(self, step: int, facts: Mapping[str, Any]) -> None:
        """Go on after ``step`` with the interval that the facts of its checkpoint name, if any."""
        if self._interval:
            self._interval.resume(step, facts.get("save_interval") or {})

    def begin_step(self) -> None:
        """Emit the event of the save in flight if it has ended; raise as :meth:`save` does."""
        self._take(self._saver.ended)
        if self._interval:
            self._interval.begin_step(in_flight=self._saver.is_writing)

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after ``step``, besides those of the configuration."""
        return self._interval is not None and self._interval.is_due(step)

    def uncounted(self) -> AbstractContextManager[None]:
        """Return a context whose duration is no part of a step's, such as an evaluation's."""
        return self._interval.uncounted() if self._interval else nullcontext()

    def finish(self) -> None:
        """Wait for the save in flight and emit its event; raise as :meth:`save` does."""
        self._take(self._saver.finish)

    def close(self) -> None:
        """End the saver's thread."""
        self._saver.close()

    def wishes(self, *, stop: bool = False) -> Wishes:
        """Return the wishes of this rank: to stop if it is told to or a save failed, and to save if that is overdue."""
        failed = self._on_failure == "stop" and bool(self._failures)
        return Wishes(stop or failed, save=self._interval is not None and self._interval.is_overdue())

    def check_stop(self) -> None:
        """Raise CheckpointError if a run that stops before its end failed.

        It did if it stops because of a failed save, or if none of this attempt's saves succeeded: with the exit code
        that means "start me again" it could go round in circles for as long as its disk is full.
        """
        if self.wishes().stop:
            first = self._failures[0]
            raise SaveFailedError(first.step, first.reason, first.newest)
        if self._in_a_row and not self._has_saved:
            last = _described(self._failures[-1])
            raise CheckpointError(f"the run was asked to stop, and nothing of this attempt is saved: {last}")

    def check_end(self, step: int) -> None:
        """Raise CheckpointError if the save of ``step``, the last one of the run, failed: the trained model is lost."""
        if self._in_a_row and (last := self._failures[-1]).step == step != last.newest:
            raise CheckpointError(
                f"training has ended, but its last checkpoint is missing: {_described(last)} Then worldsize resume "
                "repeats the steps since the checkpoint before it."
            )

    def failed_saves(self) -> list[dict[str, Any]]:
        """List the saves of this attempt that failed, for the result."""
        return [{"step": failure.step, "reason": failure.reason} for failure in self._failures]

    def _take(self, ended: Callable[[], list[CheckpointSaved]]) -> None:
        try:
            events = ended()
        except SaveFailedError as error:
            self._in_a_row += 1
            failure = CheckpointFailed(error.step, error.reason, newest=error.newest, in_a_row=self._in_a_row)
            self._failures.append(failure)
            self._emit(failure)
        else:
            for event in events:
                self._in_a_row, self._has_saved = 0, True
                if self._interval:
                    self._interval.complete(event.step)
                self._emit(event)


def _described(failure: CheckpointFailed) -> str:
    return str(SaveFailedError(failure.step, failure.reason, failure.newest))


@final
@dataclass
class History:
    """A listener that keeps the values for the result and the checkpoints; ``file``: the run's metrics."""

    file: Path
    started: float = field(default_factory=time.perf_counter)
    first: int = 0
    first_step_at: float | None = None  # Unix time
    metrics: Mapping[str, float] = field(default_factory=dict)
    compiled: Mapping[str, Any] = field(default_factory=dict)  # by torch.compile, in this attempt
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first):
                self.first, self.metrics = first, last_metrics(self.file) if first else {}
            case StepDone(facts=facts):
                self.first_step_at = self.first_step_at or time.time()
                self.compiled = facts.get("compiled", self.compiled)
            case Evaluated(step=step, metrics=metrics):
                self.metrics = metrics
                self.evaluations.append((step, metrics))
