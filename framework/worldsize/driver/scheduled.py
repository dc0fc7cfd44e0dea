"""What the scheduler of a run says of its job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from worldsize.errors import WorldsizeError
from worldsize.records.run_directory import RunDirectory

if TYPE_CHECKING:
    from worldsize.core import Launcher

SILENT = "the scheduler does not answer"
_INTERVAL = 15.0  # seconds: a controller has others to serve


@final
@dataclass
class Scheduler:
    """Asked at most every 15 seconds, however often it is wanted to be known."""

    run: RunDirectory
    _launcher: Launcher | None = None
    _asked: float = field(default=float("-inf"))
    _said: str | None = None

    def state(self, job: str) -> str | None:
        """Its word for the job, :data:`SILENT`, or None: the job is over."""
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


def job_of(manifest: Mapping[str, Any]) -> str | None:
    """The last job that the run was submitted as."""
    return str(manifest["jobs"][-1]["id"]) if manifest.get("jobs") else None
