"""Starts the processes of a run, and restarts them after a failure."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from worldsize.checkpoint.format import complete
from worldsize.core import Launcher, Outcome, Plan, Strategy
from worldsize.errors import RunFolderError
from worldsize.healing.rewind import REWOUND, apply_request, conclude_attempt, is_exhausted, is_stopping
from worldsize.launch.record import apply_downgrades
from worldsize.observe.nccl_log import debug_summary
from worldsize.observe.progress import Progress
from worldsize.observe.summary import show_summary
from worldsize.record.attempt import failure_text
from worldsize.record.run_directory import RunDirectory, wrap_write_errors
from worldsize.record.run_record import RunRecord, read_result
from worldsize.world.pinning import pins_here

_logger = logging.getLogger(__name__)


def is_discarded(outcome: Outcome, run: RunDirectory, attempts: int) -> bool:
    """Return whether a new run was refused in its first attempt, without having saved."""
    return outcome.is_refused and attempts == 1 and not complete(run.checkpoints)


def run_attempts(
    launcher: Launcher, strategy: Strategy, plan: Plan, record: RunRecord, *, steps: int, is_new: bool = False
) -> Outcome:
    """Run ``steps`` steps, with up to ``launcher.max_restarts`` restarts; return the outcome.

    Two consecutive failures at the same step end the run, since a third attempt would fail there, too. A refusal of the
    configuration and a process with wrong bits also end it. Going back before a spike does not count as a restart.
    ``is_new``: whether the caller discards the folder of a refused run.
    """
    try:
        outcome = _run_attempts(launcher, strategy, plan, record, steps)
    except RunFolderError as error:
        _logger.error("%s", error)
        record.give_up(str(error))
        return Outcome("failed", 1)
    except Exception as error:
        record.give_up(f"{type(error).__name__}: {error}")
        raise
    if is_new and outcome.failure and is_discarded(outcome, record.directory, len(record.attempts)):
        _logger.error("%s", outcome.failure.cause.rstrip())
    else:
        _report_outcome(record.directory, outcome, Console())
        if plan.cluster.debug:
            _logger.info("%s", debug_summary(record.directory, record.attempts[-1]))
    return outcome


def _run_attempts(launcher: Launcher, strategy: Strategy, plan: Plan, record: RunRecord, steps: int) -> Outcome:
    console, restarts, failed_at = Console(), 0, -1
    while True:
        with wrap_write_errors(record.directory):
            apply_request(record)
            show = partial(Progress, record.directory.metrics, steps, console)
            outcome = _run_attempt(launcher, strategy, plan, record, show)
        if outcome.exit_reason == REWOUND and not is_stopping(record.directory):
            continue
        if (failure := outcome.failure) is None or outcome.is_refused or restarts == launcher.max_restarts:
            break
        if is_exhausted(record):
            _logger.error("not restarting, since the run would go back again.")
            break
        if failure.has_wrong_bits:
            _logger.error("not restarting, since a process with wrong bits may compute wrong bits again.")
            break
        step = failure.step or 0
        if step == failed_at:
            _logger.error("the run failed at step %d twice in a row; not restarting.", step)
            break
        restarts, failed_at = restarts + 1, step
        why = failure_text(record.attempts[-1]["failure"])
        _logger.error("%s; restarting (%d of %d)", why, restarts, launcher.max_restarts)
    return outcome


def _run_attempt(
    launcher: Launcher, strategy: Strategy, plan: Plan, record: RunRecord, show: Callable[[], Progress]
) -> Outcome:
    run = record.directory
    pinning = pins_here(plan.cluster, os.environ).describe()
    number = record.begin_attempt(launcher.other_hosts, world_size=plan.world_size, pinning=pinning)
    strategy.prepare(run.get_servers_folder(number))
    job = launcher.launch(replace(plan, attempt=number))
    with show():
        outcome = job.wait()
    shutil.rmtree(
        run.get_servers_folder(number), ignore_errors=True
    )  # keys and addresses are valid in one attempt only
    return record.end_attempt(conclude_attempt(record, outcome), apply_downgrades)


def _report_outcome(run: RunDirectory, outcome: Outcome, console: Console) -> None:
    if failure := outcome.failure:
        at = f" at step {failure.step}" if failure.step else ""
        _logger.error("%s %d failed%s:\n%s", failure.role, failure.rank, at, failure.cause.rstrip())
        _logger.error("run folder: %s", run.path)
    elif outcome.exit_reason == "completed":
        show_summary(console, read_result(run), run.path)
    else:
        end = outcome.exit_reason
        if end == "preempted" and outcome.steps:
            end = f"stopped and saved at step {outcome.steps[1]}"
        elif end == REWOUND:
            end = "stopped at a spike; the resumed run goes back before it"
        _logger.error("%s; run folder: %s", end, run.path)
        _logger.error("resume with: %s", command_line("resume", run.path))


def command_line(*words: str | Path) -> str:
    """Format a worldsize command for the user to paste, such as ``uv run worldsize resume RUN``."""
    if needs_uv(os.environ, Path.cwd(), Path(sys.prefix)):
        program = ["uv", "run", "worldsize"]
    else:
        program = ["worldsize" if shutil.which("worldsize") else str(Path(sys.executable).with_name("worldsize"))]
    return shlex.join([*program, *map(str, words)])


def needs_uv(environ: Mapping[str, str], folder: Path, prefix: Path) -> bool:
    """Return whether ``worldsize`` needs ``uv run`` because its environment is not activated.

    Args:
        environ: Environment variables; uv sets UV for its commands, and an activated environment sets VIRTUAL_ENV.
        folder: Working directory; the project is the nearest folder at or above it with uv.lock and pyproject.toml.
        prefix: Environment of this interpreter.
    """
    above = (folder, *folder.parents)
    project = next((each for each in above if (each / "uv.lock").exists() and (each / "pyproject.toml").exists()), None)
    if project is None:
        return False
    if "UV" in environ:
        return True
    return prefix.is_relative_to(project) and environ.get("VIRTUAL_ENV") != str(prefix)
