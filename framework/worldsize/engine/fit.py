"""The training loop: it steps a replica, and emits an event for whatever happens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from worldsize.collectives.exact import gather
from worldsize.collectives.step_timer import PHASES, StepTimer
from worldsize.core import (
    Emit,
    Evaluated,
    MicroBatch,
    NonfiniteLossError,
    Replica,
    StepDone,
    StepResult,
    World,
)
from worldsize.data.loader import Order
from worldsize.engine.agreement import Agreement

_MEASURED = 50  # steps that are measured between two logged ones, at most


@dataclass(frozen=True)
class Intervals:
    """The steps of a run, and how often it logs, evaluates and saves."""

    steps: int  # of the whole run
    log_every: int = 10
    evaluate_every: int = 0  # 0: only at the end
    save_every: int = 0  # 0: never, except where the next field says so
    save_at_end: bool = False
    keeps_best: bool = False  # checkpoints are kept by the metrics of their step

    def logs(self, step: int) -> bool:
        """Tell whether ``step`` is logged; the first and the last one always are."""
        return step % self.log_every == 0 or step in (1, self.steps)

    def evaluates(self, step: int) -> bool:
        """Tell whether ``step`` is followed by an evaluation; the last one always is."""
        return step == self.steps or (self.evaluate_every > 0 and step % self.evaluate_every == 0)

    def saves_first(self, step: int) -> bool:
        """Tell whether ``step`` saves before it evaluates.

        The last one does: its evaluation is often the first, and if that fails, no training is lost.
        """
        return step == self.steps and self.saves(step) and not self.keeps_best

    def measures(self, step: int) -> bool:
        """Tell whether the time of ``step`` is split: that of about 50 steps between two logged ones.

        Not of more, since each rank sends its splits to the others.
        """
        return step % max(1, self.log_every // _MEASURED) == 0 or self.logs(step)

    def saves(self, step: int) -> bool:
        """Tell whether ``step`` is followed by a checkpoint."""
        return (self.save_at_end and step == self.steps) or (self.save_every > 0 and step % self.save_every == 0)


@dataclass(frozen=True)
class TrainingProgress:
    """The steps that training has behind it."""

    step: int = 0  # steps taken
    skipped: int = 0  # of these, steps whose update was left out (nonfinite=skip)
    evaluated: bool = True  # whether the evaluation that is due after the last step has been done


@dataclass(frozen=True)
class LoopCallbacks:
    """Functions that the loop calls, in the same order on all ranks."""

    evaluate: Callable[[], Mapping[str, float]]  # returns the metrics
    emit: Emit  # takes each event
    save: Callable[[TrainingProgress], None] = lambda progress: None  # when a checkpoint is due
    wants_stop: Callable[[], bool] = lambda: False  # tells whether this rank wants the run to end
    begins: Callable[[], None] = lambda: None  # when a step has its data
    examine: Callable[[StepDone], None] = lambda done: None  # between two steps, whose time does not include it


def fit(
    replica: Replica,
    batches: Iterable[Sequence[MicroBatch]],
    world: World,
    *,
    order: Order,
    intervals: Intervals,
    callbacks: LoopCallbacks,
    first: TrainingProgress = TrainingProgress(),
    stop_on_nonfinite: bool = True,
    timer: StepTimer | None = None,
) -> TrainingProgress:
    """Run the steps after ``first`` up to ``intervals.steps``, and return how far they came.

    The run ends earlier, on all ranks after the same step and with a save, once any rank wants to stop. Nothing here
    waits for the device or for other ranks between logged steps.

    Args:
        batches: the micro-batches of each step, beginning with the step after ``first``.
        order: the data order, which knows how many samples a step has.
        timer: splits the time of steps; it has to be open.

    Raises:
        NonfiniteLossError: on every rank alike, at the first logged step after the loss became NaN or infinite.
    """
    window = _Window(world, order, timer, skipped=first.skipped)
    return _Loop(replica, world, intervals, callbacks, window, stop_on_nonfinite).run(iter(batches), first)


@final
class _Loop:
    def __init__(
        self,
        replica: Replica,
        world: World,
        intervals: Intervals,
        callbacks: LoopCallbacks,
        window: _Window,
        stop_on_nonfinite: bool,
    ) -> None:
        self._replica, self._intervals, self._callbacks, self._window = replica, intervals, callbacks, window
        self._stop_on_nonfinite = stop_on_nonfinite
        self._agreement = Agreement(world, callbacks.wants_stop, steps=intervals.steps)
        self._closed: list[Callable[[], StepDone]] = []  # at most one: finishes the window of the last logged step

    def run(self, source: Iterator[Sequence[MicroBatch]], first: TrainingProgress) -> TrainingProgress:
        intervals, window = self._intervals, self._window
        if not first.evaluated and intervals.evaluates(first.step):
            self._evaluate(first.step)
        is_due = False
        for step in range(first.step + 1, intervals.steps + 1):
            self._step(step, source)
            is_due = intervals.evaluates(step)
            if is_due and not intervals.saves_first(step):
                self._evaluate(step)
                is_due = False
            stops = self._agreement.reached(step) and step < intervals.steps
            if stops or intervals.saves(step):
                self._save(step, evaluated=not is_due)
            if stops:
                return TrainingProgress(step, window.skipped)
        if is_due:
            self._evaluate(intervals.steps)
        self._tell()
        return TrainingProgress(intervals.steps, window.skipped)

    def _step(self, step: int, source: Iterator[Sequence[MicroBatch]]) -> None:
        window = self._window
        window.fetching()
        micro_batches = next(source)
        window.stepping(measured=self._intervals.measures(step))
        self._callbacks.begins()
        window.add(self._replica.step(micro_batches))
        window.stepped()
        for done in self._tell():  # of the step before, whose figures have crossed the network during this one
            with window.paused():
                self._callbacks.examine(done)
        if self._intervals.logs(step):
            self._closed.append(window.close(step, self._replica.facts()))

    def _tell(self) -> list[StepDone]:
        told = [close() for close in self._closed]
        self._closed = []
        for done in told:
            self._agreement.tell(done)
            self._callbacks.emit(done)
            if self._stop_on_nonfinite and not math.isfinite(done.loss):
                raise NonfiniteLossError(_explain(done))
        return told

    def _evaluate(self, step: int) -> None:
        self._tell()
        with self._window.paused():
            self._callbacks.emit(Evaluated(step, self._callbacks.evaluate()))

    def _save(self, step: int, *, evaluated: bool) -> None:
        self._tell()  # what is logged up to here belongs to the checkpoint
        with self._window.paused():
            self._callbacks.save(TrainingProgress(step, self._window.skipped, evaluated))


def _explain(done: StepDone) -> str:
    return (
        f"the loss is {done.loss} at or before step {done.step}. Lower lr, set clip_norm, or choose "
        "nonfinite=skip (leave such steps out) or nonfinite=ignore."
    )


@dataclass
class _Window:
    """The steps since the last logged one: their losses and where their time went."""

    world: World
    order: Order
    timer: StepTimer | None
    results: list[StepResult] = field(default_factory=list)
    skipped: int = 0  # since the run began
    waited: float = 0.0  # seconds, for data
    mark: float = 0.0  # when the step began to wait for its data
    opened: float = field(default_factory=time.perf_counter)

    def fetching(self) -> None:
        self.mark = time.perf_counter()

    def stepping(self, *, measured: bool) -> None:
        seconds = time.perf_counter() - self.mark
        self.waited += seconds
        if self.timer and measured:
            self.timer.start(data=seconds)

    def stepped(self) -> None:
        if self.timer:
            self.timer.end()

    def add(self, result: StepResult) -> None:
        self.results.append(result)
        self.skipped += result.skipped

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time inside the context in no step: it is not training."""
        begun = time.perf_counter()
        yield
        self.opened += time.perf_counter() - begun

    def close(self, step: int, facts: Mapping[str, Any]) -> Callable[[], StepDone]:
        """Begin to gather the window's figures from all ranks, and open the next window.

        The result waits for the other ranks and returns the event of the window's last step.
        """
        elapsed = time.perf_counter() - self.opened
        steps = len(self.results)
        splits_s4 = self.timer.take() if self.timer else torch.empty(0, _PARTS, dtype=torch.float64)
        times = torch.tensor([(elapsed - self.waited) / steps, elapsed / steps], dtype=torch.float64)
        losses = torch.stack([loss for result in self.results for loss in result.losses]).double()
        flat = torch.cat([torch.cat([splits_s4.flatten(), times]).to(losses.device), losses])
        finish = partial(
            _step_done,
            step,
            self,
            self.results,
            gather(flat, self.world),
            measured=len(splits_s4),
            skipped=self.skipped,
            waited=self.waited,
            facts=facts,
        )
        self.results, self.waited, self.opened = [], 0.0, time.perf_counter()
        return finish


