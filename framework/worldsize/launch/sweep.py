"""Executes a sweep's runs, returns values to the sweeper, and summarizes outcomes."""

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
from rich.cells import cell_len
from rich.console import Console

from worldsize.config.arguments import parse_override_key
from worldsize.config.compose import compose_and_call, is_side_by_side, read_group_choices, sweep_folder, sweep_points
from worldsize.config.objective import SweepEnd, SweepEnded, Trial, TrialFailedError, is_search, maximizes
from worldsize.core import metric_key, parse_metric_key
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.restarts import command_line
from worldsize.messages import LOGGERS, last_error, printable, report_error, show_messages
from worldsize.record.redaction import redact_arguments
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import read_result, refresh_run
from worldsize.world.processes import PREEMPTED, SIGNALS, die_with_parent
from worldsize.world.scratch import temporary_folder

_WAKING = 0.5  # seconds between two alarms that wake the main thread
_logger = logging.getLogger(__name__)


def call_sweep(
    task: Callable[[DictConfig], Trial],
    arguments: Sequence[str],
    *,
    check: Callable[[DictConfig], object] = lambda cfg: None,
) -> int:
    """Call ``task`` with each configuration of a sweep; return the largest exit code.

    The sweeper receives the values that ``task`` returns. Before the first run, ``check`` is called with each
    configuration; it raises WorldsizeError for one that cannot run.

    Hydra's launcher may pickle the task and call it in other processes, so exit codes are returned through files.
    """
    try:
        _check_all(check, arguments)
    except WorldsizeError as error:
        return report_error(error)
    with temporary_folder() as folder, _idle_children_ended():
        side_by_side = SideBySide(folder) if is_side_by_side(arguments) else None
        ends = SweepEnds(folder)
        sweep = _Sweep(task, ends, side_by_side, typed=arguments)

        def call_trial(cfg: DictConfig) -> float | SweepEnd | None:
            return sweep.run_trial(cfg)

        refused = 0
        try:
            with sweep.side_by_side.forward_signals() if sweep.side_by_side else nullcontext():
                compose_and_call(call_trial, arguments)
        except WorldsizeError as error:
            refused = report_error(error)
        except TrialFailedError:
            pass  # the run's own error has been shown
        except Exception:  # expected if the sweeper lacks values to compare
            if not sweep.has_no_value():
                ends.show_summary(Console())
                raise
        ends.show_summary(Console())
        return max(refused, *sweep.exit_codes())


def _check_all(check: Callable[[DictConfig], object], arguments: Sequence[str]) -> None:
    """Raise ConfigError if a run of the sweep is refused or two runs would share a folder."""
    refused, numbers = [], dict[str, int]()
    levels = {logger: logger.level for logger in map(logging.getLogger, LOGGERS)}
    for number, cfg in enumerate(sweep_points(arguments), start=1):
        for logger in levels:
            logger.setLevel(logging.ERROR)  # each run shows its messages later
        try:
            check(cfg)
        except WorldsizeError as error:
            refused.append(f"run {number} of the sweep is invalid: {error}")
        finally:
            for logger, level in levels.items():
                logger.setLevel(level)
        if cfg.run.name is None or cfg.launch == "show":
            continue
        folder = f"{cfg.run.root}/{read_group_choices()['recipe']}/{cfg.run.name}"
        if (first := numbers.setdefault(folder, number)) != number:
            refused.append(f"runs {first} and {number} of the sweep would share the folder {folder}. Remove run.name.")
    if refused:
        raise ConfigError("\n".join([*refused, "No run was started."]))


