"""Writes the times of each rank to a separate file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from worldsize.core import Event, MembershipChanged, RunEnded, RunFailed, RunStarted, StepDone
from worldsize.data.storage.read_counts import COUNTS
from worldsize.dist.step_timer import StepTimer
from worldsize.record.json_lines import drop_lines
from worldsize.record.metrics import is_timing
from worldsize.record.run_directory import RunDirectory, make_folder_of
from worldsize.strict_json import strict


@final
class Timing:
    """Appends this rank's mean step time and its parts, in seconds, at each logged step."""

    def __init__(self, run: RunDirectory, *, rank: int) -> None:
        self._path = run.timing(rank)
        make_folder_of(self._path, run)
        self._file = self._path.open("a", buffering=1)
        self._rank = self._place = rank  # and its place among those that train now
        self._counted = COUNTS.copy()

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first):
                self.begin(first)
            case MembershipChanged(members=members):
                self._place = members.index(self._rank)
            case StepDone():
                own = {"step_seconds": event.step_seconds[self._place], "data_seconds": event.data_seconds}
                phases = (event.compute_seconds, event.communication_seconds, event.update_seconds)
                self.write(event.step, **own, **dict(zip(_PHASES, phases, strict=True)))
            case RunEnded() | RunFailed():
                self._file.close()

    def begin(self, first: int) -> None:
        """Drop the lines of steps after ``first``, which will be repeated."""
        self._file.close()
        drop_lines(self._path, is_valid=is_timing, is_kept=lambda row: bool(row["step"] <= first))
        self._file = self._path.open("a", buffering=1)

    def write(self, step: int, **seconds: float | None) -> None:
        """Append a line about ``step``, without parts that were not measured (None)."""
        measured = {name: value for name, value in seconds.items() if value is not None}
        counts, self._counted = COUNTS.since(self._counted), COUNTS.copy()
        read = {"read_bytes": counts.read, "fetched_bytes": counts.fetched, "skipped_samples": counts.skipped}
        measured |= {name: count for name, count in read.items() if count}
        self._file.write(json.dumps(strict({"step": step, **measured})) + "\n")


_PHASES = ("compute_seconds", "communication_seconds", "update_seconds")


@final
class UnitTimes:
    """Writes the times of a process that is assigned units of steps, in the format of :class:`Timing`.

    Every ``every`` steps it writes the means since the last line. Time that is neither data nor computing is waiting
    for weights or for work.
    """

    def __init__(self, timing: Timing, device: torch.device, *, every: int) -> None:
        self._timing, self._timer, self._every = timing, StepTimer(device), every
        self._data = self._compute = self._update = 0.0
        self._last, self._since = -1, 0.0  # step and time of the last line

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Count the time inside the context as a wait for data."""
        begun = time.perf_counter()
        yield
        self._data += time.perf_counter() - begun

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        """Count the time inside the context as computing a unit of ``step``."""
        if self._last < 0:
            self._timing.begin(step - 1)
            self._last, self._since = step - 1, time.perf_counter() - self._data
        with self._timer.opened():
            self._timer.start(data=0.0)
            yield
            self._timer.end()
        _, compute, _, update = self._timer.take().sum(0).tolist()
        self._compute, self._update = self._compute + compute, self._update + update
        if step // self._every > self._last // self._every:
            self._write(step, time.perf_counter())

    def _write(self, step: int, now: float) -> None:
        steps, elapsed = step - self._last, now - self._since
        waited = elapsed - self._data - self._compute - self._update
        parts = {"step": elapsed - self._data, "data": self._data, "compute": self._compute}
        parts |= {"communication": waited, "update": self._update}
        self._timing.write(step, **{f"{name}_seconds": seconds / steps for name, seconds in parts.items()})
        self._last, self._since = step, now
        self._data = self._compute = self._update = 0.0
