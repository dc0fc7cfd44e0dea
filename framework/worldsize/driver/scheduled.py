"""The state of a run that perhaps waits for a scheduler, as its record and the scheduler have it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from worldsize.errors import WorldsizeError
from worldsize.records.lock import is_locked
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import RunView, look

if TYPE_CHECKING:
    from worldsize.core import Launcher

SILENT = "the scheduler does not answer"
_INTERVAL = 15.0  # seconds: a controller has others to serve


@final
@dataclass
class Scheduler:
    """Query the scheduler of a run at most every 15 s; other calls return the cached state."""

    run: RunDirectory
    _launcher: Launcher | None = None
    _asked: float = field(default=float("-inf"))
    _said: str | None = None

    def state(self, job: str) -> str | None:
        """Return the scheduler's word for the job, :data:`SILENT`, or None if the job is over."""
        if time.monotonic() - self._asked >= _INTERVAL:
            self._said = self._answer(job)
            self._asked = time.monotonic()
        return self._said

    @property
    def launcher(self) -> Launcher:
        """Raises WorldsizeError if the run's own settings cannot be read."""
        from worldsize.config.recorded import read_settings  # imports torch, which takes seconds

        self._launcher = self._launcher or read_settings(self.run).launcher
        return self._launcher

    def _answer(self, job: str) -> str | None:
        launcher = self.launcher
        try:
            return launcher.state(job)
        except WorldsizeError:
            return SILENT


def state_of(view: RunView, scheduler: Scheduler) -> str:
    """Say how the run ended, or what its scheduler says as long as it has not."""
    if view.exit_reason not in ("running", None) or view.job is None:
        return view.exit_reason or "not started"
    told = scheduler.state(view.job)
    if told == SILENT:
        return f"{view.exit_reason or 'submitted'}; {SILENT}"
    return told or view.exit_reason or "its job is over, and no attempt is noted here"


def is_alive(scheduler: Scheduler) -> bool:
    """Whether the scheduler's run is being trained, waits in a queue, or is about to be started again."""
    view = look(scheduler.run)
    if view.job and view.exit_reason in (None, "preempted"):
        return scheduler.state(view.job) is not None
    return view.exit_reason == "running" or (view.exit_reason != "completed" and is_locked(scheduler.run.path))
