"""Starts the processes of a run, and restarts them after a failure."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from worldsize.config.settings import Settings
from worldsize.core import Launcher, Outcome, Plan
from worldsize.errors import RunFolderError
from worldsize.launch.record import with_claim
from worldsize.observe.nccl_log import debug_summary
from worldsize.observe.progress import Progress
from worldsize.observe.summary import show_summary
from worldsize.record.attempt import failure_text
from worldsize.record.run_directory import RunDirectory, writing
from worldsize.record.run_record import RunRecord, read_result
from worldsize.world.pinning import pins_here

_logger = logging.getLogger(__name__)


def run_attempts(settings: Settings, launcher: Launcher, plan: Plan, record: RunRecord) -> Outcome:
    """Start the run, and restart it after failures at most ``launcher.max_restarts`` times; return how it ended.

    A second failure in a row at the same step ends the run, since another attempt would fail there too.
    """
    try:
        return _run_attempts(settings, launcher, plan, record)
    except RunFolderError as error:
        _logger.error("%s", error)
        record.give_up(str(error))
        return Outcome("failed", 1)
    except Exception as error:
        record.give_up(f"{type(error).__name__}: {error}")
        raise


def _run_attempts(settings: Settings, launcher: Launcher, plan: Plan, record: RunRecord) -> Outcome:
    console, restarts, failed_at = Console(), 0, -1
    while True:
        with writing(record.directory):
            outcome = _attempt(settings, launcher, plan, record, console)
        if (failure := outcome.failure) is None or restarts == launcher.max_restarts:
            break
        step = failure.step or 0
        if step == failed_at:
            _logger.error("the run failed at step %d twice in a row; it is not started again.", step)
            break
        restarts, failed_at = restarts + 1, step
        why = failure_text(record.attempts[-1]["failure"])
        _logger.error("%s; starting again (%d of %d)", why, restarts, launcher.max_restarts)
    _report(record.directory, outcome, console)
    if settings.cluster.debug:
        _logger.info("%s", debug_summary(record.directory, record.attempts[-1]))
    return outcome


def _attempt(settings: Settings, launcher: Launcher, plan: Plan, record: RunRecord, console: Console) -> Outcome:
    run = record.directory
    pinning = pins_here(plan.cluster, os.environ).describe()
    number = record.begin_attempt(launcher.other_hosts, world_size=plan.world_size, pinning=pinning)
    settings.strategy.prepare(run.servers(number))
    job = launcher.launch(replace(plan, attempt=number))
    with Progress(run.metrics, settings.training.steps, console):
        outcome = job.wait()
    shutil.rmtree(run.servers(number), ignore_errors=True)  # keys and addresses are those of one attempt
    return record.end_attempt(outcome, with_claim)


def _report(run: RunDirectory, outcome: Outcome, console: Console) -> None:
    if failure := outcome.failure:
        at = f" at step {failure.step}" if failure.step else ""
        _logger.error("%s %d failed%s:\n%s", failure.role, failure.rank, at, failure.cause.rstrip())
        _logger.error("run folder: %s", run.path)
    elif outcome.exit_reason == "completed":
        show_summary(console, read_result(run), run.path)
    else:
        _logger.error("%s; run folder: %s", outcome.exit_reason, run.path)
        _logger.error("go on with: %s", command_line("resume", run.path))


def command_line(*words: str | Path) -> str:
    """Format one of our commands as this user can paste it, e.g. ``uv run worldsize resume RUN``."""
    uv = ("uv", "run") if needs_uv(os.environ, Path.cwd(), Path(sys.prefix)) else ()
    return shlex.join([*uv, "worldsize", *map(str, words)])


def needs_uv(environ: Mapping[str, str], folder: Path, prefix: Path) -> bool:
    """Return whether ``worldsize`` is only found by ``uv run``: in a uv project whose environment is not activated.

    Args:
        environ: variables of this process; uv sets UV for what it runs, and an activated environment VIRTUAL_ENV.
        folder: the working directory; the project is the nearest folder above with a lock and a pyproject.toml.
        prefix: the environment that this interpreter belongs to.
    """
    above = (folder, *folder.parents)
    project = next((each for each in above if (each / "uv.lock").exists() and (each / "pyproject.toml").exists()), None)
    if project is None:
        return False
    if "UV" in environ:
        return True
    return prefix.is_relative_to(project) and environ.get("VIRTUAL_ENV") != str(prefix)
