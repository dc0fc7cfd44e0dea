"""Time breakdown of a step: computing, waiting for others, and updating.

A step starts in the phase "compute". Code that updates parameters runs inside ``with measure_phase("update")``. Code
that waits for other processes uses :mod:`worldsize.collectives.group` or runs inside ``with
measure_phase("communication")``. Only waiting counts as communication; a collective that fully overlaps computation
counts as zero.

PyTorch is not patched. Where PyTorch itself waits, hooks mark the wait:

============================== =====================================================================================
DistributedDataParallel        :func:`backward` for the gradients, :func:`time_buffers` for the buffers
``fully_shard``                :func:`worldsize.strategies.unit_collectives.time_sharding`
tensor parallelism, pipelines  :mod:`worldsize.strategies.mesh.stage`
============================== =====================================================================================

Any other wait is attributed to the current phase. docs/observing.md lists these waits.

On CUDA, times come from events on the stream of the step, without synchronization. The open timer of a process is a
module variable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from worldsize.moved import resolve_renamed

Phase = Literal["compute", "communication", "update"]
PHASES: tuple[Phase, ...] = ("compute", "communication", "update")


@final
@dataclass
class _StepTimes:
    """The times of phase changes in one step."""

    data: float  # seconds that the step waited for its data
    marks: list[tuple[Any, Phase]] = field(default_factory=list)  # time or CUDA event, and the phase that it starts

    def sum_phase_seconds(self, between: Callable[[Any, Any], float]) -> list[float]:
        seconds = dict.fromkeys(PHASES, 0.0)
        for (begun, phase), (ended, _) in zip(self.marks, self.marks[1:], strict=False):
            seconds[phase] += between(begun, ended)
        return [self.data, *seconds.values()]


@final
class StepTimer:
    """Measures the phases of steps on ``device``; a process has at most one open timer."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._now: Callable[[], Any] = self._record_event if self._stream else time.perf_counter
        self._thread = threading.get_ident()
        self._step: _StepTimes | None = None
        self._done: list[_StepTimes] = []
        self._before: list[_StepTimes] = []  # on CUDA, steps that ended before the last collect_step_times()

    @contextmanager
    def record_phases(self) -> Iterator[None]:
        """Record the phases marked by code in this block."""
        global _open
        _open = self
        try:
            yield
        finally:
            _open = None

    def start_step(self, *, data: float) -> None:
        """Start to measure a step that waited ``data`` seconds for its data."""
        self._step = _StepTimes(data)
        self.switch_phase("compute")

    def end_step(self) -> None:
        """End the current step, if any, and store its times for :meth:`collect_step_times`."""
        if self._step is not None:
            self.switch_phase("compute")
            self._done.append(self._step)
            self._step = None

    def collect_step_times(self) -> Tensor:
        """Return seconds waiting for data, then in each of :data:`PHASES`: float64 (steps, 4).

        On the CPU these are the steps since the last call. On CUDA these are the steps that ended before the last call,
        which the device has completed by now, so that this method does not wait for it.
        """
        ready, self._before = (self._before, self._done) if self._stream else (self._done, [])
        self._done = []
        between = _device_seconds if self._stream else _measure_interval
        return torch.tensor([step.sum_phase_seconds(between) for step in ready], dtype=torch.float64).view(
            -1, 1 + len(PHASES)
        )

    def switch_phase(self, phase: Phase) -> Phase:
        """Switch to ``phase`` and return the previous phase."""
        if self._step is None:
            return phase
        marks = self._step.marks
        before = marks[-1][1] if marks else "compute"
        marks.append((self._now(), phase))
        return before

    @property
    def is_measuring(self) -> bool:
        """Whether a step is being measured and the calling thread belongs to it.

        Such a thread either created the timer or runs CUDA's backward pass.
        """
        if self._step is None or threading.get_ident() == self._thread:
            return self._step is not None
        # autograd's threads are not started by Python
        return self._stream is not None and isinstance(threading.current_thread(), threading._DummyThread)

    def _record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _measure_interval(begun: float, ended: float) -> float:
    return ended - begun


def _device_seconds(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    milliseconds: float = begun.elapsed_time(ended)
    return milliseconds / 1e3


_open: StepTimer | None = None  # global, since hooks also run in autograd's threads, without context variables


def measure_phase(name: Phase) -> AbstractContextManager[None]:
    """Attribute the time in this block to ``name``, excluding nested phases."""
    timer = _open
    return _Measured(timer, name) if timer is not None and timer.is_measuring else _UNMEASURED


_UNMEASURED = nullcontext()  # ten times cheaper than a generator, which matters for many small messages


@final
class _Measured:
    """Context manager for one phase; a generator would take four times as long."""

    def __init__(self, timer: StepTimer, name: Phase) -> None:
        self._timer, self._phase = timer, name

    def __enter__(self) -> None:
        self._phase = self._timer.switch_phase(self._phase)

    def __exit__(self, *_: object) -> None:
        self._timer.switch_phase(self._phase)


def mark_phase(name: Phase) -> None:
    """Attribute time from now on to ``name``, for hooks that cannot share a context manager."""
    timer = _open
    if timer is not None and timer.is_measuring:
        timer.switch_phase(name)


def backward(loss: Tensor) -> None:
    """Run ``loss.backward()`` for a scalar loss of a model wrapped in DistributedDataParallel.

    Once the last gradient has been computed, the rest of the pass counts as communication. At that point autograd runs
    the queued callbacks: first the change of phase, then that of DDP's reducer, which waits for its buckets.
    """
    timer = _open
    if timer is None or not timer.is_measuring:
        loss.backward()  # type: ignore[no-untyped-call]
        return

    def switch_to_communication() -> None:
        timer.switch_phase("communication")

    loss.register_hook(lambda _: Variable._execution_engine.queue_callback(switch_to_communication))  # type: ignore[no-untyped-call]
    before = timer.switch_phase("compute")
    loss.backward()  # type: ignore[no-untyped-call]
    timer.switch_phase(before)


def time_buffers(module: DistributedDataParallel) -> None:
    """Attribute the buffer broadcast of ``module``, before it calls its model, to communication."""
    if any(True for _ in module.buffers()):
        module.register_forward_pre_hook(lambda *_: mark_phase("communication"))
        module.module.register_forward_pre_hook(lambda *_: mark_phase("compute"), prepend=True)


def __getattr__(name: str) -> Any:
    """Provide names that moved to :mod:`worldsize.collectives.group`, for one more release."""
    return resolve_renamed(__name__, name)
