"""Chooses the interval between checkpoints for ``checkpoint.every=auto``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.core import Cluster, Emit, SaveIntervalChanged
from worldsize.plan.finish import choose_save_interval, longest_seconds, mtbf_seconds
from worldsize.record.attempt import Attempt
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import read_run

_FIRST = 10  # steps before the first save, if the run has failed or its failure rate is declared
_NEVER = 2**62  # used by other runs, which save only when a save is overdue
_GROWTH = 4  # maximum factor between two intervals, since the first costs and steps are not typical
_REMEMBERED = 8  # number of newest saves in the mean cost
_CHANGED = 1.5  # minimum change of the interval, as a factor, for an event


@final
class SaveInterval:
    """The save interval that minimizes the cost of saves and lost steps.

    Every rank measures the cost of a save. Before each save, the ranks agree on the next interval, based on the largest
    measurements of any rank. The interval only exceeds ten minutes if saves would otherwise take more than 1 % of the
    time.

    Args:
        group: Group of the saving ranks, without other work in flight when :meth:`agree` is called; None: one process.
        mtbf: Returns the expected seconds between two failures, given the failures and the seconds of the run so far.
        emit: Receives the event when the interval changes.
        failures: Number of failures of the run before this attempt; only one rank needs it.
        seconds: Duration of the run before this attempt; only one rank needs it.
        declared: Whether the time between failures was declared. Otherwise, and until the run has failed, the first
            save waits until it is overdue, so that short runs save only at their end.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        mtbf: Callable[[int, float], float],
        *,
        emit: Callable[[SaveIntervalChanged], None],
        failures: int = 0,
        seconds: float = 0.0,
        declared: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._group, self._mtbf, self._emit, self._clock = group, mtbf, emit, clock
        self._failures, self._start, self._declared = failures, clock() - seconds, declared
        self._costs = _SaveCosts(clock)
        self.steps = self._told = _FIRST if declared else _NEVER
        self._newest = (0, clock())  # step and time of the newest save, or of the start of the attempt
        self._complete = (*self._newest, self.steps)  # the same for the newest complete save, and the next interval

    def resume(self, step: int, facts: Mapping[str, Any]) -> None:
        """Continue after ``step`` with the facts of a checkpoint or a previous gang, if any.

        All ranks must call it. The interval is shortened if failures since then justify it.
        """
        self._newest = (int(facts.get("newest", step)), self._clock() - float(facts.get("since", 0.0)))
        if facts:
            self.steps = self._told = int(facts["steps"])
            self._costs.restore_costs(float(facts["save_seconds"]), float(facts["step_seconds"]))
        self._choose_interval(step)
        self._complete = (*self._newest, self.steps)

    def export_facts(self) -> dict[str, Any]:
        """Return the newest save, the interval and the costs so far, for the next membership.

        A save in flight does not count: it may be lost with a member, and would then be due again.
        """
        newest, saved_at, steps = self._complete
        cost, step_seconds = self._costs.compute_mean_cost(), self._costs.step_seconds
        times = {"since": self._clock() - saved_at, "save_seconds": cost, "step_seconds": step_seconds}
        return {"newest": newest, "steps": steps, **times}

    def facts(self) -> dict[str, Any]:
        """Return interval, mean save cost and seconds per step as facts; empty until all are known."""
        cost, step_seconds = self._costs.compute_mean_cost(), self._costs.step_seconds
        return (
            {"steps": self.steps, "save_seconds": cost, "step_seconds": step_seconds} if cost and step_seconds else {}
        )

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after ``step``."""
        return step - self._newest[0] >= self.steps

    def is_overdue(self) -> bool:
        """Return whether the next save is overdue on this rank.

        The run saves once the save is overdue on all ranks.
        """
        return self._clock() - self._newest[1] >= longest_seconds(self._costs.compute_mean_cost())

    def begin_step(self, *, in_flight: bool) -> None:
        """Record the previous step's duration, and whether a save is in flight during the next."""
        self._costs.begin_step(in_flight=in_flight)

    def exclude_step_time(self) -> AbstractContextManager[None]:
        """Return a context for work, such as an evaluation, that does not count as step time."""
        return self._costs.exclude_time()

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Measure how long the save of ``step`` delays training."""
        began = self._clock()
        with self._costs.measure_save():
            yield
        self._newest = (step, began)

    def complete(self, step: int) -> None:
        """Record that the save of ``step`` is complete."""
        if step == self._newest[0]:
            self._complete = (*self._newest, self.steps)

    def agree(self, step: int) -> None:
        """Choose, together with all ranks, the number of steps from ``step`` to the next save."""
        self._costs.end_interval()
        self.steps *= _GROWTH
        self._choose_interval(step)

    def _choose_interval(self, step: int) -> None:
        """Choose the best interval, together with all ranks, up to the current number of steps."""
        mine = (self._costs.compute_mean_cost(), self._costs.step_seconds, self._failures, self._clock() - self._start)
        figures = torch.tensor(mine, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=self._group)
        cost, step_seconds, failures, seconds = figures.tolist()
        if not (cost and step_seconds):  # no save yet
            self.steps = min(self.steps, _FIRST) if failures else self.steps
            return
        mtbf = self._mtbf(int(failures), seconds)
        chosen = choose_save_interval(cost, mtbf, is_expected=self._declared or failures > 0)
        self.steps = max(1, min(self.steps, round(chosen / step_seconds)))
        if not 1 / _CHANGED < self.steps / self._told < _CHANGED:
            self._told = self.steps
            self._emit(SaveIntervalChanged(step, self.steps, self.steps * step_seconds, save_seconds=cost, mtbf=mtbf))


def save_interval(cluster: Cluster, run: RunDirectory, group: ProcessGroup | None, *, emit: Emit) -> SaveInterval:
    """Return the save interval of an attempt, based on the earlier attempts in the record."""
    attempts = read_run(run.path).attempts
    return SaveInterval(
        group,
        lambda failures, seconds: mtbf_seconds(cluster.mtbf_hours, cluster.nodes, failures=failures, seconds=seconds),
        emit=emit,
        failures=sum(map(_is_failure, attempts)),
        declared=cluster.mtbf_hours is not None,
        seconds=sum(max(end - each["start_at"], 0.0) for each in attempts if (end := each["end_at"]) is not None),
    )


def _is_failure(attempt: Attempt) -> bool:
    """Return whether an attempt was killed, or failed after its first step.

    The record of a killed attempt lacks the time of the first step.
    """
    reason = attempt["exit_reason"]
    return reason == "killed" or (reason == "failed" and attempt["first_step_at"] is not None)


@final
class _SaveCosts:
    """Measures the cost of saves: their delay of training, and the slowdown of other steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.step_seconds = 0.0  # mean duration of a step without a save in flight; 0 if not known yet
        self._saves: deque[float] = deque(maxlen=_REMEMBERED)
        self._quiet, self._busy = _Steps(), _Steps()  # steps without and with a save in flight
        self._in_flight = False
        self._began: float | None = None  # start time of the step in progress; None before the first step
        self._is_warm = False  # whether the first step, which is slower than others, has ended

    def restore_costs(self, save_seconds: float, step_seconds: float) -> None:
        """Use the measurements of an earlier attempt as initial values."""
        if save_seconds:
            self._saves.append(save_seconds)
        self.step_seconds = step_seconds

    def compute_mean_cost(self) -> float:
        """Return the mean cost of the newest saves, in seconds; 0 before the first save."""
        return sum(self._saves) / len(self._saves) if self._saves else 0.0

    def begin_step(self, *, in_flight: bool) -> None:
        now = self._clock()
        if self._began is not None and self._is_warm:
            (self._busy if self._in_flight else self._quiet).add(now - self._began)
        self._is_warm = self._began is not None
        if self._in_flight and not in_flight:
            self._count_slower_steps()
        self._began, self._in_flight = now, in_flight

    @contextmanager
    def exclude_time(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            if self._began is not None:
                self._began += self._clock() - began

    @contextmanager
    def measure_save(self) -> Iterator[None]:
        began = self._clock()
        with self.exclude_time():
            yield
        self._saves.append(self._clock() - began)

    def end_interval(self) -> None:
        """Use the steps since the last save as the baseline for the next interval."""
        if self._quiet.number:
            self.step_seconds = self._quiet.compute_mean()
            self._quiet = _Steps()

    def _count_slower_steps(self) -> None:
        """Add the slowdown of steps during the newest save to its cost."""
        usual = self._quiet.compute_mean() if self._quiet.number else self.step_seconds
        if usual and self._saves:
            self._saves[-1] += max(0.0, self._busy.seconds - self._busy.number * usual)
        self._busy = _Steps()


@final
class _Steps:
    def __init__(self) -> None:
        self.number, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        self.number, self.seconds = self.number + 1, self.seconds + seconds

    def compute_mean(self) -> float:
        return self.seconds / self.number
