"""Each rank's own times, in a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import final

from worldsize.core import Event, RunEnded, RunFailed, RunStarted, StepDone
from worldsize.observe.jsonl import rewind


@final
class Timing:
    """Appends this rank's mean step time and its parts, in seconds, at each logged step."""

    def __init__(self, path: Path, *, rank: int) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        self._file = path.open("a", buffering=1)
        self._rank = rank

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first):
                self._file.close()
                rewind(self._path, first)
                self._file = self._path.open("a", buffering=1)
            case StepDone():
                self._write(event)
            case RunEnded() | RunFailed():
                self._file.close()

    def _write(self, event: StepDone) -> None:
        parts = {
            "step_seconds": event.step_seconds[self._rank],
            "data_seconds": event.data_seconds,
            "compute_seconds": event.compute_seconds,
            "communication_seconds": event.communication_seconds,
            "update_seconds": event.update_seconds,
        }
        measured = {name: seconds for name, seconds in parts.items() if seconds is not None}
        self._file.write(json.dumps({"step": event.step, **measured}) + "\n")
