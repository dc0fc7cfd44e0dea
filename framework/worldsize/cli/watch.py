"""``worldsize watch RUN``: follow a run live, from any shell with access to its folder; exit with its exit code."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from worldsize.cli import RUN, run_folder
from worldsize.errors import WorldsizeError
from worldsize.launch.scheduled import Scheduler, describe_state, is_alive
from worldsize.messages import outlive_output, printable, report_error
from worldsize.observe.events import describe_event
from worldsize.observe.progress import Plain
from worldsize.observe.report.svg import shorten_text
from worldsize.observe.watch import Watched, describe_damage, render_screen
from worldsize.record.attempt import FailureRecord, failure_text
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunView, refresh_run

_POLL = 0.5  # seconds between two polls


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize watch", description=__doc__)
    parser.add_argument("run", nargs="?", type=run_folder, default="last", help=RUN)
    run = RunDirectory(parser.parse_args().run)
    outlive_output(needs_reader=True)
    try:
        sys.exit(watch(run, Console()))
    except WorldsizeError as error:
        sys.exit(report_error(error))
    except KeyboardInterrupt:
        sys.exit(130)


def watch(run: RunDirectory, console: Console, *, wait: Callable[[float], None] = time.sleep) -> int:
    """Show the run until it ends; return the exit code of its last attempt, or 1 if it was killed or never started.

    Raises:
        WorldsizeError: the folder is not a run.
    """
    watched, scheduler = Watched(run.path), Scheduler(run)
    with _open_live_view(console) if console.is_terminal else _open_line_view(console, run) as show:
        while True:
            alive = is_alive(scheduler)  # check before reading, so that output written until the exit is shown
            watched.update_rows()
            view = refresh_run(run)
            show(watched, view, describe_state(view, scheduler))
            if not alive:
                return _exit_code(view)
            wait(_POLL)


Show = Callable[[Watched, RunView, str], None]


@contextmanager
def _open_live_view(console: Console) -> Iterator[Show]:
    with Live(console=console, auto_refresh=False) as live:
        yield lambda watched, view, state: live.update(render_screen(watched, view.manifest, state), refresh=True)


@contextmanager
def _open_line_view(console: Console, run: RunDirectory) -> Iterator[Show]:
    """Print a line for each change of state, evaluation and event, and for steps at intervals."""
    steps = Plain(refresh_run(run).manifest["config"].get("steps") or 0, console)
    shown: set[str] = set()

    def show_lines(watched: Watched, view: RunView, state: str) -> None:
        reasons = [each["exit_reason"] for each in view.attempts]
        for number, reason in enumerate([*reasons[:-1], state], start=1):
            failures = [failure_text(failure)] if (failure := _find_failure(view, number)) else []
            for line in (printable(f"attempt {number}: {reason}"), *failures):
                if f"{number} {line}" not in shown:
                    shown.add(f"{number} {line}")
                    console.print(line, style="red" if failure else None, highlight=False, markup=False)
        if watched.damaged and (line := describe_damage(watched)) not in shown:
            shown.add(line)
            console.print(line, highlight=False, markup=False)
        for row in watched.new_metrics:
            steps.show(row)
        for event in watched.new_events:
            console.print(shorten_text(describe_event(event), at_most=200), highlight=False, markup=False)

    yield show_lines


def _find_failure(view: RunView, number: int) -> FailureRecord | None:
    return view.attempts[number - 1].get("failure") if view.attempts else None


def _exit_code(view: RunView) -> int:
    code = view.attempts[-1]["exit_code"] if view.attempts else None
    return 1 if code is None else int(code)
