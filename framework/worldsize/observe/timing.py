"""Each rank's own times, in a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import final

from worldsize.core import Event, RunEnded, RunFailed, RunStarted, StepDone
from worldsize.observe.jsonl import rewind


@final
class Timing:
    """Appends this rank's mean step time and wait for data, in seconds, at each logged step."""

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
                seconds = {"step_seconds": event.step_seconds[self._rank], "data_seconds": event.data_seconds}
                self._file.write(json.dumps({"step": event.step, **seconds}) + "\n")
            case RunEnded() | RunFailed():
                self._file.close()
