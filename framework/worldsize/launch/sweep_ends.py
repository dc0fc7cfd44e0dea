"""The ends of a sweep's runs, whichever processes called them, and their summary."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from rich.console import Console

from worldsize.core import metric_key, split_of
from worldsize.messages import printable
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import look, read_result
from worldsize.world.preemption import PREEMPTED


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
