"""Measures the time breakdown of a step: computing, waiting for other processes, and updating parameters.

A step begins as "compute". Code that updates parameters runs inside ``with phase("update")``. Code that waits for
other processes calls ``wait(work)``, or runs inside ``with phase("communication")``. Only waiting counts as
communication: a collective that runs behind a computation costs no time.

Nothing in PyTorch is patched. Where PyTorch itself waits, its hooks mark the wait:

============================== =====================================================================================
DistributedDataParallel        :func:`backward` for the gradients, :func:`time_buffers` for the buffers
``fully_shard``                :mod:`worldsize.collectives.timed_sharding`
tensor parallelism, pipelines  :mod:`worldsize.strategies.mesh.stage`
============================== =====================================================================================

A wait without any of these counts as the phase in which it happens. docs/observing.md lists what is not separated.

On CUDA time is taken by events on the stream of the step, and nothing here waits for them.

:func:`connect` connects the ranks of new groups that exchange data in most collectives, where gloo would do so only
later. The open timer of a process is a module variable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.peer_waits import INTERRUPTION
from worldsize.devices import backend_names
from worldsize.world.world import connects_late

Phase = Literal["compute", "communication", "update"]
PHASES: tuple[Phase, ...] = ("compute", "communication", "update")


@final
@dataclass
class _StepTimes:
    """The times at which the phase of one step changed."""

    data: float  # seconds that the step waited for its data
    marks: list[tuple[Any, Phase]] = field(default_factory=list)  # a time or CUDA event, and the phase that began then

    def split(self, between: Callable[[Any, Any], float]) -> list[float]:
        seconds = dict.fromkeys(PHASES, 0.0)
        for (begun, phase), (ended, _) in zip(self.marks, self.marks[1:], strict=False):
            seconds[phase] += between(begun, ended)
        return [self.data, *seconds.values()]


@final
class StepTimer:
    """Measures steps on ``device``, each from :meth:`start` to :meth:`end`. A process has one open timer at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._now: Callable[[], Any] = self._event if self._stream else time.perf_counter
        self._thread = threading.get_ident()
        self._step: _StepTimes | None = None
        self._done: list[_StepTimes] = []
        self._before: list[_StepTimes] = []  # on CUDA: the steps that ended before the last call of take()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Receive the phases that code marks inside the context."""
        global _open
        _open = self
        try:
            yield
        finally:
            _open = None

    def start(self, *, data: float) -> None:
        """Begin to measure a step that has waited ``data`` seconds for its data."""
        self._step = _StepTimes(data)
        self.switch("compute")

    def end(self) -> None:
        """End the step that was begun, if one was, and keep its times for :meth:`take`."""
        if self._step is not None:
            self.switch("compute")
            self._done.append(self._step)
            self._step = None

    def take(self) -> Tensor:
        """Return the seconds of data and of each of :data:`PHASES`: float64 (steps, 4), a row for each measured step.

        On the CPU these are the steps since the last call. On CUDA they are the steps that ended before the last call:
        the device has completed them by now, so that nothing has to wait for it.
        """
        ready, self._before = (self._before, self._done) if self._stream else (self._done, [])
        self._done = []
        between = _device_seconds if self._stream else _seconds
        return torch.tensor([step.split(between) for step in ready], dtype=torch.float64).view(-1, 1 + len(PHASES))

    def switch(self, phase: Phase) -> Phase:
        """Begin ``phase`` and return the phase before it."""
        if self._step is None:
            return phase
        marks = self._step.marks
        before = marks[-1][1] if marks else "compute"
        marks.append((self._now(), phase))
        return before

    def hears(self) -> bool:
        """Return whether a step is being measured and the calling thread computes it.

        It is the thread that made the timer, or one in which CUDA's backward pass runs.
        """
        if self._step is None or threading.get_ident() == self._thread:
            return self._step is not None
        # autograd's threads are not started by Python
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


