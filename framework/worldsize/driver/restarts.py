"""Start the processes of a run, and start them again after a failure."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace

from rich.console import Console

from worldsize.config.settings import Settings
from worldsize.core import Failure, Outcome, Plan
from worldsize.observe.progress import Progress
from worldsize.observe.summary import summary_table
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import RunRecord, read_result


def run_attempts(settings: Settings, plan: Plan, record: RunRecord) -> int:
    """Start the run, and again after a failure while ``launcher.max_restarts`` lasts; return the exit code.

    A failure at the same step twice in a row ends it: a third would be no other.
    """
    console, restarts, failed_at = Console(), 0, -1
    while True:
        outcome = _attempt(settings, plan, record, console)
        if (failure := outcome.failure) is None or restarts == settings.launcher.max_restarts:
            break
        step = failure.step or 0
        if step == failed_at:
            print(f"the run failed at step {step} twice in a row; it is not started again.", file=sys.stderr)
            break
        restarts, failed_at = restarts + 1, step
        _say_restart(failure, f"{restarts} of {settings.launcher.max_restarts}")
    _report(record.directory, outcome, console)
    return outcome.exit_code


def _say_restart(failure: Failure, count: str) -> None:
    cause = failure.cause.rstrip().splitlines()[-1]
    text = f"{failure.role} {failure.rank} failed at step {failure.step}: {cause}; starting again ({count})"
    print(text, file=sys.stderr, flush=True)


def _attempt(settings: Settings, plan: Plan, record: RunRecord, console: Console) -> Outcome:
    run = record.directory
    number = record.begin_attempt(settings.launcher.other_hosts, world_size=plan.world_size)
    settings.strategy.prepare(run.servers(number))
    job = settings.launcher.launch(replace(plan, attempt=number))
    with Progress(run.metrics, settings.intervals.steps, console):
        outcome = job.wait()
    shutil.rmtree(run.servers(number), ignore_errors=True)  # keys and addresses of an attempt end with it
    record.end_attempt(outcome)
    return outcome


def _report(run: RunDirectory, outcome: Outcome, console: Console) -> None:
    if failure := outcome.failure:
        at = f" at step {failure.step}" if failure.step else ""
        print(f"{failure.role} {failure.rank} failed{at}:\n{failure.cause.rstrip()}", file=sys.stderr)
        print(f"run folder: {run.path}", file=sys.stderr)
    elif outcome.exit_reason == "completed":
        console.print(summary_table(read_result(run), run.path))
    else:
        print(f"{outcome.exit_reason}; run folder: {run.path}", file=sys.stderr)
        print(f"go on with: worldsize resume {run.path}", file=sys.stderr)
