"""Determines a run's state from its record and, for a job, its scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from worldsize.errors import WorldsizeError
from worldsize.record.run_directory import RunDirectory, is_locked
from worldsize.record.run_record import RunView, read_run, refresh_run

if TYPE_CHECKING:
    from worldsize.core import BatchLauncher

_logger = logging.getLogger(__name__)

SILENT = "the scheduler is not responding"
_INTERVAL = 15.0  # seconds between two queries; a scheduler's controller serves many users
_POLL, _SLOWEST = 0.5, 5.0  # seconds between two queries of wait_for: initial and maximum


@final
@dataclass
class Scheduler:
    """A run's scheduler, queried at most every 15 s; calls in between return the cached state."""

    run: RunDirectory
    _launcher: BatchLauncher | None = None
    _queried_at: float = field(default=float("-inf"))
    _state: str | None = None

    def state(self, job: str) -> str | None:
        """Return the job's state, None if it is over, or :data:`SILENT` without an answer."""
        if time.monotonic() - self._queried_at >= _INTERVAL:
            self._state = self._query_state(job)
            self._queried_at = time.monotonic()
        return self._state

    @property
    def launcher(self) -> BatchLauncher | None:
        """Launcher that submitted the run's jobs; None if the run was resumed without a scheduler.

        Raises:
            WorldsizeError: the record's launcher cannot be built, or needs other users' code.
        """
        from worldsize.config.recorded import read_launcher  # imports torch, which takes seconds

        self._launcher = self._launcher or read_launcher(read_run(self.run.path))
        return self._launcher

    def _query_state(self, job: str) -> str | None:
        launcher = self.launcher
        try:
            return launcher.state(job) if launcher else None
        except WorldsizeError:
            return SILENT


def describe_state(record: RunView, scheduler: Scheduler) -> str:
    """Return how the run ended, or its job's state in the scheduler if the run has not ended."""
    if record.exit_reason not in ("running", None) or record.job is None:
        return record.exit_reason or "not started"
    job_state = scheduler.state(record.job)
    if job_state == SILENT:
        return f"{record.exit_reason or 'submitted'}; {SILENT}"
    return job_state or record.exit_reason or "the job ended without a recorded attempt"


def is_alive(scheduler: Scheduler) -> bool:
    """Return whether the run is training, queued, or about to be restarted."""
    record = refresh_run(scheduler.run)
    if record.job and record.exit_reason in (None, "preempted", "rewound"):
        return scheduler.state(record.job) is not None
    return record.exit_reason == "running" or (record.exit_reason != "completed" and is_locked(scheduler.run.path))


def wait_for(launcher: BatchLauncher, jobs: Sequence[str]) -> None:
    """Wait until all jobs have ended; their results are in the run folders."""
    pause, is_first_failure = _POLL, True
    while True:
        try:
            if all(launcher.state(job) is None for job in jobs):
                return
        except WorldsizeError as error:  # the controller may be restarting
            if is_first_failure:
                _logger.info("%s Retrying.", error)
            is_first_failure = False
        time.sleep(pause)
        pause = min(1.05 * pause, _SLOWEST)
