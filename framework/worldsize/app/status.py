"""``worldsize status [RUN ...]``: list the runs below a folder and how each ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from worldsize.driver.scheduled import Scheduler, state_of
from worldsize.errors import WorldsizeError
from worldsize.messages import printable, refuse
from worldsize.records.run_directory import RunDirectory, runs_below
from worldsize.records.run_record import RunView, look

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
    rows, remarks = [_HEAD], []
    for run in runs:
        row, remark = _row(run)
        rows.append(row)
        remarks += [f"{run.path}: {remark}"] if remark else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    for text in remarks:
        print(printable(text), file=sys.stderr)


def _row(run: RunDirectory) -> tuple[Row, str | None]:
    """Return the table cells of a run, the folder last so that no terminal cuts it, and errors of its record."""
    try:
        view = look(run)
        last = view.attempts[-1] if view.attempts else {"start": "", "world_size": ""}
        facts = (last["start"], f"{last['world_size']}{_waiting(view)}", len(view.attempts), view.job or "")
    except WorldsizeError as error:
        return _cells("damaged", "", "", "", "", run.path), str(error)
    try:
        state = state_of(view, Scheduler(run))
        is_early = state == "completed" and "stopped_early" in view.results
        return _cells(f"{state} early" if is_early else state, *facts, run.path), None
    except WorldsizeError as error:
        return _cells("unknown", *facts, run.path), str(error)


def _waiting(view: RunView) -> str:
    """Return how many processes of spare nodes wait beside those that train, as " + 4"."""
    shape = view.manifest["cluster"]
    count = shape.get("spare_nodes", 0) * shape["processes_per_node"]
    return f" + {count}" if count else ""


def _cells(*values: object) -> Row:
    return tuple(printable(str(value)) for value in values)
