"""Writes each rank's step times to its own file, and traces steps with PyTorch's profiler."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import TypeVar, final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from worldsize.collectives.step_timer import StepTimer
from worldsize.core import Event, MembershipChanged, RunEnded, RunFailed, RunStarted, StepDone
from worldsize.data.storage.byte_files import COUNTS
from worldsize.record.json_lines import drop_lines
from worldsize.record.metrics import is_timing
from worldsize.record.run_directory import RunDirectory, create_parent_folders
from worldsize.strict_json import sanitize_json

T = TypeVar("T")


@final
class Timing:
    """Appends this rank's mean step time and its phases, in seconds, at each logged step."""

    def __init__(self, run: RunDirectory, *, rank: int) -> None:
        self._path = run.get_timing_file(rank)
        create_parent_folders(self._path, run)
        self._file = self._path.open("a", buffering=1)
        self._rank = self._place = rank  # _place: index of this rank among the current members
        self._counted = COUNTS.copy()

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(first=first):
                self.drop_later_lines(first)
            case MembershipChanged(members=members):
                self._place = members.index(self._rank)
            case StepDone():
                own = {"step_seconds": event.step_seconds[self._place], "data_seconds": event.data_seconds}
                phases = (event.compute_seconds, event.communication_seconds, event.update_seconds)
                self.write_line(event.step, **own, **dict(zip(_PHASES, phases, strict=True)))
            case RunEnded() | RunFailed():
                self._file.close()

    def drop_later_lines(self, first: int) -> None:
        """Drop the lines of steps after ``first``, which will be repeated."""
        self._file.close()
        drop_lines(self._path, is_valid=is_timing, is_kept=lambda row: bool(row["step"] <= first))
        self._file = self._path.open("a", buffering=1)

    def write_line(self, step: int, **seconds: float | None) -> None:
        """Append a line for ``step``, omitting parts that were not measured (None)."""
        measured = {name: value for name, value in seconds.items() if value is not None}
        counts, self._counted = COUNTS.subtract_counts(self._counted), COUNTS.copy()
        read = {"read_bytes": counts.read, "fetched_bytes": counts.fetched, "skipped_samples": counts.skipped}
        measured |= {name: count for name, count in read.items() if count}
        self._file.write(json.dumps(sanitize_json({"step": step, **measured})) + "\n")


_PHASES = ("compute_seconds", "communication_seconds", "update_seconds")


@final
class UnitTimes:
    """Step times of a process that computes units (parts of steps), as in :class:`Timing`.

    Every ``every`` steps, it writes the means since the last line. Time outside data loading, compute and updates
    counts as waiting for weights or tasks.
    """

    def __init__(self, timing: Timing, device: torch.device, *, every: int) -> None:
        self._timing, self._timer, self._every = timing, StepTimer(device), every
        self._data = self._compute = self._update = 0.0
        self._last, self._since = -1, 0.0  # step and time of the last line

    @contextmanager
    def measure_data_wait(self) -> Iterator[None]:
        """Count the time in this block as data wait."""
        begun = time.perf_counter()
        yield
        self._data += time.perf_counter() - begun

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        """Count the time in this block as computing a unit of ``step``."""
        if self._last < 0:
            self._timing.drop_later_lines(step - 1)
            self._last, self._since = step - 1, time.perf_counter() - self._data
        with self._timer.record_phases():
            self._timer.start_step(data=0.0)
            yield
            self._timer.end_step()
        _, compute, _, update = self._timer.collect_step_times().sum(0).tolist()
        self._compute, self._update = self._compute + compute, self._update + update
        if step // self._every > self._last // self._every:
            self._write_means(step, time.perf_counter())

    def _write_means(self, step: int, now: float) -> None:
        steps, elapsed = step - self._last, now - self._since
        waited = elapsed - self._data - self._compute - self._update
        parts = {"step": elapsed - self._data, "data": self._data, "compute": self._compute}
        parts |= {"communication": waited, "update": self._update}
        self._timing.write_line(step, **{f"{name}_seconds": seconds / steps for name, seconds in parts.items()})
        self._last, self._since = step, now
        self._data = self._compute = self._update = 0.0


_MOST_ALLOCATIONS = 100_000  # maximum number of allocations, the latest ones, for a snapshot of some tens of MB


def trace_steps(
    batches: Iterable[T], path: Path, *, first: int, span: tuple[int, int], device: torch.device
) -> Generator[T]:
    """Yield ``batches`` after step ``first``; write a trace of some steps to ``path``.

    ``span`` has the first and the last traced step. On a GPU, its allocations in these steps are written to a file with
    the suffix ``.memory.pickle``. On a CPU, the trace includes each allocation as a "[memory]" event with its bytes and
    the new total.

    The trace of a step lasts from the request for its data to the request for the next step's. Close the iterator to
    write a trace cut short by the end of the run.
    """
    source = iter(batches)
    with ExitStack() as stack:
        for step in count(first + 1):
            if step == max(span[0], first + 1) <= span[1]:
                stack.enter_context(_record_trace(path, device))
            if step == span[1] + 1:
                stack.close()
            with record_function(f"step {step}"):
                try:
                    batch = next(source)
                except StopIteration:
                    return
                yield batch


def peak_device_bytes(device: torch.device) -> dict[str, int]:
    """Return the peak bytes allocated for tensors on a GPU; empty for a CPU."""
    return {"peak_device_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


@contextmanager
def _record_trace(path: Path, device: torch.device) -> Iterator[None]:
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    profiler = profile(activities=[ProfilerActivity.CPU, *cuda], profile_memory=not cuda)
    try:
        with profiler, _allocations(path.with_suffix(".memory.pickle")) if cuda else nullcontext():
            yield
    finally:
        profiler.export_chrome_trace(str(path))


@contextmanager
def _allocations(path: Path) -> Iterator[None]:
    """Record CUDA allocations in this block; write them to ``path`` for pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
