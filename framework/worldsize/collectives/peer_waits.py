"""Waits for other processes: ends them when the gang ends, and records those outside of collectives.

A message to a peer that dies before all of it is sent is waited for until the timeout of the group: when a connection
ends, gloo notifies those who wait for the receipt of a message, but not those whose message is in the transmit queue.
So a wait for a collective of gloo ends with the gang, even where gloo itself would not end it.

There is one ``INTERRUPTION`` and one ``PEER_WAIT`` in a process. ``PEER_WAIT`` holds the open wait for another process
outside of collectives, and its start, for whoever looks for hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_any
from datetime import timedelta
from functools import partial
from typing import Self, final

import torch
from torch.distributed import Work

_SLICE = timedelta(seconds=0.02)  # time between two looks at whether the gang has ended


@final
class Interruption:
    """Whether the waits of this process end when its gang does; there is one in a process."""

    def __init__(self) -> None:
        self._check: Callable[[], None] | None = None
        self._longest = 0.0  # seconds of a wait
        self._keeps = False
        self._in_flight: set[Work] = set()

    def begin(self, check: Callable[[], None] | None, *, longest: float) -> None:
        """Keep what is started from now on, and let waits end when ``check`` raises, or after ``longest`` seconds.

        With None instead of ``check``, waits end by themselves, as those of NCCL do when it is aborted.
        """
        self._check, self._longest, self._keeps = check, longest, True

    def started(self, work: Work) -> None:
        """Keep a collective until it has been waited for, since an exception may come before that."""
        if self._keeps:
            self._in_flight.add(work)

    def wait(self, work: Work) -> None:
        """Wait for a collective; raise what it raises, or what the check does, or RuntimeError if it takes too long."""
        if self._check is not None:
            self.started(work)
            self._watch(partial(_has_ended, work), self._check)
        self._in_flight.discard(work)
        work.wait()  # at once, if it has ended

    def call(self, exchange: Callable[[], object]) -> None:
        """Call what sends messages to one other process or receives them, and wait for it as for a collective.

        Such a wait cannot be tried again, since gloo closes the connections of a group when it times out, and it may
        begin with one for a peer that has not connected yet; so another thread waits, for as long as it takes.
        """
        if self._check is None:
            exchange()
            return
        outcome: Future[None] = Future()
        arguments = (exchange, outcome, torch.is_inference_mode_enabled())
        threading.Thread(target=_tell_end, args=arguments, daemon=True, name="message").start()
        self._watch(lambda: bool(wait_for_any([outcome], _SLICE.total_seconds()).done), self._check)
        outcome.result()

    def _watch(self, has_ended: Callable[[], bool], check: Callable[[], None]) -> None:
        """Ask again and again whether something has ended, and let ``check`` raise in between."""
        begun = time.monotonic()
        while not has_ended():
            check()
            if time.monotonic() - begun > self._longest:
                raise RuntimeError(f"timed out: a peer has not answered for {self._longest:g} s")

    def unfinished(self) -> list[Work]:
        """Return the collectives that go on, and forget them; whoever destroys their groups waits for them."""
        started, self._in_flight = self._in_flight, set()
        return [work for work in started if not work.is_completed()]


INTERRUPTION = Interruption()


def _has_ended(work: Work) -> bool:
    try:
        work.wait(_SLICE)
    except RuntimeError:  # that of the work, or that the time is over
        return work.is_completed()
    return True


def _tell_end(exchange: Callable[[], object], outcome: Future[None], is_inference: bool) -> None:
    try:
        with torch.inference_mode(is_inference):  # as where it was called; else it may not fill a tensor made there
            exchange()
        outcome.set_result(None)
    except Exception as error:  # which the thread raises that waits for it
        outcome.set_exception(error)


@final
class PeerWait:
    """The open wait of the main thread for a message or for work of other processes; there is one in a process.

    Other threads are left out: those of a server wait for requests for as long as it lives. It is no generator, which
    would take longer than many a message.

    >>> with PEER_WAIT.during("the message WEIGHTS of a peer"):
    ...     what, seconds = PEER_WAIT.open()
    """

    def __init__(self) -> None:
        self._open: tuple[str, float] | None = None

    def during(self, what: str) -> Self:
        """Return a context in which the calling thread waits for ``what``; contexts do not nest."""
        if _is_main_thread():
            self._open = what, time.monotonic()
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if _is_main_thread():
            self._open = None

    def open(self) -> tuple[str, float] | None:
        """Return what is waited for and for how many seconds; None: for nothing."""
        if (wait := self._open) is None:
            return None
        what, since = wait
        return what, time.monotonic() - since


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


PEER_WAIT = PeerWait()
