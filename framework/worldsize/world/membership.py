"""Lets a process of a gang learn, from its launching process, that the gang has other members from now on."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any, Protocol, Self, final

from worldsize.errors import WorldsizeError
from worldsize.strict_json import parse

_logger = logging.getLogger(__name__)

NEWCOMER = -1  # the step of a process that has no state yet
_DETECTION = 5.0  # seconds within which a launching process notices that one that it has started is dead
_STARTING = 60.0  # seconds that a process may take from its fork until it is ready to train
_LONGEST = 1 << 20  # bytes of a message
_SETTLED = 3  # the step of a membership at whose beginning all that is made once, such as DDP's buckets, is made
_STUCK = 2.0  # seconds without computing after which a process that was told to stop is stuck
_BUSY = 0.01  # seconds of computing in between that show that it is not
_WAITS_FOR_PEERS = re.compile(r"(torch|worldsize)\.(?!utils\.data|train|data|world\.)")  # modules
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|timeout|socket", re.IGNORECASE
)
_GONE_PEER = re.compile(
    r"(gloo|nccl).*(connection (closed|reset)|broken pipe|remote process exited|timed out|timeout)",
    re.IGNORECASE | re.DOTALL,
)

Message = Mapping[str, Any]


class Pipe(Protocol):
    """A connection of multiprocessing, or one like it that leads to a process on another host."""

    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...
    def send_bytes(self, data: bytes, /) -> None: ...
    def recv_bytes(self, maxlength: int, /) -> bytes: ...


class MembershipEndedError(WorldsizeError):
    """The gang has other members from now on."""


@final
@dataclass(frozen=True)
class Membership:
    """The processes that train together, until one of them dies or leaves, or another joins.

    Attributes:
        number: Number of this membership in this attempt, from 1.
        members: Global ranks of the members, those of the membership before first. Their ranks are their places here.
        steps: The last step that each member has completed; NEWCOMER: it has no state.
        lost: Global ranks of those that died since the membership before, and why.
        asked: Global ranks of those that join or leave on request, and who asked.
        waiting: Global ranks of those that trained, and are too many for whole blocks: they hand over what they keep of
            the state, and wait.
    """

    number: int
    members: tuple[int, ...]
    steps: tuple[int, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    asked: Mapping[int, str] = field(default_factory=dict)
    waiting: tuple[int, ...] = ()

    @property
    def source(self) -> int | None:
        """The rank of the first member with the newest state; None: no member has any."""
        newest = max(self.steps, default=NEWCOMER)
        return None if newest == NEWCOMER else self.steps.index(newest)

    @property
    def behind(self) -> list[int]:
        """The ranks of the members that have an older state, or none."""
        newest = max(self.steps, default=NEWCOMER)
        return [rank for rank, step in enumerate(self.steps) if step < newest]

    def message(self) -> Message:
        """Return the membership as JSON, for :meth:`read`."""
        lost, asked = ({str(rank): text for rank, text in each.items()} for each in (self.lost, self.asked))
        ranks = {"members": list(self.members), "steps": list(self.steps), "waiting": list(self.waiting)}
        return {"form": self.number, **ranks, "lost": lost, "asked": asked}

    @staticmethod
    def read(message: Message) -> Membership:
        """Read what :meth:`message` returned."""
        lost, asked = ({int(rank): str(text) for rank, text in message[key].items()} for key in ("lost", "asked"))
        members, steps, waiting = (tuple(message[key]) for key in ("members", "steps", "waiting"))
        return Membership(int(message["form"]), members, steps, lost, asked, waiting)


def send(pipe: Pipe, message: Message) -> None:
    """Send a message; raise OSError if the other end is gone."""
    pipe.send_bytes(json.dumps(message).encode())


def receive(pipe: Pipe) -> Message:
    """Wait for a message.

    Raises:
        OSError, EOFError: the other end is gone.
        ValueError: this is no message.
    """
    message = parse(pipe.recv_bytes(_LONGEST), at_most=_LONGEST)
    if not isinstance(message, dict):
        raise ValueError("a message is an object")
    return message


@final
class MembershipChannel:
    """The end of a process's pipe to its launching process, on which it learns of changes.

    The launching process sends ``{"stop": n}`` when membership ``n`` ends, upon which all communication of this process
    is cut; the process answers with its step, ``{"stopped": n, "step": s}``, and receives the next membership.

    Args:
        pipe: The pipe.
        patience: Seconds within which a new membership begins.
        detection: Seconds within which the launching process notices that a peer is lost.
    """

    def __init__(self, pipe: Pipe, *, patience: float, detection: float) -> None:
        self._pipe, self._patience, self._detection = pipe, patience, detection
        self._formed: Queue[Membership] = Queue()
        self._has_ended = threading.Event()  # the membership
        self._cut: Callable[[], None] = lambda: None
        self._has_stopped = threading.Event()  # and waits for the next membership
        self._steps = 0  # that this process has begun in the membership
        self._is_over = False  # this process needs no other any more
        self._number = 0  # of the membership that this process belongs to, or belonged to last
        threading.Thread(target=self._listen, daemon=True, name="membership").start()

    @classmethod
    def of(cls, pipe: Pipe, timeout: float) -> Self:
        """Return the channel of a gang whose members wait ``timeout`` seconds for each other."""
        return cls(pipe, patience=timeout + _STARTING, detection=_DETECTION)

    @property
    def has_ended(self) -> bool:
        """Whether the membership of this process has ended, so that it should stop at once."""
        return self._has_ended.is_set()

    def begin(self, number: int, cut: Callable[[], None]) -> None:
        """Record that this process belongs to membership ``number``, whose communication ``cut`` ends."""
        self._number, self._cut, self._steps = number, cut, 0
        if self.has_ended:
            cut()

    def finish(self) -> None:
        """Record that this process has done all that it needs others for, so that their end does not matter."""
        self._is_over = True

    def is_cause_of(self, error: Exception) -> bool:
        """Return whether ``error`` was raised since the membership has ended or a peer is lost, not by the program."""
        return self.has_ended or (_tells_of_lost_peer(error) and self._tell_lost())

    def check(self) -> None:
        """Raise MembershipEndedError if the membership has ended."""
        if self.has_ended:
            raise MembershipEndedError("the gang has other members from now on")

    def next(self, step: int, *, is_spare: bool = False) -> Membership:
        """Answer that this process has stopped after ``step``, and wait for the next membership.

        One that has belonged to none yet, or ``is_spare`` now, waits for as long as its launching process lives.

        Raises:
            WorldsizeError: none comes.
        """
        self._has_stopped.set()
        self._cut()
        self._say(stopped=self._number, step=step)
        try:
            membership = self._formed.get(timeout=self._patience if self._number and not is_spare else None)
        except Empty:
            raise WorldsizeError(
                f"membership {self._number} has ended, and no other has begun for {self._patience:g} s."
            ) from None
        return membership

    def begin_step(self, done: int) -> None:
        """Record that the step after ``done`` steps begins; raise MembershipEndedError if the membership has ended."""
        self._steps += 1
        if self._steps == 1:
            self._say(began=self._number, first=done)
        if self._steps == _SETTLED:
            self._say(trained=self._number)
        self.check()

    def _tell_lost(self) -> bool:
        """Report that a peer is lost; return whether the launching process ends the membership for it."""
        self._cut()  # peers that wait for this process go on, too
        self._say(lost=self._number)
        return self._has_ended.wait(self._detection)

    def _say(self, **message: Any) -> None:
        with suppress(OSError):  # the launching process is gone, and this one will be
            send(self._pipe, message)

    def _end_if_stuck(self) -> None:
        """End this process if its main thread only waits for peers, though it was told to stop; the others go on.

        There are waits, of gloo and others, that nothing ends before their timeout. One that waits for something else,
        such as data or a disk, has until the launching process counts it as hung.
        """
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        used, since = time.clock_gettime(clock), time.monotonic()
        while not self._is_over and not self._has_stopped.wait(_STUCK / 8):
            self._cut()  # what has been connected since
            now = time.clock_gettime(clock)
            if now - used > _BUSY or not _waits_for_peers():
                used, since = now, time.monotonic()
            elif time.monotonic() - since > _STUCK:
                _logger.error("this process does not stop: it waits for something that does not come")
                faulthandler.dump_traceback()
                os.kill(os.getpid(), signal.SIGKILL)

    def _listen(self) -> None:
        with suppress(OSError, EOFError, ValueError):
            while True:
                message = receive(self._pipe)
                if "stop" in message:
                    self._has_ended.set()
                    self._cut()
                    self._end_if_stuck()
                else:
                    membership = Membership.read(message)
                    self._has_ended.clear()
                    self._has_stopped.clear()
                    self._formed.put(membership)


def _waits_for_peers() -> bool:
    """Return whether the main thread is in a function of torch, or in one of the modules here that call collectives."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and _WAITS_FOR_PEERS.match(str(frame.f_globals.get("__name__"))) is not None


def is_from_gone_peer(error: BaseException) -> bool:
    """Return whether a collective of torch raised ``error`` because a peer is gone or silent.

    The launching process is not asked to confirm it, so errors of the program's own connections do not count.
    """
    return isinstance(error, RuntimeError) and _GONE_PEER.search(str(error)) is not None


def _tells_of_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or what caused it, reads like that of communication."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if isinstance(seen, RuntimeError | OSError) and _LOST_PEER.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
