"""Saves during training, handling of failed saves, and the history stored in checkpoints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from torch import Tensor

from worldsize.checkpoint.save import Saver
from worldsize.core import CheckpointFailed, CheckpointSaved, Emit, Evaluated, Event, RunStarted, StateDict, StepDone
from worldsize.errors import CheckpointError, SaveFailedError
from worldsize.loop.agreement import Wishes
from worldsize.record.metrics import last_metrics
from worldsize.worker.save_interval import SaveInterval


@final
class Checkpointing:
    """Manages the saves of one attempt; every rank calls the same methods in the same order.

    All ranks learn of the same failures, but possibly at different steps, so decisions between two saves do not depend
    on when a rank learns of a failure.

    Args:
        saver: Writes the checkpoints.
        emit: Receives each event.
        on_failure: What to do if a save fails.
        interval: Chooses steps to save in addition to the configured ones; None: no additional ones.
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
        """Wait for the previous save and start the next one, see :meth:`Saver.save`.

        ``streams``: uint8 tensors of shape (bytes,), by name.

        Raises:
            CheckpointError: the previous save failed, and so would the next one.
        """
        interval = self._interval
        with interval.saving(step) if interval else nullcontext():
            self.finish()
            if interval:
                interval.agree(step)
                facts = {**facts, "save_interval": interval.facts()}
            self._saver.save(state, step=step, facts=facts, streams=streams)

    def resume(self, step: int, facts: Mapping[str, Any]) -> None:
        """Continue after ``step``, with the save interval in ``facts`` if they contain one."""
        if self._interval:
            self._interval.resume(step, facts.get("save_interval") or {})

    def begin_step(self) -> None:
        """Record the start of a step, and emit the event of a save that has ended.

        Raises the same errors as :meth:`save`.
        """
        self._record_ended_saves(self._saver.collect_finished_save)
        if self._interval:
            self._interval.begin_step(in_flight=self._saver.is_writing)

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after ``step``, in addition to the configured ones."""
        return self._interval is not None and self._interval.is_due(step)

    def exclude_duration(self) -> AbstractContextManager[None]:
        """Return a context for work, such as an evaluation, that does not count as step time."""
        return self._interval.exclude_step_time() if self._interval else nullcontext()

    def finish(self) -> None:
        """Wait for the save in flight and emit its event; raise the same errors as :meth:`save`."""
        self._record_ended_saves(self._saver.finish)

    def close(self) -> None:
        """Stop the saver's thread."""
        self._saver.close()

    def collect_wishes(self, *, stop: bool = False) -> Wishes:
        """Return this rank's requests to stop and to save.

        It requests a stop if ``stop`` is set, or after a failed save if ``on_failure`` is "stop". It requests a save if
        one is overdue.
        """
        failed = self._on_failure == "stop" and bool(self._failures)
        return Wishes(stop or failed, save=self._interval is not None and self._interval.is_overdue())

    def check_stop(self) -> None:
        """Raise CheckpointError if stopping now, before the last step, counts as a failure.

        It does if the run stops because of a failed save, or if all saves of this attempt have failed. Otherwise, the
        exit code would request a restart, and the run would restart endlessly while the disk is full.
        """
        if self.collect_wishes().stop:
            first = self._failures[0]
            raise SaveFailedError(first.step, first.reason, first.newest)
        if self._in_a_row and not self._has_saved:
            last = _format_failure(self._failures[-1])
            raise CheckpointError(
                f"the run was stopped on request before a checkpoint of this attempt was saved: {last}"
            )

    def check_end(self, step: int) -> None:
        """Raise CheckpointError if the save of the run's last ``step`` failed: the model is lost."""
        if self._in_a_row and (last := self._failures[-1]).step == step != last.newest:
            raise CheckpointError(
                f"training has finished, but its last checkpoint is missing: {_format_failure(last)} Run `worldsize "
                "resume` to repeat the steps since the previous checkpoint."
            )

    def list_failed_saves(self) -> list[dict[str, Any]]:
        """List the failed saves of this attempt, for the result."""
        return [{"step": failure.step, "reason": failure.reason} for failure in self._failures]

    def _record_ended_saves(self, ended: Callable[[], list[CheckpointSaved]]) -> None:
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


def _format_failure(failure: CheckpointFailed) -> str:
    return str(SaveFailedError(failure.step, failure.reason, failure.newest))


@final
@dataclass
class History:
    """Collects values for the run's result and checkpoints; ``file`` is the metrics file."""

    file: Path
    started: float = field(default_factory=time.perf_counter)
    first: int = 0
    first_step_at: float | None = None  # Unix time
    metrics: Mapping[str, float] = field(default_factory=dict)
    compiled: Mapping[str, Any] = field(default_factory=dict)  # facts about torch.compile in this attempt
    logged: deque[tuple[int, float, float | None]] = field(default_factory=lambda: deque(maxlen=0))  # for spikes
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first):
                self.first, self.metrics = first, last_metrics(self.file) if first else {}
            case StepDone(step=step, loss=loss, grad_norm=norm, facts=facts):
                self.logged.append((step, loss, norm))
                self.first_step_at = self.first_step_at or time.time()
                self.compiled = facts.get("compiled", self.compiled)
            case Evaluated(step=step, metrics=metrics):
                self.metrics = metrics
                self.evaluations.append((step, metrics))
