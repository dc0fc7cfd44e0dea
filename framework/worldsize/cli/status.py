"""``worldsize status [RUN ...]``: list the runs below a folder and how each ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from worldsize.errors import WorldsizeError
from worldsize.launch.scheduled import Scheduler, state_of
from worldsize.messages import printable, refuse
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import RunView, look

Row = tuple[str, ...]
_HEAD: Row = ("state", "started", "processes", "attempts", "job", "run")


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize status", description=__doc__)
    parser.add_argument("roots", nargs="*", type=Path, metavar="RUN", help="a run folder, or a folder of runs (runs)")
    roots = parser.parse_args().roots or [Path("runs")]
    try:
        runs = [run for root in roots for run in runs_below(root)]
    except WorldsizeError as error:
        sys.exit(refuse(error))
    if not runs:
        where = ", ".join(map(str, roots))
        sys.exit(refuse(WorldsizeError(f"no runs below {where}. Name a run folder, or a folder of runs.")))
    rows, failures, errors = zip((_HEAD, None, None), *map(_row, runs), strict=True)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    for row, failure in zip(rows, failures, strict=True):
        console.print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
        if failure:
            console.print(f"  {failure}", style="red")
    for run, message in zip(runs, errors[1:], strict=True):
        if message:
            print(printable(f"{run.path}: {message}"), file=sys.stderr)


def _row(run: RunDirectory) -> tuple[Row, str | None, str | None]:
    """Return the table cells of a run, the folder last so that no terminal cuts it; its failure; its record's error."""
    try:
        view = look(run)
        last = view.attempts[-1] if view.attempts else {"start": "", "world_size": ""}
        facts = (last["start"], f"{last['world_size']}{_waiting(view)}", len(view.attempts), view.job or "")
    except WorldsizeError as error:
        return _cells("damaged", "", "", "", "", run.path), None, str(error)
    try:
        state = state_of(view, Scheduler(run))
        is_early = state == "completed" and "stopped_early" in view.results
        return _cells(f"{state} early" if is_early else state, *facts, run.path), view.failure, None
    except WorldsizeError as error:
        return _cells("unknown", *facts, run.path), view.failure, str(error)


def _waiting(view: RunView) -> str:
    """Return how many processes of spare nodes wait beside those that train, as " + 4"."""
    shape = view.manifest["cluster"]
    count = shape.get("spare_nodes", 0) * shape["processes_per_node"]
    return f" + {count}" if count else ""


def _cells(*values: object) -> Row:
    return tuple(printable(str(value)) for value in values)
