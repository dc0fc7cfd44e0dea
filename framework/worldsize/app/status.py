"""``worldsize status [RUN ...]``: runs below a folder and how each ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from worldsize.app import refuse
from worldsize.driver.scheduled import Scheduler, state_of
from worldsize.errors import WorldsizeError
from worldsize.records.run_directory import RunDirectory, runs_below
from worldsize.records.run_record import look


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize status", description=__doc__)
    parser.add_argument("roots", nargs="*", type=Path, metavar="RUN", help="a run folder, or a folder of runs (runs)")
    roots = parser.parse_args().roots or [Path("runs")]
    runs = [run for root in roots for run in runs_below(root)]
    if not runs:
        where = ", ".join(map(str, roots))
        sys.exit(refuse(WorldsizeError(f"no runs below {where}. Name a run folder, or a folder that holds some.")))
    Console().print(_table(runs))


def _table(runs: list[RunDirectory]) -> Table:
    table = Table(Column("run", overflow="fold"), "started", "processes", "attempts", "job", "state")
    for run in runs:
        table.add_row(*_row(run))
    return table


def _row(run: RunDirectory) -> tuple[str, ...]:
    try:
        view = look(run)
    except WorldsizeError as error:
        return (str(run.path), "", "", "", "", str(error))
    last = view.attempts[-1] if view.attempts else {"start": ""}
    size = str(last.get("world_size", ""))
    try:
        state = state_of(view, Scheduler(run))
    except WorldsizeError as error:
        state = str(error)
    return (str(run.path), last["start"], size, str(len(view.attempts)), view.job or "", state)
