"""A run's processes, started as often as it takes, and the record of each attempt."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.console import Console

from worldsize.checkpoints.format import COMPLETE, complete, read, step_of
from worldsize.config.settings import Settings
from worldsize.core import Failure, Outcome, Plan
from worldsize.errors import CheckpointError
from worldsize.observe.jsonl import rewind
from worldsize.observe.progress import Progress
from worldsize.observe.summary import summary_table
from worldsize.reproducibility.manifest import begin_attempt, end_attempt
from worldsize.run_directory import RunDirectory
from worldsize.world.environments import job_of


def run_attempts(settings: Settings, plan: Plan, run: RunDirectory) -> int:
    """Start the run, and again after a failure while ``launcher.max_restarts`` lasts; the exit code.

    The caller holds the run's lock. A failure at the same step twice in a row ends it: a third would be no other.
    """
    console, restarts, failed_at = Console(), 0, -1
    while True:
        outcome = _attempt(settings, plan, run, console)
        if (failure := outcome.failure) is None or restarts == settings.launcher.max_restarts:
            break
        step = failure.step or 0
        if step == failed_at:
            print(f"the run failed at step {step} twice in a row; it is not started again.", file=sys.stderr)
            break
        restarts, failed_at = restarts + 1, step
        _say_restart(failure, f"{restarts} of {settings.launcher.max_restarts}")
    _report(run, outcome, console)
    return outcome.exit_code


def _say_restart(failure: Failure, count: str) -> None:
    cause = failure.cause.rstrip().splitlines()[-1]
    text = f"{failure.role} {failure.rank} failed at step {failure.step}: {cause}; starting again ({count})"
    print(text, file=sys.stderr, flush=True)


def _attempt(settings: Settings, plan: Plan, run: RunDirectory, console: Console) -> Outcome:
    number = begin(run, settings.launcher.hosts, plan.world_size)
    settings.strategy.prepare(run.servers(number))
    job = settings.launcher.launch(replace(plan, attempt=number))
    with Progress(run.metrics, settings.pace.steps, console):
        outcome = job.wait()
    shutil.rmtree(run.servers(number), ignore_errors=True)  # keys and addresses of an attempt end with it
    end(run, outcome)
    return outcome


def begin(run: RunDirectory, others: Sequence[str], world_size: int) -> int:
    """Note that an attempt begins, on this host and ``others``; its number."""
    hosts = [socket.gethostname(), *others]
    number = begin_attempt(run.manifest, hosts=hosts, world_size=world_size, job=job_of(os.environ))
    _rewind(run)  # before anybody follows the file
    run.result.unlink(missing_ok=True)
    return number


def _rewind(run: RunDirectory) -> None:
    saved, evaluated = complete(run.checkpoints), True
    if saved:
        with suppress(CheckpointError):  # a damaged one is refused by those who load it
            evaluated = read(saved[-1]).facts.get("evaluated", True)
    rewind(run.metrics, step_of(saved[-1]) if saved else 0, evaluated=evaluated)


def end(run: RunDirectory, outcome: Outcome) -> None:
    """Note how the attempt ended."""
    facts = {key: getattr(outcome, key) for key in ("exit_reason", "exit_code", "steps", "first_step_at")}
    if run.transport.exists():
        facts["transport"] = json.loads(run.transport.read_text())
        run.transport.unlink()
    results = end_attempt(run.manifest, _result(run, outcome), **facts)
    run.result.write_text(json.dumps(results, indent=2) + "\n")


def _result(run: RunDirectory, outcome: Outcome) -> dict[str, Any]:
    """What rank 0 wrote, or only the exit reason if the run did not get so far; and the checkpoints' digests."""
    digests = {path.name: (path / COMPLETE).read_text().strip() for path in complete(run.checkpoints)}
    if outcome.exit_code != 0 or not run.result.exists():
        return {"exit_reason": outcome.exit_reason, "checkpoints": digests}
    return {**json.loads(run.result.read_text()), "checkpoints": digests}


def _report(run: RunDirectory, outcome: Outcome, console: Console) -> None:
    if failure := outcome.failure:
        at = f" at step {failure.step}" if failure.step else ""
        print(f"{failure.role} {failure.rank} failed{at}:\n{failure.cause.rstrip()}", file=sys.stderr)
        print(f"run folder: {run.path}", file=sys.stderr)
    elif outcome.exit_reason == "completed":
        console.print(summary_table(json.loads(run.result.read_text()), run.path))
    else:
        print(f"{outcome.exit_reason}; run folder: {run.path}", file=sys.stderr)
        print(f"go on with: worldsize resume {run.path}", file=sys.stderr)
