"""The training loop: steps a replica, and emits events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from torch import Tensor

from worldsize.collectives.step_timer import StepTimer
from worldsize.core import (
    Emit,
    Evaluated,
    MicroBatch,
    NonfiniteLossError,
    Replica,
    StepDone,
    StepResult,
    UpdateOverflowed,
    World,
)
from worldsize.data.data_wait import StopBetweenSteps
from worldsize.train.agreement import Agreement, Wishes
from worldsize.train.before_update import BeforeUpdate
from worldsize.train.training_metrics import TrainingMetrics
from worldsize.train.window import LoggedStep, LogWindow

_MEASURED = 50  # most steps that are measured between two logged ones
_GATHERED = 8192  # approximate number of measured steps, over all ranks, that each rank receives at a logged step


@final
@dataclass(frozen=True)
class LoopConfig:
    """The length of a run, and its intervals, in steps, of logging, evaluation and saving."""

    steps: int  # of the whole run, including earlier attempts
    batch_size: int  # samples of a step, over all ranks
    log_every: int = 10
    evaluate_every: int = 0  # 0: only at the end
    save_every: int = 0  # 0: never, unless the next field is set
    save_at_end: bool = False
    keeps_best: bool = False  # whether checkpoints are kept by the metrics of their step
    logical_ranks: int | None = None  # those of all ranks if some may have one less than others
    parts: Sequence[int] | None = None  # then a rank of each data-parallel part, in their order; None: each rank is one
    logs_first: bool = False  # whether the log of a step is exchanged before its update: it is not lost with a process
    stop_on_nonfinite: bool = True  # whether a loss that is NaN or infinite ends the run with an error

    def logs(self, step: int) -> bool:
        """Return whether ``step`` is logged; the first and the last one always are."""
        return step % self.log_every == 0 or step in (1, self.steps)

    def evaluates(self, step: int) -> bool:
        """Return whether ``step`` is followed by an evaluation; the last one always is."""
        return step == self.steps or (self.evaluate_every > 0 and step % self.evaluate_every == 0)

    def saves_first(self, step: int) -> bool:
        """Return whether ``step`` is saved before it is evaluated.

        The last step is: its evaluation is often the first, and if it fails, no training is lost.
        """
        return step == self.steps and self.saves(step) and not self.keeps_best

    def measures(self, step: int, ranks: int) -> bool:
        """Return whether the time breakdown of ``step`` is measured: for up to about 50 steps between two logged ones.

        Each rank sends its measurements to all ``ranks``, so that large worlds measure fewer steps.
        """
        measured = max(1, min(_MEASURED, _GATHERED // ranks))
        return step % max(1, self.log_every // measured) == 0 or self.logs(step)

    def saves(self, step: int) -> bool:
        """Return whether ``step`` is followed by a checkpoint."""
        return (self.save_at_end and step == self.steps) or (self.save_every > 0 and step % self.save_every == 0)


@final
@dataclass(frozen=True)
class TrainingProgress:
    """The progress of training."""

    step: int = 0  # completed steps
    skipped: int = 0  # of these, steps whose update was skipped (nonfinite=skip)
    evaluated: bool = True  # whether the evaluation that is due after the last step is done
    saved: bool = True  # whether the save that is due after the last step is done
    stopped_early: str | None = None  # why the run is complete before its last step
    # this process's sums of training metrics since the last logged step, by name: float64 (logical ranks, 2)
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Any = None  # where gangs heal: the result of LoopCallbacks.share in the last completed step


@final
@dataclass(frozen=True)
class LoopCallbacks:
    """Functions that the loop calls, in the same order on all ranks."""

    evaluate: Callable[[int], Mapping[str, float]]  # returns the metrics after a step, given its number
    emit: Emit  # takes each event
    save: Callable[[TrainingProgress], None] = lambda progress: None  # when a checkpoint is due
    save_is_due: Callable[[int], bool] = lambda step: False  # besides those of the interval; alike on all ranks
    wishes: Callable[[], Wishes] = Wishes  # returns what this rank asks the others for
    ends_early: Callable[[], str | None] = lambda: None  # returns why the run ends after the evaluations so far
    at: Callable[[str], None] = lambda point: None  # at the points where a fault may be injected
    progressed: Callable[[TrainingProgress], None] = lambda progress: None  # when a step, evaluation or save is done
    logged: Callable[[TrainingProgress], None] = lambda progress: None  # when a step is done and, if it is due, logged
    examine: Callable[[StepDone], None] = lambda done: None  # between steps; its duration is not part of theirs
    # where gangs heal: in each step before its update, gathers what every process keeps in case that others die, given
    # this process's sums of training metrics; it returns plain values
    share: Callable[[Mapping[str, Tensor]], Any] | None = None
    before_update: BeforeUpdate = field(default_factory=BeforeUpdate)  # calls the loop inside a step of the replica


def fit(
    replica: Replica,
    batches: Iterable[Sequence[MicroBatch]],
    world: World,
    *,
    config: LoopConfig,
    callbacks: LoopCallbacks,
    first: TrainingProgress = TrainingProgress(),
    timer: StepTimer | None = None,
) -> TrainingProgress:
    """Run the steps after ``first`` up to ``config.steps``, and return the progress made.

    The run ends earlier, on all ranks after the same step and with a save, if any rank wants to stop or an evaluation
    ends it. Nothing here waits for the device or for other ranks between logged steps.

    Args:
        replica: the model to train.
        batches: the micro-batches of each step, beginning with the step after ``first``.
        world: the ranks that train.
        config: the length of the run and its intervals.
        callbacks: functions to evaluate, save, stop and report.
        first: the progress of earlier attempts.
        timer: measures the time breakdown of steps; it must be open.

    Raises:
        NonfiniteLossError: on every rank, at the first logged step after the loss became NaN or infinite.
    """
    window = LogWindow(
        world,
        config.batch_size,
        timer,
        metrics=TrainingMetrics(first.metrics),
        logical_ranks=config.logical_ranks,
        parts=config.parts,
    )
    agreement = Agreement(world, callbacks.wishes, steps=config.steps)
    loop = _Loop(replica, config, callbacks, window, agreement)
    with callbacks.before_update.calling(loop.add) if config.logs_first else nullcontext():
        return loop.run(iter(batches), first)


@final
class _Loop:
    def __init__(
        self, replica: Replica, config: LoopConfig, callbacks: LoopCallbacks, window: LogWindow, agreement: Agreement
    ) -> None:
        self._replica, self._config, self._callbacks = replica, config, callbacks
        self._window, self._agreement = window, agreement
        self._begun = 0  # the step that was begun last
        self._added = 0  # the step whose losses were added to the window last
        self._shared: Any = None  # what all processes keep of the step that is computed
        self._skipped = 0  # steps whose update was skipped, since the run began
        self._result: StepResult | None = None  # of the last step
        self._closed: LoggedStep | None = None  # the step that is computed, if it is logged and was before its update
        self._logged: Callable[[], StepDone] | None = None  # makes the event of the last logged step, until it is told

    def run(self, source: Iterator[Sequence[MicroBatch]], first: TrainingProgress) -> TrainingProgress:
        config, self._skipped, self._shared = self._config, first.skipped, first.shared
        if not first.saved and config.saves(first.step):
            self._save(first.step, evaluated=first.evaluated)
        if not first.evaluated and config.evaluates(first.step):
            self._evaluate(first.step)
        is_due, reason, saved = False, self._callbacks.ends_early(), first.step
        if reason is not None:
            if config.save_at_end and config.logs_first:  # a save in flight was lost with the gang before
                self._save(first.step, evaluated=True)
            return TrainingProgress(first.step, self._skipped, stopped_early=reason)
        for step in range(first.step + 1, config.steps + 1):
            try:
                self._step(step, source)
            except StopBetweenSteps:
                return self._stop_after(step - 1, saved=saved)
            is_due = config.evaluates(step)
            if is_due and not config.saves_first(step):
                self._evaluate(step)
                is_due = False
                reason = self._callbacks.ends_early() if step < config.steps else None
            agreed = self._agreement.reached(step)
            stops = agreed.stop and step < config.steps
            overdue = agreed.save and saved < step - 1  # otherwise the ranks asked before that save
            if reason is not None:
                return self._end_early(step, reason)
            if stops:
                self._emit_logged(examine=False)  # a request to stop waits for nothing but the save
            if stops or overdue or config.saves(step) or self._callbacks.save_is_due(step):
                self._save(step, evaluated=not is_due)
                saved = step
            if stops:
                return TrainingProgress(step, self._skipped)
        if is_due:
            self._evaluate(config.steps)
        self._emit_logged()
        return TrainingProgress(config.steps, self._skipped)

    def _stop_after(self, step: int, *, saved: int) -> TrainingProgress:
        """Save ``step``, unless it is ``saved``: the data of the next one are waited for, and the run has to end."""
        self._emit_logged(examine=False)
        if saved < step:
            self._save(step, evaluated=True)
        return TrainingProgress(step, self._skipped)

    def _end_early(self, step: int, reason: str) -> TrainingProgress:
        """Log and save ``step`` as the last one of the run."""
        config = self._config
        if not config.logs(step):
            self._tell_later(self._close(step))
        self._emit_logged(examine=False)
        if config.save_at_end or config.saves(step):
            self._save(step, evaluated=True)
        return TrainingProgress(step, self._skipped, stopped_early=reason)

    def _step(self, step: int, source: Iterator[Sequence[MicroBatch]]) -> None:
        window = self._window
        window.fetching()
        micro_batches = next(source)
        window.stepping(measured=self._config.measures(step, window.world.size))
        self._callbacks.at("step:compute")
        self._begun = step
        self._result = result = self._replica.step(micro_batches)
        self._skipped += result.skipped
        if result.overflowed:
            self._callbacks.emit(UpdateOverflowed(step))
        evaluated, saved = not self._config.evaluates(step), not self._config.saves(step)
        progress = TrainingProgress(step, self._skipped, evaluated, saved, shared=self._shared)
        self._callbacks.progressed(progress)
        window.stepped()
        self._emit_logged()  # the values of the previous step were gathered during this one
        if self._added != step:
            self.add(result.losses, result.metrics, occasional=result.occasional)
        if (closed := self._closed) is not None:
            self._closed = None
            self._tell_later(closed)
            if self._config.logs_first:
                self._emit_logged()
        self._callbacks.logged(progress)

    def add(self, losses: Sequence[Tensor], metrics: Mapping[str, Tensor], *, occasional: bool = False) -> None:
        """Add the losses of the step to the window, and exchange its log: before the update, if the loop logs first.

        No rank then completes a step whose log may be lost: if a process dies before all have the log, all repeat the
        step; if it dies later, the others have it.
        """
        self._added = self._begun
        self._window.add(losses, metrics, occasional=occasional)
        if self._config.logs(self._begun):
            self._closed = self._close(self._begun)
        if self._callbacks.share is not None:
            self._shared = self._callbacks.share(self._window.agreed_sums())

    def _close(self, step: int) -> LoggedStep:
        self._callbacks.at("log:begin")
        closed = self._window.close(step, self._replica.facts())
        if self._config.logs_first:
            closed = closed.received()
            self._callbacks.at("log:end")
        return closed

    def _tell_later(self, closed: LoggedStep) -> None:
        assert self._result is not None
        self._logged = partial(closed.event, self._result, self._skipped)

    def _emit_logged(self, *, examine: bool = True) -> None:
        """Emit the event of the last logged step, unless it was emitted; all ranks examine it if steps follow."""
        if self._logged is None:
            return
        done, self._logged = self._logged(), None
        self._agreement.tell(done)
        self._callbacks.emit(done)
        if self._config.stop_on_nonfinite and not math.isfinite(done.loss):
            raise NonfiniteLossError(_explain(done))
        if examine and done.step < self._config.steps:
            with self._window.paused():
                self._callbacks.examine(done)

    def _evaluate(self, step: int) -> None:
        self._emit_logged()
        with self._window.paused():
            self._callbacks.emit(Evaluated(step, self._callbacks.evaluate(step)))
        saved = not self._config.saves(step) or self._config.saves_first(step)
        self._callbacks.progressed(TrainingProgress(step, self._skipped, saved=saved, shared=self._shared))

    def _save(self, step: int, *, evaluated: bool) -> None:
        self._emit_logged()  # the checkpoint includes everything logged so far
        with self._window.paused():
            self._callbacks.save(TrainingProgress(step, self._skipped, evaluated, metrics=self._window.agreed_sums()))
        self._callbacks.progressed(TrainingProgress(step, self._skipped, evaluated, shared=self._shared))


def _explain(done: StepDone) -> str:
    return (
        f"the loss is {done.loss} at or before step {done.step}. Lower lr, set clip_norm, or choose "
        "nonfinite=skip (leave such steps out) or nonfinite=ignore."
    )
