"""The training loop, which steps a replica and emits events."""

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
from worldsize.loop.agreement import Agreement, Wishes
from worldsize.loop.before_update import BeforeUpdate
from worldsize.loop.training_metrics import TrainingMetrics
from worldsize.loop.window import LoggedStep, LogWindow

_MEASURED = 50  # maximum number of measured steps between two logged steps
_GATHERED = 8192  # approximate number of measured steps, over all ranks, that each rank receives per logged step


@final
@dataclass(frozen=True)
class LoopConfig:
    """The length of a run, and the intervals of logging, evaluation and saving, all in steps."""

    steps: int  # total, including earlier attempts
    batch_size: int  # samples per step, over all ranks
    log_every: int = 10
    evaluate_every: int = 0  # 0: only at the end
    save_every: int = 0  # 0: never, except as set by save_at_end
    save_at_end: bool = False
    keeps_best: bool = False  # whether the best checkpoint is kept, judged by the metrics of its step
    logical_ranks: int | None = None  # total number, if some ranks have one less than others; None: equal
    parts: Sequence[int] | None = None  # one rank per data-parallel replica, in order; None: each rank is a replica
    logs_first: bool = False  # whether ranks exchange a step's log before its update, so that no process can lose it
    stop_on_nonfinite: bool = True  # whether a NaN or infinite loss ends the run with an error

    def logs(self, step: int) -> bool:
        """Return whether ``step`` is logged; the first and the last step always are."""
        return step % self.log_every == 0 or step in (1, self.steps)

    def find_previous_log(self, step: int) -> int:
        """Return the last logged step before ``step``; 0 if there is none."""
        due = (step - 1) // self.log_every * self.log_every
        return max(due, min(step - 1, 1))

    def may_log(self, step: int) -> bool:
        """Return whether ``step`` may be logged: it is due, or its evaluation may end the run."""
        return self.logs(step) or self.evaluates(step)

    def evaluates(self, step: int) -> bool:
        """Return whether ``step`` is followed by an evaluation; the last step always is."""
        return step == self.steps or _is_due(step, self.evaluate_every)

    def saves_first(self, step: int) -> bool:
        """Return whether ``step`` is saved before it is evaluated.

        Only the last step is, and only without ``keeps_best``. Its evaluation is often the run's first, and an error in
        it must not lose the trained model.
        """
        return step == self.steps and self.saves(step) and not self.keeps_best

    def measures(self, step: int, ranks: int) -> bool:
        """Return whether to measure the time breakdown of ``step``.

        Up to about 50 steps are measured between two logged steps. Each rank sends its measurements to all ``ranks``,
        so large worlds measure fewer steps.
        """
        measured = max(1, min(_MEASURED, _GATHERED // ranks))
        return step % max(1, self.log_every // measured) == 0 or self.logs(step)

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``."""
        return (self.save_at_end and step == self.steps) or _is_due(step, self.save_every)


def _is_due(step: int, every: int) -> bool:
    """Return whether ``step`` is a positive multiple of ``every``; False if ``every`` is 0."""
    return min(step, every) > 0 and step % every == 0


@final
@dataclass(frozen=True)
class TrainingProgress:
    """The number of completed steps, and whether the work due after the last one is done."""

    step: int = 0  # number of completed steps
    skipped: int = 0  # number of completed steps with a skipped update (nonfinite=skip)
    evaluated: bool = True  # whether the evaluation due after the last step is done
    saved: bool = True  # whether the save due after the last step is done
    stopped_early: str | None = None  # why training ended before its last step; None if it did not
    # this process's sums of training metrics since the last logged step, by name: float64 (logical ranks, 2)
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Any = None  # result of LoopCallbacks.share in the last completed step


@final
@dataclass(frozen=True)
class LoopCallbacks:
    """Functions that the loop calls, in the same order on all ranks."""

    evaluate: Callable[[int], Mapping[str, float]]  # returns the metrics after a step, given its number
    emit: Emit  # receives each event
    save: Callable[[TrainingProgress], None] = lambda progress: None  # called when a checkpoint is due
    save_is_due: Callable[[int], bool] = lambda step: False  # in addition to the interval; same result on all ranks
    wishes: Callable[[], Wishes] = Wishes  # returns this rank's requests to the others
    ends_early: Callable[[], str | None] = lambda: None  # returns why the run ends after the evaluations so far
    at: Callable[[str], None] = lambda point: None  # called at points where a fault may be injected
    progressed: Callable[[TrainingProgress], None] = lambda progress: None  # called after a step, evaluation or save
    logged: Callable[[TrainingProgress], None] = lambda progress: None  # called after a step, and after its log if due
    check: Callable[[StepDone], None] = lambda done: None  # called after each log; may raise an error on all ranks
    examine: Callable[[StepDone], None] = lambda done: None  # called between steps; not part of their duration
    # called in each step before its update with this process's sums of training metrics; gathers plain values that
    # every process stores in case others die; None: nothing is stored
    share: Callable[[Mapping[str, Tensor]], Any] | None = None
    before_update: BeforeUpdate = field(default_factory=BeforeUpdate)  # calls the loop inside a replica's step


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
    """Run the steps after ``first`` up to ``config.steps``, and return the progress.

    If any rank requests it or an evaluation triggers it, the run saves and ends earlier, on all ranks after the same
    step. Between logged steps the loop does not wait for the device or for other ranks.

    Args:
        replica: the replica to train.
        batches: the micro-batches of each step, starting with the step after ``first``.
        world: the training ranks.
        config: the length of the run and its intervals.
        callbacks: functions to evaluate, save, stop and report.
        first: the progress of earlier attempts.
        timer: measures the time breakdown of steps; must be open.

    Raises:
        NonfiniteLossError: with ``stop_on_nonfinite``, on every rank, at the first logged step after the loss became
        NaN or infinite.
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
    with callbacks.before_update.register_callback(loop.add_to_window) if config.logs_first else nullcontext():
        return loop.run(iter(batches), first)


@final
class _Loop:
    def __init__(
        self, replica: Replica, config: LoopConfig, callbacks: LoopCallbacks, window: LogWindow, agreement: Agreement
    ) -> None:
        self._replica, self._config, self._callbacks = replica, config, callbacks
        self._window, self._agreement = window, agreement
        self._begun = 0  # last started step
        self._added = 0  # last step with losses added to the window
        self._shared: Any = None  # values of the current step that all processes store
        self._skipped = 0  # number of steps with a skipped update since the start of the run
        self._result: StepResult | None = None  # result of the last step
        self._closed: LoggedStep | None = None  # the current step, if it is logged before its update
        self._logged: Callable[[], StepDone] | None = None  # creates the event of the last logged step, until emitted

    def run(self, source: Iterator[Sequence[MicroBatch]], first: TrainingProgress) -> TrainingProgress:
        config, self._skipped, self._shared = self._config, first.skipped, first.shared
        if not first.saved and config.saves(first.step):
            self._save_checkpoint(first.step, evaluated=first.evaluated)
        if not first.evaluated and config.evaluates(first.step):
            self._evaluate(first.step)
        is_due, reason, saved = False, self._callbacks.ends_early(), first.step
        if reason is not None:
            if config.save_at_end and config.logs_first:  # a save in flight was lost with the previous gang
                self._save_checkpoint(first.step, evaluated=True)
            return TrainingProgress(first.step, self._skipped, stopped_early=reason)
        for step in range(first.step + 1, config.steps + 1):
            try:
                self._run_step(step, source)
            except StopBetweenSteps:
                return self._stop_after(step - 1, saved=saved)
            is_due = config.evaluates(step)
            if is_due and not config.saves_first(step):
                self._evaluate(step)
                is_due = False
                reason = self._callbacks.ends_early() if step < config.steps else None
            agreed = self._agreement.exchange_wishes(step)
            stops = agreed.stop and step < config.steps
            overdue = agreed.save and saved < step - 1  # otherwise the ranks requested it before the last save
            if reason is not None:
                return self._end_early(step, reason)
            if stops:
                self._emit_logged(examine=False)  # after a request to stop, only the save may take time
            if stops or overdue or config.saves(step) or self._callbacks.save_is_due(step):
                self._save_checkpoint(step, evaluated=not is_due)
                saved = step
            if stops:
                return TrainingProgress(step, self._skipped)
        if is_due:
            self._evaluate(config.steps)
        self._emit_logged()
        return TrainingProgress(config.steps, self._skipped)

    def _stop_after(self, step: int, *, saved: int) -> TrainingProgress:
        """End the run after ``step``; save it if ``saved``, the last saved step, is older."""
        self._emit_logged(examine=False)
        if saved < step:
            self._save_checkpoint(step, evaluated=True)
        return TrainingProgress(step, self._skipped)

    def _end_early(self, step: int, reason: str) -> TrainingProgress:
        """Log ``step`` as the last step of the run, and save it if a save is due."""
        config = self._config
        if not config.logs(step):
            self._tell_later(self._close_window(step))
        self._emit_logged(examine=False)
        if config.save_at_end or config.saves(step):
            self._save_checkpoint(step, evaluated=True)
        return TrainingProgress(step, self._skipped, stopped_early=reason)

    def _run_step(self, step: int, source: Iterator[Sequence[MicroBatch]]) -> None:
        window = self._window
        window.fetching()
        micro_batches = next(source)
        window.stepping(measured=self._config.measures(step, window.world.size))
        self._callbacks.at("step:compute")
        self._begun = step
        self._callbacks.before_update.may_log = self._config.may_log(step)
        self._result = result = self._replica.step(micro_batches)
        self._skipped += result.skipped
        if result.overflowed:
            self._callbacks.emit(UpdateOverflowed(step))
        evaluated, saved = not self._config.evaluates(step), not self._config.saves(step)
        progress = TrainingProgress(step, self._skipped, evaluated, saved, shared=self._shared)
        self._callbacks.progressed(progress)
        window.end_step()
        self._emit_logged()  # the previous step's values were gathered during this step
        if self._added != step:
            self.add_to_window(result.losses, result.metrics, occasional=result.occasional)
        if (closed := self._closed) is not None:
            self._closed = None
            self._tell_later(closed)
            if self._config.logs_first:
                self._emit_logged()
        self._callbacks.logged(progress)

    def add_to_window(
        self, losses: Sequence[Tensor], metrics: Mapping[str, Tensor], *, occasional: bool = False
    ) -> None:
        """Add the step's losses and metrics to the window.

        If the step is logged, start gathering its log. With ``logs_first``, this runs before the update, so that no
        rank completes a step whose log may be lost: if a process dies before all ranks have the log, all repeat the
        step; if it dies later, the others have the log.
        """
        self._added = self._begun
        self._window.add_losses(losses, metrics, occasional=occasional)
        if self._config.logs(self._begun):
            self._closed = self._close_window(self._begun)
        if self._callbacks.share is not None:
            self._shared = self._callbacks.share(self._window.get_metric_sums())

    def _close_window(self, step: int) -> LoggedStep:
        self._callbacks.at("log:begin")
        closed = self._window.close(step, self._replica.facts())
        if self._config.logs_first:
            closed = closed.receive_measurements()
            self._callbacks.at("log:end")
        return closed

    def _tell_later(self, closed: LoggedStep) -> None:
        assert self._result is not None
        self._logged = partial(closed.create_event, self._result, self._skipped)

    def _emit_logged(self, *, examine: bool = True) -> None:
        """Emit the event of the last logged step unless already done.

        With ``examine``, all ranks examine the event if more steps follow.
        """
        if self._logged is None:
            return
        done, self._logged = self._logged(), None
        self._agreement.update_interval(done)
        self._callbacks.emit(done)
        self._callbacks.check(done)
        if self._config.stop_on_nonfinite and not math.isfinite(done.loss):
            raise NonfiniteLossError(_explain_nonfinite(done))
        if examine and done.step < self._config.steps:
            with self._window.pause_timing():
                self._callbacks.examine(done)

    def _evaluate(self, step: int) -> None:
        self._emit_logged()
        with self._window.pause_timing():
            self._callbacks.emit(Evaluated(step, self._callbacks.evaluate(step)))
        saved = not self._config.saves(step) or self._config.saves_first(step)
        self._callbacks.progressed(TrainingProgress(step, self._skipped, saved=saved, shared=self._shared))

    def _save_checkpoint(self, step: int, *, evaluated: bool) -> None:
        self._emit_logged()  # the checkpoint includes everything logged so far
        with self._window.pause_timing():
            self._callbacks.save(
                TrainingProgress(step, self._skipped, evaluated, metrics=self._window.get_metric_sums())
            )
        self._callbacks.progressed(TrainingProgress(step, self._skipped, evaluated, shared=self._shared))


def _explain_nonfinite(done: StepDone) -> str:
    return (
        f"the loss is {done.loss} at or before step {done.step}. Lower lr, set clip_norm, or set nonfinite=skip (skips "
        "such steps) or nonfinite=ignore."
    )