_open: StepTimer | None = None  # a global: hooks also run in autograd's threads, which see no context variables


def phase(name: Phase) -> AbstractContextManager[None]:
    """Count the time inside the context as ``name``, except that of phases nested in it."""
    timer = _open
    return _switched(timer, name) if timer is not None and timer.hears() else _UNMEASURED


_UNMEASURED = nullcontext()  # ten times cheaper than a generator, where frames are small and many


@contextmanager
def _switched(timer: StepTimer, name: Phase) -> Iterator[None]:
    before = timer.switch(name)
    try:
        yield
    finally:
        timer.switch(before)


def mark(name: Phase) -> None:
    """Count the time from now on as ``name``, for pairs of hooks that cannot share a context manager."""
    timer = _open
    if timer is not None and timer.hears():
        timer.switch(name)


def started(work: Work | None) -> Work:
    """Return a collective that was started with ``async_op=True``, whose group is kept until it ends if a gang heals.

    Any exception may come before the :func:`wait` for it.
    """
    assert work is not None, "only members of the group take part"
    INTERRUPTION.started(work)
    return work


def wait(work: Work | None) -> None:
    """Wait for a collective that was started with ``async_op=True``, and count the wait as communication."""
    assert work is not None, "only members of the group take part"
    timer = _open
    if timer is None or not timer.hears():
        INTERRUPTION.wait(work)
        return
    before = timer.switch("communication")
    try:
        INTERRUPTION.wait(work)
    finally:
        timer.switch(before)


def send(tensor: Tensor, group: ProcessGroup, *, to: int) -> None:
    """Send a tensor of any shape to rank ``to`` of ``group``, which receives it, and count that as communication."""
    with phase("communication"):
        INTERRUPTION.call(lambda: dist.send(tensor, group=group, group_dst=to))


def receive(tensor: Tensor, group: ProcessGroup, *, source: int) -> None:
    """Fill a tensor of any shape with what rank ``source`` of ``group`` sends, and count that as communication."""
    with phase("communication"):
        INTERRUPTION.call(lambda: dist.recv(tensor, group=group, group_src=source))


def backward(loss: Tensor) -> None:
    """Run ``loss.backward()``, for a scalar loss of a model whose gradients DistributedDataParallel sums.

    The rest of the pass after the last gradient is computed counts as communication. Autograd then runs the queued
    callbacks: first the change of phase, then that of DDP's reducer, which was queued later and waits for its buckets.
    """
    timer = _open
    if timer is None or not timer.hears():
        loss.backward()  # type: ignore[no-untyped-call]
        return

    def computed() -> None:
        timer.switch("communication")

    loss.register_hook(lambda _: Variable._execution_engine.queue_callback(computed))  # type: ignore[no-untyped-call]
    before = timer.switch("compute")
    loss.backward()  # type: ignore[no-untyped-call]
    timer.switch(before)


def time_buffers(module: DistributedDataParallel) -> None:
    """Count the broadcast of buffers, which ``module`` does before it calls its model, as communication."""
    if any(True for _ in module.buffers()):
        module.register_forward_pre_hook(lambda *_: mark("communication"))
        module.module.register_forward_pre_hook(lambda *_: mark("compute"), prepend=True)


def connect(groups: Iterable[ProcessGroup]) -> None:
    """Connect the ranks of each group of gloo that exchange data in rings and trees, unless all are connected already.

    All members of the groups must call it. Such collectives are also waited for by torch itself, and nothing ends its
    wait for a rank that dies before it is connected; this wait ends when the gang does. Collectives between all pairs
    of ranks, and messages, are waited for in the same way.
    """
    if connects_late():
        own = [group for group in groups if set(backend_names(dist.get_backend(group))) == {"gloo"}]
        # a barrier is between ranks whose distance is a power of two, as rings and trees are
        for work in [started(dist.barrier(group, async_op=True)) for group in own]:
            INTERRUPTION.wait(work)
