"""Determine the state of a run that may wait for a scheduler, from its record and from what the scheduler says."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from worldsize.errors import WorldsizeError
from worldsize.records.lock import is_locked
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import RunView, look, view

if TYPE_CHECKING:
    from worldsize.core import BatchLauncher

_logger = logging.getLogger(__name__)

SILENT = "the scheduler does not answer"
_INTERVAL = 15.0  # seconds: a controller has others to serve
_POLL, _SLOWEST = 0.5, 5.0  # seconds between two questions: at first, and of a job that takes long


@final
@dataclass
class Scheduler:
    """Query the scheduler of a run at most every 15 s; other calls return the cached state."""

    run: RunDirectory
    _launcher: BatchLauncher | None = None
    _asked: float = field(default=float("-inf"))
    _said: str | None = None

    def state(self, job: str) -> str | None:
        """Return the scheduler's word for the job, :data:`SILENT`, or None if the job is over."""
        if time.monotonic() - self._asked >= _INTERVAL:
            self._said = self._answer(job)
            self._asked = time.monotonic()
        return self._said

    @property
    def launcher(self) -> BatchLauncher | None:
        """Return the launcher that submitted the run's jobs; None if the run has gone on without a scheduler since.

        Raises:
            WorldsizeError: the record's launcher cannot be built, or not without another user's code.
        """
        from worldsize.config.recorded import read_launcher  # imports torch, which takes seconds

        self._launcher = self._launcher or read_launcher(view(self.run.path))
        return self._launcher

    def _answer(self, job: str) -> str | None:
        launcher = self.launcher
        try:
            return launcher.state(job) if launcher else None
        except WorldsizeError:
            return SILENT


def state_of(record: RunView, scheduler: Scheduler) -> str:
    """Say how the run ended, or what its scheduler says as long as it has not."""
    if record.exit_reason not in ("running", None) or record.job is None:
        return record.exit_reason or "not started"
    told = scheduler.state(record.job)
    if told == SILENT:
        return f"{record.exit_reason or 'submitted'}; {SILENT}"
    return told or record.exit_reason or "its job is over, and no attempt is noted here"


def is_alive(scheduler: Scheduler) -> bool:
    """Whether the scheduler's run is being trained, waits in a queue, or is about to be started again."""
    record = look(scheduler.run)
    if record.job and record.exit_reason in (None, "preempted"):
        return scheduler.state(record.job) is not None
    return record.exit_reason == "running" or (record.exit_reason != "completed" and is_locked(scheduler.run.path))


def wait_for(launcher: BatchLauncher, jobs: Sequence[str]) -> None:
    """Block until all jobs have ended. How the runs ended stands in their folders."""
    pause, unsaid = _POLL, True
    while True:
        try:
            if all(launcher.state(job) is None for job in jobs):
                return
        except WorldsizeError as error:  # a controller that is restarted says nothing for a while
            if unsaid:
                _logger.info("%s It is asked again.", error)
            unsaid = False
        time.sleep(pause)
        pause = min(1.05 * pause, _SLOWEST)