@contextmanager
def _idle_children_ended() -> Iterator[None]:
    """On exit, kill the idle processes of Hydra's launcher, which block SIGTERM."""
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
    """Runs the configurations of a sweep with ``task``.

    With ``side_by_side``, several processes run them concurrently. ``typed`` are the command's arguments; the sweep
    varies a run's other overrides.
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

    def run_trial(self, cfg: DictConfig) -> float | SweepEnd | None:
        """Run the next configuration unless signaled; return the value for the sweeper.

        Raises:
            SweepEnded: a signal ended a run in the launching process.
            TrialFailedError: a run of a search failed, so it does not have a value.
        """
        is_here = os.getpid() == self._launching
        if not is_here:
            show_messages()
            if self.side_by_side is not None:
                self.side_by_side.register_process()
        if self._is_asked() or any(map(ends_sweep, self._ends.exit_codes())):
            return SweepEnd()  # another process waits for the runs in progress
        number, words = self._position()
        _logger.info("%s", _format_label(number, words))
        trial = self._try_task(cfg)
        folder = str(trial.folder) if trial.folder else None
        goal = {"metric": cfg.sweep.metric, "maximize": maximizes(cfg.sweep), "group": cfg.run.group or sweep_folder()}
        self._ends.record_end(
            RunEnd(number, words, trial.exit_code, trial.why, folder, trial.value, is_search(), **goal)
        )
        if ends_sweep(trial.exit_code):
            if is_here:
                raise SweepEnded
            return SweepEnd()
        if trial.exit_code and is_search():
            raise TrialFailedError(f"the run ended with exit code {trial.exit_code}")
        return trial.value

    def _position(self) -> tuple[int, list[str]]:
        """Return the run's number, from 1, and the overrides that the sweep varies."""
        own = HydraConfig.get()
        varied = [word for word in own.overrides.task if word.lstrip("+") not in self._typed]
        return own.job.num + 1, redact_arguments(varied)

    def _is_asked(self) -> bool:
        """Return whether the launching process has received and forwarded a signal."""
        return self.side_by_side is not None and self.side_by_side.is_asked()

    def _try_task(self, cfg: DictConfig) -> Trial:
        try:
            return self._task(cfg)
        except WorldsizeError as error:  # Hydra would print a traceback
            return Trial(report_error(error), why=_format_reason(error))
        except Exception as error:
            if not is_search():
                self._ends.record_end(RunEnd(*self._position(), 1, _format_reason(error)))
                raise
            traceback.print_exc()  # the sweeper may not show the error
            return Trial(1, why=_format_reason(error))

    def has_no_value(self) -> bool:
        """Return whether a search lacks values because all its runs failed or a signal ended it."""
        return self._is_asked() or self._ends.is_failed_search()

    def exit_codes(self) -> list[int]:
        """Return each run's exit code, and one for a received signal if no run has reported it."""
        codes = self._ends.exit_codes()
        if self.side_by_side is not None and not any(map(ends_sweep, codes)):
            codes.append(self.side_by_side.exit_code())
        return codes or [0]


def _format_reason(error: Exception) -> str:
    """Format an error as a one-line reason for a run's failure."""
    return last_error(str(error) or type(error).__name__)


@final
@dataclass(frozen=True)
class RunEnd:
    """Outcome of one run of a sweep.

    Attributes:
        number: Number of the run in the sweep, from 1.
        words: Overrides that the sweep varies.
        exit_code: Exit code of the run.
        why: Reason why the run failed or was refused; "" if it completed.
        folder: Run folder; None if the run was refused.
        value: Value of the sweep's metric; None if the sweep has no metric or the run did not complete.
        of_search: Whether a sweeper uses the value.
        metric: Name of the sweep's metric.
        maximize: Whether larger values are better.
        group: Group of the runs; by default the sweep's folder.
    """

    number: int
    words: Sequence[str]
    exit_code: int
    why: str = ""
    folder: str | None = None
    value: float | None = None
    of_search: bool = False
    metric: str | None = None
    maximize: bool = False
    group: str | None = None


