"""Collectives and messages of a process group, with timed, interruptible waits.

Waits end with the gang's membership. :func:`start_collective` starts a torch collective, and :meth:`Collective.wait`
waits for it. The collective is tracked until then: an exception may occur in between, and the group must not be freed
before the wait. :func:`send` and :func:`receive` exchange single messages.

If a peer dies before it has received a whole message, gloo itself would wait until the group's timeout: when a
connection ends, it notifies receivers, but not senders with a message in the transmit queue. The waits here end with
the membership even in this case.

Each process has one ``INTERRUPTION`` and one ``PEER_WAIT``. For hang detection, ``PEER_WAIT`` stores the description
and start time of the current wait for other processes outside of collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_any
from datetime import timedelta
from functools import partial
from typing import ParamSpec, Self, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from worldsize.collectives.step_timer import measure_phase
from worldsize.devices import backend_names
from worldsize.world.world import connects_late

_P = ParamSpec("_P")
_UNLIMITED = timedelta()
_SLICE = timedelta(seconds=0.02)  # time between two checks whether the membership has ended


@final
class Interruption:
    """Ends the waits of this process when its membership in the gang ends; one per process."""

    def __init__(self) -> None:
        self._check: Callable[[], None] | None = None
        self._longest = 0.0  # maximum seconds per wait
        self._keeps = False
        self._in_flight: set[Work] = set()

    def start_tracking(self, check: Callable[[], None] | None, *, longest: float) -> None:
        """Track collectives from now on.

        A wait ends if ``check`` raises, or after ``longest`` seconds. If ``check`` is None, waits end by other means,
        such as those of NCCL when it is aborted.
        """
        self._check, self._longest, self._keeps = check, longest, True

    def track_work(self, work: Work) -> None:
        """Track a collective until it is waited for, so that :meth:`pop_unfinished` finds it."""
        if self._keeps:
            self._in_flight.add(work)

    def wait(self, work: Work) -> None:
        """Wait for a collective; raise its error, the check's, or RuntimeError on timeout."""
        if self._check is not None:
            self.track_work(work)
            self._poll_until_ended(partial(_has_ended, work), self._check)
        self._in_flight.discard(work)
        work.wait()  # returns immediately if it has ended

    def run_exchange(self, exchange: Callable[[], object]) -> None:
        """Call ``exchange`` to exchange messages with a peer; wait as for a collective.

        A separate thread makes the blocking call. The wait cannot be split into short retries, since gloo closes a
        group's connections on timeout, and it may include the time until the peer has connected.
        """
        if self._check is None:
            exchange()
            return
        outcome: Future[None] = Future()
        arguments = (exchange, outcome, torch.is_inference_mode_enabled())
        threading.Thread(target=_tell_end, args=arguments, daemon=True, name="message").start()
        self._poll_until_ended(lambda: bool(wait_for_any([outcome], _SLICE.total_seconds()).done), self._check)
        outcome.result()

    def _poll_until_ended(self, has_ended: Callable[[], bool], check: Callable[[], None]) -> None:
        """Poll ``has_ended``, and call ``check`` in between, which may raise an error."""
        begun = time.monotonic()
        while not has_ended():
            check()
            if time.monotonic() - begun > self._longest:
                raise RuntimeError(f"timed out after {self._longest:g} s waiting for a peer")

    def pop_unfinished(self) -> list[Work]:
        """Pop unfinished collectives. The caller must wait for them before destroying their groups."""
        started, self._in_flight = self._in_flight, set()
        return [work for work in started if not work.is_completed()]


INTERRUPTION = Interruption()


@final
class Collective(Work):
    """A collective started with ``async_op=True``, tracked until :meth:`wait`."""

    def __init__(self, work: Work | None) -> None:
        assert work is not None, "only members of the group take part"
        super().__init__()
        self._work = work
        INTERRUPTION.track_work(work)

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """Wait, counting the time as communication; ``cluster.timeout`` replaces ``timeout``."""
        with measure_phase("communication"):
            INTERRUPTION.wait(self._work)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


def start_collective(operation: Callable[_P, Work | None], *args: _P.args, **options: _P.kwargs) -> Collective:
    """Start a torch collective in the background.

    >>> work = start_collective(dist.all_reduce, row_n, group=group)
    >>> work.wait()
    """
    options["async_op"] = True
    return Collective(operation(*args, **options))


def wait(work: Work | None) -> None:
    """Wait for a collective. Deprecated; use :func:`start_collective`."""
    Collective(work).wait()


def send(tensor: Tensor, group: ProcessGroup, *, to: int) -> None:
    """Send a tensor of any shape to rank ``to`` of ``group``; the time counts as communication."""
    with measure_phase("communication"):
        INTERRUPTION.run_exchange(partial(dist.send, tensor, group=group, group_dst=to))


def receive(tensor: Tensor, group: ProcessGroup, *, source: int) -> None:
    """Receive into a tensor of any shape from ``source``; the time counts as communication."""
    with measure_phase("communication"):
        INTERRUPTION.run_exchange(partial(dist.recv, tensor, group=group, group_src=source))


def connect_groups(groups: Iterable[ProcessGroup]) -> None:
    """Connect the ranks of each gloo group for ring and tree collectives, if not yet connected.

    All members of the groups must call it. torch itself also waits for such collectives, and its wait for a rank that
    dies before connecting would never end; the wait here ends with the membership. All-to-all collectives and single
    messages connect in waits that end with it anyway.
    """
    if connects_late():
        own = [group for group in groups if set(backend_names(dist.get_backend(group))) == {"gloo"}]
        # a barrier connects ranks whose distance is a power of two, like rings and trees
        for work in [start_collective(dist.barrier, group) for group in own]:
            work.wait()


def _has_ended(work: Work) -> bool:
    try:
        work.wait(_SLICE)
    except RuntimeError:  # an error of the collective, or a timeout
        return work.is_completed()
    return True


def _tell_end(exchange: Callable[[], object], outcome: Future[None], is_inference: bool) -> None:
    try:
        with torch.inference_mode(is_inference):  # as in the calling thread; filling inference tensors requires it
            exchange()
        outcome.set_result(None)
    except Exception as error:  # the waiting thread raises it
        outcome.set_exception(error)


@final
class PeerWait:
    """The main thread's current wait for a message or for other processes; one per process.

    Other threads are ignored, since a server's threads always wait for requests. :meth:`name_wait` is not a generator,
    since entering a generator-based context takes longer than many messages.

    >>> with PEER_WAIT.name_wait("the message WEIGHTS of a peer"):
    ...     what, seconds = PEER_WAIT.get_open_wait()
    """

    def __init__(self) -> None:
        self._open: tuple[str, float] | None = None

    def name_wait(self, what: str) -> Self:
        """Return a context in which the calling thread waits for ``what``; contexts do not nest."""
        if _is_main_thread():
            self._open = what, time.monotonic()
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if _is_main_thread():
            self._open = None

    def get_open_wait(self) -> tuple[str, float] | None:
        """Return the description of the current wait and its seconds so far; None if there is none."""
        if (wait := self._open) is None:
            return None
        what, since = wait
        return what, time.monotonic() - since


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


PEER_WAIT = PeerWait()
