"""Runs that were handed over to a scheduler, or to a person."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from worldsize.core import Job, Launcher, Outcome, Plan
from worldsize.errors import WorldsizeError

_POLL, _SLOWEST = 0.5, 5.0  # seconds between two questions: at first, and of a job that takes long


@final
@dataclass
class Submitted(Job):
    """``ids``: of the jobs, as ``launcher`` knows them. ``waits``: come back when all have ended."""

    launcher: Launcher
    ids: Sequence[str] = ()
    waits: bool = False

    def wait(self) -> Outcome:
        """What became of a run stands in its folder."""
        pause, unsaid = _POLL, True
        while self.waits:
            try:
                if all(self.launcher.state(job) is None for job in self.ids):
                    break
            except WorldsizeError as error:  # a controller that is restarted says nothing for a while
                if unsaid:
                    print(f"{error} It is asked again.", file=sys.stderr, flush=True)
                unsaid = False
            time.sleep(pause)
            pause = min(1.05 * pause, _SLOWEST)
        return Outcome("ended" if self.waits else "submitted", 0)

    def cancel(self) -> None:
        for job in self.ids:
            self.launcher.cancel(job)


def job_name(plan: Plan) -> str:
    """Of everything that belongs to the run; at most 40 characters that a host's name may have."""
    words = re.sub("[^a-z0-9]+", "-", f"{plan.run_dir.parts[-2]}-{plan.run_dir.name}".lower())
    return "ws-" + words[-37:].strip("-")