@final
class SweepEnds:
    """Outcomes of a sweep's runs, recorded in ``folder`` for all its processes."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ends"

    def record_end(self, end: RunEnd) -> None:
        """Append a run's outcome in a single write, so that lines from several processes do not mix."""
        with self._file.open("a") as lines:
            lines.write(json.dumps(asdict(end)) + "\n")

    def read_ends(self) -> list[RunEnd]:
        """Return all outcomes so far, sorted by run number, since parallel runs end in any order."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return sorted((RunEnd(**json.loads(line)) for line in lines), key=lambda end: end.number)

    def exit_codes(self) -> list[int]:
        """Return the exit codes of all runs so far."""
        return [end.exit_code for end in self.read_ends()]

    def show_summary(self, console: Console) -> None:
        """Show a summary of the runs if any of them ran here rather than in a scheduler."""
        ends = self.read_ends()
        if any(end.folder for end in ends):
            show_ends(console, ends)

    def is_failed_search(self) -> bool:
        """Return whether all runs of a search so far have failed."""
        codes = [end.exit_code for end in self.read_ends() if end.of_search]
        return bool(codes) and 0 not in codes


def ends_sweep(code: int) -> bool:
    """Return whether an exit code means that a signal ended the run, and so the sweep."""
    return code == PREEMPTED or code > 128


def show_ends(console: Console, ends: Sequence[RunEnd]) -> None:
    """Show a table of the runs, the reasons for failures, and the report command."""
    completed = [end for end in ends if not end.exit_code]
    lines = [
        f"sweep    {len(completed)} of {len(ends)} runs completed",
        *_format_table(ends, best=_find_best(completed)),
    ]
    for end in ends:
        if end.exit_code:
            why = f"{_format_label(end.number, end.words)}: {end.why or 'stopped on request'}"
            lines.append(f"{_format_state(end):<9}{why}" + (f"; {end.folder}" if end.folder else ""))
    lines.append(f"report   {command_line('report', *_list_report_folders(ends))}")
    for line in lines:
        console.print(printable(line), soft_wrap=True, highlight=False, markup=False, emoji=False)


def _format_label(number: int, words: Sequence[str]) -> str:
    return f"run {number} of the sweep: {' '.join(words)}"


def _format_state(end: RunEnd) -> str:
    return "completed" if not end.exit_code else "stopped" if ends_sweep(end.exit_code) else "failed"


def _find_best(completed: Sequence[RunEnd]) -> RunEnd | None:
    """Return the first run with the best value; None if no run has a finite value."""
    valued = {end.value: end for end in reversed(completed) if end.value is not None and math.isfinite(end.value)}
    return valued[max(valued) if completed[0].maximize else min(valued)] if valued else None


def _format_table(ends: Sequence[RunEnd], *, best: RunEnd | None) -> list[str]:
    """Return aligned table lines: number, overrides, value, state and folder of each run."""
    overrides = [{parse_override_key(word): word.partition("=")[2] for word in end.words} for end in ends]
    keys = dict.fromkeys(key for row in overrides for key in row)
    varied = [key for key in keys if len({row.get(key) for row in overrides}) > 1]
    metric = [ends[0].metric] if ends[0].metric else []
    rows = [["run", *varied, *metric, "state", "folder"]]
    for end, words in zip(ends, overrides, strict=True):
        value = [] if not metric else ["" if end.value is None else f"{end.value:.4g}"]
        state = f"{_format_state(end)}, best" if end is best else _format_state(end)
        rows.append([str(end.number), *(words.get(key, "") for key in varied), *value, state, end.folder or ""])
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in padded]


def _list_report_folders(ends: Sequence[RunEnd]) -> Sequence[str]:
    """Return the sweep's folder if there is one, otherwise the runs' own folders."""
    sweep = Path(ends[0].group or "")
    is_found = sweep.parent.name == "sweeps" and sweep.is_dir()
    return [str(sweep)] if is_found else [end.folder for end in ends if end.folder]


def read_run_end(run: RunDirectory, code: int, *, number: int) -> RunEnd:
    """Return the outcome of a sweep's run that was trained by a job."""
    record = refresh_run(run)
    config, words = record.manifest["config"], record.manifest["overrides"]
    metric, maximize, group = (
        config["sweep"]["metric"],
        config["sweep"]["direction"] == "maximize",
        config["run"]["group"],
    )
    value = None if code or metric is None else read_result(run)["metrics"].get(metric_key(*parse_metric_key(metric)))
    why = record.failure or record.exit_reason or "never started"
    return RunEnd(number, words, code, why, str(run.path), value, metric=metric, maximize=maximize, group=group)


@final
class SideBySide:
    """Forwards signals from the launching process to processes registered in ``folder``.

    The processes have their own process groups; otherwise Ctrl-C would send them a second signal, and a second signal
    ends a run without a save. The launching process does not act on signals itself, since joblib would kill the others
    before they have saved.
    """

    def __init__(self, folder: Path) -> None:
        self._asked, self._processes = folder / "asked", folder / "processes"
        self._processes.mkdir()
        self._launching = os.getpid()

    def register_process(self) -> None:
        """Register this process before it starts a run; block signals until the run handles them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
            die_with_parent(self._launching)
        (self._processes / str(os.getpid())).touch()

    def is_asked(self) -> bool:
        """Return whether a signal has arrived, so that further runs must not start."""
        return self._asked.exists()

    def exit_code(self) -> int:
        """Return 128 plus the number of the first signal; 0 without a signal."""
        return 128 + int(self._asked.read_text()) if self.is_asked() else 0

    @contextmanager
    def forward_signals(self) -> Iterator[None]:
        """Forward signals in this context, without acting on them.

        The kernel may deliver a signal to any thread, but Python runs handlers in the main thread. Joblib blocks the
        main thread, so a timer wakes it.
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
