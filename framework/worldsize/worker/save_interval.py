"""Chooses when the next checkpoint is due under ``checkpoint.every=auto``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.config.settings import Settings
from worldsize.core import Emit, SaveIntervalChanged
from worldsize.plan.finish import chosen_seconds, longest_seconds, mtbf_seconds
from worldsize.record.attempt import Attempt
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import view

_FIRST = 10  # steps before the first save of a run whose failures are declared, or that has failed
_NEVER = 2**62  # steps before that of other runs: they save once it is overdue
_GROWTH = 4  # largest factor between two intervals, since the first costs and steps are not typical
_REMEMBERED = 8  # saves whose mean cost counts
_CHANGED = 1.5  # factor from which a new interval is told


@final
class SaveInterval:
    """The interval between two saves with which saves and lost steps together cost least, at most ten minutes.

    What a save costs is measured on every rank. Before each save the ranks agree on the interval that follows it, from
    the largest of their figures. It is longer than ten minutes if saves would take more than 1 % of the time.

    Args:
        group: A group of the ranks that save, in which nothing else is in flight when :meth:`agree` is called (None:
            one process).
        mtbf: Returns the expected seconds between two failures, given the failures and the seconds of the run so far.
        emit: Takes the event of a changed interval.
        failures: Failures of the run before this attempt; it is enough that one rank knows them.
        seconds: Duration of the run before this attempt; it is enough that one rank knows it.
        declared: Whether the time between failures was declared. Without it, and until the run has failed, the first
            save waits until it is overdue, so that short runs save only at their end.
        clock: Returns seconds.
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
        self._newest = (0, clock())  # step and time of the newest save, or those at which the attempt began
        self._complete = (*self._newest, self.steps)  # the same of the newest complete one, and the steps after it

    def resume(self, step: int, facts: Mapping[str, Any]) -> None:
        """Go on after ``step`` with what a checkpoint recorded, or a gang before; with neither, begin anew.

        All ranks call it. The interval is shortened if failures since then are reason to.
        """
        self._newest = (int(facts.get("newest", step)), self._clock() - float(facts.get("since", 0.0)))
        if facts:
            self.steps = self._told = int(facts["steps"])
            self._costs.recall(float(facts["save_seconds"]), float(facts["step_seconds"]))
        self._choose(step)
        self._complete = (*self._newest, self.steps)

    def handed_on(self) -> dict[str, Any]:
        """Return what a gang with other members goes on with: the newest save, the interval and its costs so far.

        A save that is in flight does not count: with a member it may have lost its part, and then is due again.
        """
        newest, saved_at, steps = self._complete
        cost, step_seconds = self._costs.mean(), self._costs.step_seconds
        times = {"since": self._clock() - saved_at, "save_seconds": cost, "step_seconds": step_seconds}
        return {"newest": newest, "steps": steps, **times}

    def facts(self) -> dict[str, Any]:
        """Return the interval, the mean cost of a save and the seconds of a step, once all of them are known."""
        cost, step_seconds = self._costs.mean(), self._costs.step_seconds
        return (
            {"steps": self.steps, "save_seconds": cost, "step_seconds": step_seconds} if cost and step_seconds else {}
        )

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after ``step``."""
        return step - self._newest[0] >= self.steps

    def is_overdue(self) -> bool:
        """Return whether this rank finds that the next save is overdue; it follows once all ranks do."""
        return self._clock() - self._newest[1] >= longest_seconds(self._costs.mean())

    def begin_step(self, *, in_flight: bool) -> None:
        """Count the step that has ended, and note that the next one begins while a save is, or is not, in flight."""
        self._costs.begin_step(in_flight=in_flight)

    def uncounted(self) -> AbstractContextManager[None]:
        """Return a context whose duration is no part of a step, such as an evaluation's."""
        return self._costs.uncounted()

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Measure how long the save of ``step`` holds up training."""
        began = self._clock()
        with self._costs.saving():
            yield
        self._newest = (step, began)

    def complete(self, step: int) -> None:
        """Record that the save of ``step`` is complete."""
        if step == self._newest[0]:
            self._complete = (*self._newest, self.steps)

    def agree(self, step: int) -> None:
        """Choose, with all ranks, the steps from this save, of ``step``, to the next one."""
        self._costs.end_interval()
        self.steps *= _GROWTH
        self._choose(step)

    def _choose(self, step: int) -> None:
        """Choose the best interval of at most the present steps, with all ranks."""
        mine = (self._costs.mean(), self._costs.step_seconds, self._failures, self._clock() - self._start)
        figures = torch.tensor(mine, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=self._group)
        cost, step_seconds, failures, seconds = figures.tolist()
        if not (cost and step_seconds):  # nothing was saved yet
            self.steps = min(self.steps, _FIRST) if failures else self.steps
            return
        mtbf = self._mtbf(int(failures), seconds)
        chosen = chosen_seconds(cost, mtbf, is_expected=self._declared or failures > 0)
        self.steps = max(1, min(self.steps, round(chosen / step_seconds)))
        if not 1 / _CHANGED < self.steps / self._told < _CHANGED:
            self._told = self.steps
            self._emit(SaveIntervalChanged(step, self.steps, self.steps * step_seconds, save_seconds=cost, mtbf=mtbf))


def save_interval(settings: Settings, run: RunDirectory, group: ProcessGroup | None, *, emit: Emit) -> SaveInterval:
    """Return the rule for the saves of an attempt, with what the run's record says of earlier ones."""
    cluster, attempts = settings.cluster, view(run.path).attempts
    return SaveInterval(
        group,
        lambda failures, seconds: mtbf_seconds(cluster.mtbf_hours, cluster.nodes, failures=failures, seconds=seconds),
        emit=emit,
        failures=sum(map(_is_failure, attempts)),
        declared=cluster.mtbf_hours is not None,
        seconds=sum(max(end - each["start_at"], 0.0) for each in attempts if (end := each["end_at"]) is not None),
    )


