"""Calls the runs of a sweep: returns their values to the sweeper, and summarises their ends."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, final

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from worldsize.config.compose import choices, compose_and_call, is_side_by_side, sweep_points
from worldsize.config.objective import SweepEnd, SweepEnded, Trial, TrialFailedError, is_search, maximizes
from worldsize.core import metric_key, split_of
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.messages import LOGGERS, last_error, printable, refuse, show_messages
from worldsize.record.redaction import redacted_arguments
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import look, read_result
from worldsize.world.processes import PREEMPTED, SIGNALS, die_with_parent
from worldsize.world.scratch import temporary_folder

_WAKING = 0.5  # seconds
_logger = logging.getLogger(__name__)


def call_sweep(
    task: Callable[[DictConfig], Trial],
    arguments: Sequence[str],
    *,
    check: Callable[[DictConfig], object] = lambda cfg: None,
) -> int:
    """Call ``task`` with each configuration, and return its values to the sweeper; return the largest exit code.

    ``check`` raises WorldsizeError for a configuration that cannot run; it is called with all before the first starts.

    A sweep's launcher may pickle the task and call it in other processes, so exit codes are returned through files.
    """
    try:
        _check_all(check, arguments)
    except WorldsizeError as error:
        return refuse(error)
    with temporary_folder() as folder, _idle_children_ended():
        side_by_side = SideBySide(folder) if is_side_by_side(arguments) else None
        ends = SweepEnds(folder)
        sweep = _Sweep(task, ends, side_by_side, typed=arguments)

        def call(cfg: DictConfig) -> float | SweepEnd | None:
            return sweep.call(cfg)

        refused = 0
        try:
            with sweep.side_by_side.passed_on() if sweep.side_by_side else nullcontext():
                compose_and_call(call, arguments)
        except WorldsizeError as error:
            refused = refuse(error)
        except TrialFailedError:
            pass  # the run's own error has been shown
        except Exception:  # the sweeper has no values to compare
            if not sweep.has_no_value():
                ends.show(Console())
                raise
        ends.show(Console())
        return max(refused, *sweep.exit_codes())


def _check_all(check: Callable[[DictConfig], object], arguments: Sequence[str]) -> None:
    """Raise ConfigError if a run of the sweep is refused, or would have the folder of another one."""
    refused, numbers = [], dict[str, int]()
    levels = {logger: logger.level for logger in map(logging.getLogger, LOGGERS)}
    for number, cfg in enumerate(sweep_points(arguments), start=1):
        for logger in levels:
            logger.setLevel(logging.ERROR)  # the runs show their messages themselves
        try:
            check(cfg)
        except WorldsizeError as error:
            refused.append(f"run {number} of the sweep is refused: {error}")
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)
        if cfg.run.name is None or cfg.launch == "show":
            continue
        folder = f"{cfg.run.root}/{choices()['recipe']}/{cfg.run.name}"
        if (first := numbers.setdefault(folder, number)) != number:
            refused.append(f"runs {first} and {number} of the sweep would share {folder}. Leave run.name out.")
    if refused:
        raise ConfigError("\n".join([*refused, "No run was started."]))


@contextmanager
def _idle_children_ended() -> Iterator[None]:
    """Kill the idle processes that a launcher keeps for more runs; they block SIGTERM until a run handles it."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for idle in set(multiprocessing.active_children()) - before:
            if idle.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(idle.pid, signal.SIGKILL)


