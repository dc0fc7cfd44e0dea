"""Memberships of a healing gang, and the channel that announces them to a process."""

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
from worldsize.strict_json import parse_strict_json

_logger = logging.getLogger(__name__)

NEWCOMER = -1  # step of a process without a state
_DETECTION = 5.0  # seconds within which a launching process notices the death of one of its processes
_STARTING = 60.0  # maximum seconds from the fork of a process until it is ready to train
_LONGEST = 1 << 20  # maximum bytes per message
_SETTLED = 3  # at the start of this step of a membership, one-time setup such as DDP's buckets is complete
_STUCK = 2.0  # seconds without CPU use after which a stopping process counts as stuck
_BUSY = 0.01  # CPU seconds above which it does not count as stuck
_WAITS_FOR_PEERS = re.compile(r"(torch|worldsize)\.(?!utils\.data|loop|data|world\.|healing\.groups)")  # module names
_LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|timeout|socket", re.IGNORECASE
)
_GONE_PEER = re.compile(
    r"(gloo|nccl).*(connection (closed|reset)|broken pipe|remote process exited|timed out|timeout)",
    re.IGNORECASE | re.DOTALL,
)

Message = Mapping[str, Any]


class Pipe(Protocol):
    """Interface of a multiprocessing connection, also of connections to remote hosts."""

    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...
    def send_bytes(self, data: bytes, /) -> None: ...
    def recv_bytes(self, maxlength: int, /) -> bytes: ...


class MembershipEndedError(WorldsizeError):
    """The gang's members have changed, so this membership has ended."""