def _is_failure(attempt: Attempt) -> bool:
    """Whether it failed after its first step, or was killed: the record of the latter does not say when."""
    reason = attempt["exit_reason"]
    return reason == "killed" or (reason == "failed" and attempt["first_step_at"] is not None)


@final
class _SaveCosts:
    """Measures what saves cost: for how long they hold up training, and how much slower they make other steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.step_seconds = 0.0  # mean of a step while no save is in flight; 0: not known yet
        self._saves: deque[float] = deque(maxlen=_REMEMBERED)
        self._quiet, self._busy = _Steps(), _Steps()  # while no save is in flight, and while one is
        self._in_flight = False
        self._began: float | None = None  # time at which the step in progress began; None: none has begun
        self._is_warm = False  # whether a step has ended: the first one is slower than all others

    def recall(self, save_seconds: float, step_seconds: float) -> None:
        """Begin with the figures of an earlier attempt."""
        if save_seconds:
            self._saves.append(save_seconds)
        self.step_seconds = step_seconds

    def mean(self) -> float:
        """Return the mean cost of the newest saves, in seconds; 0: nothing was saved yet."""
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
    def uncounted(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            if self._began is not None:
                self._began += self._clock() - began

    @contextmanager
    def saving(self) -> Iterator[None]:
        began = self._clock()
        with self.uncounted():
            yield
        self._saves.append(self._clock() - began)

    def end_interval(self) -> None:
        """Take the steps since the last save for the usual ones from now on."""
        if self._quiet.number:
            self.step_seconds = self._quiet.mean()
            self._quiet = _Steps()

    def _count_slower_steps(self) -> None:
        """Add to the cost of the newest save the time by which steps were slower while it was written."""
        usual = self._quiet.mean() if self._quiet.number else self.step_seconds
        if usual and self._saves:
            self._saves[-1] += max(0.0, self._busy.seconds - self._busy.number * usual)
        self._busy = _Steps()


@final
class _Steps:
    def __init__(self) -> None:
        self.number, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        self.number, self.seconds = self.number + 1, self.seconds + seconds

    def mean(self) -> float:
        return self.seconds / self.number