@final
class _Sweep:
    """Calls ``task``, in this process or in others; with ``side_by_side`` several processes call at once.

    ``typed``: the words of the command, of which the words of a run differ in what the sweep varies.
    """

    def __init__(
        self,
        task: Callable[[DictConfig], Trial],
        ends: SweepEnds,
        side_by_side: SideBySide | None,
        *,
        typed: Sequence[str],
    ) -> None:
        self._task, self._ends, self.side_by_side = task, ends, side_by_side
        self._launching, self._typed = os.getpid(), {word.lstrip("+") for word in typed}

    def call(self, cfg: DictConfig) -> float | SweepEnd | None:
        """Run the next configuration, unless a run was asked to end; return the values for the sweeper.

        Raises:
            SweepEnded: the run was asked to end, and no other run continues in parallel.
            TrialFailedError: the run of a search has no value.
        """
        is_here = os.getpid() == self._launching
        if not is_here:
            show_messages()
            if self.side_by_side is not None:
                self.side_by_side.join()
        if self._is_asked() or any(map(ends_sweep, self._ends.exit_codes())):
            return SweepEnd()  # another process waits for the runs that continue
        label = self._label()
        _logger.info("%s", label)
        trial = self._tried(cfg)
        folder = str(trial.folder) if trial.folder else None
        goal = {"metric": cfg.sweep.metric, "maximize": maximizes(cfg.sweep)}
        self._ends.note(RunEnd(label, trial.exit_code, trial.why, folder, trial.value, is_search(), **goal))
        if ends_sweep(trial.exit_code):
            if is_here:
                raise SweepEnded
            return SweepEnd()
        if trial.exit_code and is_search():
            raise TrialFailedError(f"the run ended with exit code {trial.exit_code}")
        return trial.value

    def _label(self) -> str:
        """Return a line about the run, since many follow each other on a terminal."""
        own = HydraConfig.get()
        varied = [word for word in own.overrides.task if word.lstrip("+") not in self._typed]
        return f"run {own.job.num + 1} of the sweep: {' '.join(redacted_arguments(varied))}"

    def _is_asked(self) -> bool:
        """Return whether the launching process has received a signal, which it forwards."""
        return self.side_by_side is not None and self.side_by_side.is_asked()

    def _tried(self, cfg: DictConfig) -> Trial:
        try:
            return self._task(cfg)
        except WorldsizeError as error:  # Hydra would print a traceback
            return Trial(refuse(error), why=_why(error))
        except Exception as error:
            if not is_search():
                self._ends.note(RunEnd(self._label(), 1, _why(error)))
                raise
            traceback.print_exc()  # the sweeper may continue without showing it
            return Trial(1, why=_why(error))

    def has_no_value(self) -> bool:
        """Return whether the search has no value: none of its runs has completed, or a signal has ended it."""
        return self._is_asked() or self._ends.is_failed_search()

    def exit_codes(self) -> list[int]:
        """Return the exit code of each run, and that of a signal that no run has handled."""
        codes = self._ends.exit_codes()
        if self.side_by_side is not None and not any(map(ends_sweep, codes)):
            codes.append(self.side_by_side.exit_code())
        return codes or [0]


def _why(error: Exception) -> str:
    """Return one line that says why a run failed."""
    return last_error(str(error) or type(error).__name__)


@final
@dataclass(frozen=True)
class RunEnd:
    """The end of one run of a sweep.

    Attributes:
        label: Its number in the sweep and the options that the sweep varies.
        exit_code: Its exit code.
        why: Why it failed or was refused; "": it did not.
        folder: Its folder; None: no process was started.
        value: The metric that the sweep goes by; None: it names none, or the run has not completed.
        of_search: Whether a sweeper goes by the value.
        metric: Name of the metric.
        maximize: Whether a larger value is better.
    """

    label: str
    exit_code: int
    why: str = ""
    folder: str | None = None
    value: float | None = None
    of_search: bool = False
    metric: str | None = None
    maximize: bool = False


