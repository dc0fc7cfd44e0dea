"""Where the time of a step goes: one clock a process, which says what a step is busy with at each moment.

A step begins as "compute". What updates parameters says so, ``with phase("update")``. Waiting for other processes is
"communication" wherever PyTorch waits in Python (:data:`_WAITS` has the places), so that strategies and plugins need
no marks of their own for it; what waits by other means says ``with phase("communication")``. Only waiting counts:
communication that goes on behind a computation costs no time.

On CUDA a moment is an event on the stream of the step, and nothing waits for it here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import Work
from torch.distributed import _functional_collectives as functional

Phase = Literal["compute", "communication", "update"]
PHASES: tuple[Phase, ...] = ("compute", "communication", "update")

# where Python waits for a collective; a reducer in C++ waits at the end of a backward pass, see backward()
_WAITS: tuple[tuple[Any, str], ...] = (
    (Work, "wait"),
    (torch.futures.Future, "wait"),
    (functional, "wait_tensor"),
    (functional, "wait_tensors"),
    (dist, "_broadcast_coalesced"),
)


@final
@dataclass
class _Step:
    """``data``: seconds for which its data were waited for; ``marks``: moments, and what began there."""

    data: float
    marks: list[tuple[Any, Phase]] = field(default_factory=list)

    def split(self, between: Callable[[Any, Any], float]) -> list[float]:
        seconds = dict.fromkeys(PHASES, 0.0)
        for (begun, phase), (ended, _) in zip(self.marks, self.marks[1:], strict=False):
            seconds[phase] += between(begun, ended)
        return [self.data, *seconds.values()]


@final
class Clock:
    """Measures steps, from :meth:`start` to :meth:`end`, on ``device``; one of a process is open at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._now: Callable[[], Any] = self._event if self._stream else time.perf_counter
        self._thread = threading.get_ident()
        self._step: _Step | None = None
        self._done: list[_Step] = []
        self._before: list[_Step] = []  # on CUDA: of the call of take() before

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within, :func:`phase` is heard, and PyTorch's waits are timed."""
        global _open
        kept = [(place, name, getattr(place, name)) for place, name in _WAITS]
        for place, name, wait in kept:
            setattr(place, name, _timed(wait))
        _open = self
        try:
            yield
        finally:
            _open = None
            for place, name, wait in kept:
                setattr(place, name, wait)

    def start(self, *, data: float) -> None:
        """A step begins, whose data were waited for ``data`` seconds."""
        self._step = _Step(data)
        self.switch("compute")

    def end(self) -> None:
        if self._step is not None:
            self.switch("compute")
            self._done.append(self._step)
            self._step = None

    def take(self) -> Tensor:
        """float64 [steps, 4]: seconds of data and of :data:`PHASES`, of each step that ended since the last call.

        On CUDA since the call before that, up to the last: the device has passed those steps if it has passed what
        came after them, and is not waited for.
        """
        ready, self._before = (self._before, self._done) if self._stream else (self._done, [])
        self._done = []
        between = _device_seconds if self._stream else _seconds
        return torch.tensor([step.split(between) for step in ready], dtype=torch.float64).view(-1, 1 + len(PHASES))

    def switch(self, phase: Phase) -> Phase:
        """From now on it is ``phase``; what it was before."""
        if self._step is None:
            return phase
        marks = self._step.marks
        before = marks[-1][1] if marks else "compute"
        marks.append((self._now(), phase))
        return before

    def hears(self) -> bool:
        """Whether a step is measured, and this thread computes it: that of the clock, or one of CUDA's backward."""
        if self._step is None or threading.get_ident() == self._thread:
            return self._step is not None
        # a thread that Python has not started
        return self._stream is not None and isinstance(threading.current_thread(), threading._DummyThread)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _seconds(begun: float, ended: float) -> float:
    return ended - begun


def _device_seconds(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    milliseconds: float = begun.elapsed_time(ended)
    return milliseconds / 1e3


_open: Clock | None = None


def phase(name: Phase) -> AbstractContextManager[None]:
    """What is done within counts as ``name``, unless something inside says otherwise."""
    clock = _open
    return _switched(clock, name) if clock is not None and clock.hears() else _UNHEARD


_UNHEARD = nullcontext()  # costs a tenth of a generator, where frames are small and many


@contextmanager
def _switched(clock: Clock, name: Phase) -> Iterator[None]:
    before = clock.switch(name)
    try:
        yield
    finally:
        clock.switch(before)


def backward(loss: Tensor) -> None:
    """``loss.backward()`` of a model whose gradients a reducer in C++ sums, such as DistributedDataParallel's.

    What is left once the last gradient is there is communication: the engine calls back when it has computed all,
    and the reducer, which asked later for the same, waits after that.
    """
    clock = _open
    if clock is None or not clock.hears():
        loss.backward()  # type: ignore[no-untyped-call]
        return

    def computed() -> None:
        clock.switch("communication")

    loss.register_hook(lambda _: Variable._execution_engine.queue_callback(computed))  # type: ignore[no-untyped-call]
    before = clock.switch("compute")
    loss.backward()  # type: ignore[no-untyped-call]
    clock.switch(before)


def _timed(wait: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wait)
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock = _open
        if clock is None or not clock.hears():
            return wait(*args, **kwargs)
        before = clock.switch("communication")
        try:
            return wait(*args, **kwargs)
        finally:
            clock.switch(before)

    return timed