@final
@dataclass(frozen=True)
class Membership:
    """The processes that train together until one of them dies or leaves, or a new one joins.

    Attributes:
        number: Number of this membership in the attempt, from 1.
        members: Global ranks of the members, former members first; a member's rank is its index in this tuple.
        steps: Each member's last completed step; NEWCOMER for a member without a state.
        lost: Global ranks that died since the previous membership, with reasons.
        asked: Global ranks that join or leave on request, with the source of the request.
        waiting: Global ranks that trained before but do not fit into whole blocks; they transfer their shards of the
            state, and wait as spares.
    """

    number: int
    members: tuple[int, ...]
    steps: tuple[int, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    asked: Mapping[int, str] = field(default_factory=dict)
    waiting: tuple[int, ...] = ()

    @property
    def source(self) -> int | None:
        """Rank of the first member with the newest state; None if no member has a state."""
        newest = max(self.steps, default=NEWCOMER)
        return None if newest == NEWCOMER else self.steps.index(newest)

    @property
    def behind(self) -> list[int]:
        """Ranks of the members that have an older state or none."""
        newest = max(self.steps, default=NEWCOMER)
        return [rank for rank, step in enumerate(self.steps) if step < newest]

    def to_message(self) -> Message:
        """Return the membership as plain values, for :meth:`from_message`."""
        lost, asked = ({str(rank): text for rank, text in each.items()} for each in (self.lost, self.asked))
        ranks = {"members": list(self.members), "steps": list(self.steps), "waiting": list(self.waiting)}
        return {"form": self.number, **ranks, "lost": lost, "asked": asked}

    @staticmethod
    def from_message(message: Message) -> Membership:
        """Create a membership from the values that :meth:`to_message` returned."""
        lost, asked = ({int(rank): str(text) for rank, text in message[key].items()} for key in ("lost", "asked"))
        members, steps, waiting = (tuple(message[key]) for key in ("members", "steps", "waiting"))
        return Membership(int(message["form"]), members, steps, lost, asked, waiting)


def send_message(pipe: Pipe, message: Message) -> None:
    """Send a message; raise OSError if the other end is closed."""
    pipe.send_bytes(json.dumps(message).encode())


def receive_message(pipe: Pipe) -> Message:
    """Wait for a message and return it.

    Raises:
        OSError, EOFError: the other end is closed.
        ValueError: the received bytes are not a message.
    """
    message = parse_strict_json(pipe.recv_bytes(_LONGEST), at_most=_LONGEST)
    if not isinstance(message, dict):
        raise ValueError("invalid message: expected a JSON object")
    return message


@final
class MembershipChannel:
    """A process's end of the pipe that announces new memberships.

    When membership ``n`` ends, the launching process sends ``{"stop": n}``, and all communication of this process is
    cut. The process answers with its step, ``{"stopped": n, "step": s}``, and receives the next membership.

    Args:
        pipe: The pipe.
        patience: Maximum seconds to wait for a new membership.
        detection: Seconds within which the launching process notices the loss of a peer.
    """

    def __init__(self, pipe: Pipe, *, patience: float, detection: float) -> None:
        self._pipe, self._patience, self._detection = pipe, patience, detection
        self._formed: Queue[Membership] = Queue()
        self._has_ended = threading.Event()  # whether the membership has ended
        self._cut: Callable[[], None] = lambda: None
        self._has_stopped = threading.Event()  # whether this process waits for the next membership
        self._steps = 0  # number of steps that this process has started in the membership
        self._is_over = False  # whether this process no longer needs its peers
        self._number = 0  # number of the current or the last membership
        threading.Thread(target=self._receive_messages, daemon=True, name="membership").start()

    @classmethod
    def from_pipe(cls, pipe: Pipe, timeout: float) -> Self:
        """Create a channel for a gang with the collective timeout ``timeout``, in seconds."""
        return cls(pipe, patience=timeout + _STARTING, detection=_DETECTION)

    @property
    def has_ended(self) -> bool:
        """Whether this process's membership has ended, so that it should stop immediately."""
        return self._has_ended.is_set()

    def begin_membership(self, number: int, cut: Callable[[], None]) -> None:
        """Record that this process belongs to membership ``number``; ``cut`` ends its communication."""
        self._number, self._cut, self._steps = number, cut, 0
        if self.has_ended:
            cut()

    def mark_finished(self) -> None:
        """Record that this process no longer needs its peers, so that their exit does not matter."""
        self._is_over = True

    def has_caused(self, error: Exception) -> bool:
        """Return whether the membership's end or a lost peer, not the program, caused ``error``."""
        return self.has_ended or (_tells_of_lost_peer(error) and self._tell_lost())

    def check_membership(self) -> None:
        """Raise MembershipEndedError if the membership has ended."""
        if self.has_ended:
            raise MembershipEndedError("the members of the process group have changed")

    def wait_for_membership(self, step: int, *, is_spare: bool = False) -> Membership:
        """Report that this process stopped after ``step``, and wait for the next membership.

        A spare, or a process that has not belonged to a membership yet, waits without a timeout.

        Raises:
            WorldsizeError: the next membership does not start in time.
        """
        self._has_stopped.set()
        self._cut()
        self._send_message(stopped=self._number, step=step)
        try:
            membership = self._formed.get(timeout=self._patience if self._number and not is_spare else None)
        except Empty:
            raise WorldsizeError(
                f"membership {self._number} ended, but no new membership started within {self._patience:g} s."
            ) from None
        return membership

    def begin_step(self, done: int) -> None:
        """Record the start of the step after ``done``; raise an error if the membership has ended."""
        self._steps += 1
        if self._steps == 1:
            self._send_message(began=self._number, first=done)
        if self._steps == _SETTLED:
            self._send_message(trained=self._number)
        self.check_membership()

    def _tell_lost(self) -> bool:
        """Report a lost peer to the launching process; return whether it then ends the membership."""
        self._cut()  # also ends waits of peers for this process
        self._send_message(lost=self._number)
        return self._has_ended.wait(self._detection)

    def _send_message(self, **message: Any) -> None:
        with suppress(OSError):  # the launching process died, so this one will be killed
            send_message(self._pipe, message)

    def _end_if_stuck(self) -> None:
        """Kill this process if, after the request to stop, it only waits for peers.

        Some waits, in gloo and elsewhere, cannot be ended before their timeout. Other waits, such as for data or disk,
        may last until the launching process considers this process hung.
        """
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        used, since = time.clock_gettime(clock), time.monotonic()
        while not self._is_over and not self._has_stopped.wait(_STUCK / 8):
            self._cut()  # includes connections opened meanwhile
            now = time.clock_gettime(clock)
            if now - used > _BUSY or not _waits_for_peers():
                used, since = now, time.monotonic()
            elif time.monotonic() - since > _STUCK:
                _logger.error("killing this process: it is blocked in a wait that cannot be interrupted")
                faulthandler.dump_traceback()
                os.kill(os.getpid(), signal.SIGKILL)

    def _receive_messages(self) -> None:
        with suppress(OSError, EOFError, ValueError):
            while True:
                message = receive_message(self._pipe)
                if "stop" in message:
                    self._has_ended.set()
                    self._cut()
                    self._end_if_stuck()
                else:
                    membership = Membership.from_message(message)
                    self._has_ended.clear()
                    self._has_stopped.clear()
                    self._formed.put(membership)


def _waits_for_peers() -> bool:
    """Return whether the main thread runs torch, or a worldsize module with collectives."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and _WAITS_FOR_PEERS.match(str(frame.f_globals.get("__name__"))) is not None


def is_from_gone_peer(error: BaseException) -> bool:
    """Return whether a torch collective raised ``error`` because a peer was lost or silent.

    Unlike in :meth:`MembershipChannel.has_caused`, the launching process does not confirm this. The pattern is
    therefore narrower, so that errors from the program's own connections do not match.
    """
    return isinstance(error, RuntimeError) and _GONE_PEER.search(str(error)) is not None


def _tells_of_lost_peer(error: BaseException) -> bool:
    """Return whether the text of an error or one of its causes indicates a communication error."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if isinstance(seen, RuntimeError | OSError) and _LOST_PEER.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