@final
class SweepEnds:
    """Records how each run of a sweep ended in ``folder``, where other processes read it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ends"

    def note(self, end: RunEnd) -> None:
        """Add a run, in a single write so that lines of several processes do not mix."""
        with self._file.open("a") as lines:
            lines.write(json.dumps(asdict(end)) + "\n")

    def noted(self) -> list[RunEnd]:
        """Return all runs so far, in the order of their ends."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return [RunEnd(**json.loads(line)) for line in lines]

    def exit_codes(self) -> list[int]:
        """Return the exit codes of all runs so far."""
        return [end.exit_code for end in self.noted()]

    def show(self, console: Console) -> None:
        """Show a summary of the runs, unless none was started here: a scheduler runs them later."""
        ends = self.noted()
        if any(end.folder for end in ends):
            show_ends(console, ends)

    def is_failed_search(self) -> bool:
        """Return whether at least one run of a search has failed and none has completed."""
        codes = [end.exit_code for end in self.noted() if end.of_search]
        return bool(codes) and 0 not in codes


def ends_sweep(code: int) -> bool:
    """Return whether the code means that the run was asked to end, and with it the sweep."""
    return code == PREEMPTED or code > 128


def show_ends(console: Console, ends: Sequence[RunEnd]) -> None:
    """Show how many runs completed, why the others did not, and the best by their metric, a line each."""
    completed = [end for end in ends if not end.exit_code]
    rows = [f"sweep    {len(completed)} of {len(ends)} runs completed"]
    for end in ends:
        if end.exit_code:
            kind = "stopped" if ends_sweep(end.exit_code) else "failed "
            rows.append(f"{kind}  {end.label}: {end.why or 'asked to end'}" + (f"; {end.folder}" if end.folder else ""))
    values = {end.value: end for end in reversed(completed) if end.value is not None and math.isfinite(end.value)}
    if values:
        best = max(values) if ends[0].maximize else min(values)
        rows.append(f"best     {values[best].label}: {ends[0].metric} {best:.4g}; {values[best].folder}")
    for row in rows:
        console.print(printable(row), soft_wrap=True, highlight=False, markup=False, emoji=False)


def end_of(run: RunDirectory, code: int) -> RunEnd:
    """Return how a run of a sweep ended that a job has trained."""
    record = look(run)
    sweep, words = record.manifest["config"]["sweep"], " ".join(record.manifest["overrides"])
    metric, maximize = sweep["metric"], sweep["direction"] == "maximize"
    value = None if code or metric is None else read_result(run)["metrics"].get(metric_key(*split_of(metric)))
    why = record.failure or record.exit_reason or "it never began"
    return RunEnd(words, code, why, str(run.path), value, metric=metric, maximize=maximize)


@final
class SideBySide:
    """Forwards signals from the launching process to those that call the runs, which register in ``folder``.

    Those have their own process groups, since a second signal from Ctrl-C would end a run at once. The launching
    process does not act on signals itself, since joblib would kill the others before they have saved.
    """

    def __init__(self, folder: Path) -> None:
        self._asked, self._processes = folder / "asked", folder / "processes"
        self._processes.mkdir()
        self._launching = os.getpid()

    def join(self) -> None:
        """Register this process, which is about to begin a run; signals are blocked until that run handles them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
            die_with_parent(self._launching)
        (self._processes / str(os.getpid())).touch()

    def is_asked(self) -> bool:
        """Return whether a signal has come, after which no further run begins."""
        return self._asked.exists()

    def exit_code(self) -> int:
        """Return 128 plus the number of the first signal, or 0 if none has come."""
        return 128 + int(self._asked.read_text()) if self.is_asked() else 0

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Forward signals inside the context, without acting on them.

        The kernel may deliver a signal to any thread, but Python handles it in the main thread, which joblib blocks; a
        timer wakes it.
        """
        numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before: dict[int, Any] = {number: signal.signal(number, self._pass_on) for number in numbers}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *_: None)
        timer = signal.setitimer(signal.ITIMER_REAL, _WAKING, _WAKING)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if not self.is_asked():
            self._asked.write_text(str(number))
        for process in self._processes.iterdir():  # a process that has not registered yet checks is_asked() itself
            with suppress(ProcessLookupError):
                os.kill(int(process.name), number)