_PARTS = 1 + len(PHASES)
_COMMUNICATION = 1 + PHASES.index("communication")


def _step_done(
    step: int,
    window: _Window,
    results: Sequence[StepResult],
    parts: Callable[[], Tensor],
    *,
    measured: int,
    skipped: int,
    waited: float,
    facts: Mapping[str, Any],
) -> StepDone:
    """Make the event of a window's last step from the figures of all ranks.

    ``parts()`` is float64 [ranks, n]. A row has the splits of the ``measured`` steps, the mean time of a step without
    and with the wait for data, and the losses.
    """
    splits_pn, times_p2, losses_pn = torch.split(gathered := parts(), _sizes(gathered, measured), dim=1)
    splits_ps4 = splits_pn.view(len(gathered), measured, _PARTS)
    losses_psl = losses_pn.view(len(gathered), len(results), -1)
    world, last, batch_size = window.world, results[-1], window.order.batch_size
    means_p4 = splits_ps4.mean(1)
    compute, communication, update = means_p4[world.rank].tolist()[1:] if measured else [None] * 3
    return StepDone(
        step=step,
        samples=step * batch_size,
        loss=_logged_loss(losses_psl.transpose(0, 1).flatten(1)),
        lr=last.lr,
        grad_norm=None if last.grad_norm is None else float(last.grad_norm),
        skipped=skipped,
        data_seconds=waited / len(results),
        step_seconds=tuple(times_p2[:, 0].tolist()),
        samples_per_second=batch_size / float(times_p2[:, 1].max()),
        facts=facts,
        compute_seconds=compute,
        communication_seconds=communication,
        update_seconds=update,
        exposed_seconds=float(means_p4[:, _COMMUNICATION].min()) if measured else None,
        splits=splits_ps4.tolist() if measured and world.rank == 0 else (),
    )


def _sizes(gathered: Tensor, measured: int) -> list[int]:
    return [measured * _PARTS, 2, gathered.shape[1] - measured * _PARTS - 2]


def _logged_loss(losses_sl: Tensor) -> float:
    """Return the first mean loss of the window that is NaN or infinite; if there is none, that of the last step."""
    means = [math.fsum(row) / len(row) if all(map(math.isfinite, row)) else sum(row) for row in losses_sl.tolist()]
    return next((mean for mean in means if not math.isfinite(mean)), means[-1])
