"""Large payloads between two processes of a host: through memory that both map, twice as fast as through a socket."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import final

import numpy
from numpy.typing import NDArray

from worldsize.transport.frames import RefusedError

LEAST = 1 << 18  # bytes of a payload; the kernel copies fewer in less time than it takes to wake the peer
_PIECE, _SLOTS = 1 << 20, 4  # small enough for the processor's cache, where the receiver finds what the sender wrote
_SIZE = _PIECE * _SLOTS
POLLED = 2e-4  # seconds in which to stay awake for what is about to come: to be woken takes a good part of them
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, _SEALS[0])  # on Linux


@final
class Lane:
    """One direction. The sender fills slots of ``memory`` (uint8 [slots, bytes]) in turn, the receiver empties them;
    each says so by a byte on ``line``, whose end is the end of the peer.
    """

    def __init__(self, memory: NDArray[numpy.uint8], line: socket.socket) -> None:
        self._memory, self.line = memory, line
        self._arrivals = select.poll()
        self._arrivals.register(line, select.POLLIN)
        self._turn = self._waiting = 0  # slots to be filled by the sender, or to be emptied by the receiver

    @staticmethod
    def sender(memory: NDArray[numpy.uint8], line: socket.socket) -> Lane:
        lane = Lane(memory, line)
        lane._waiting = _SLOTS
        return lane

    def send(self, parts: Sequence[memoryview]) -> None:
        """Raises OSError."""
        for piece in _pieces(parts):
            slot = self._next()
            for start, part in piece:
                slot[start : start + part.nbytes] = numpy.frombuffer(part, numpy.uint8)
            self.line.send(b"\0")

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Receive one payload, which ``parts`` hold exactly. Raises OSError."""
        for piece in _pieces(parts):
            slot = self._next()
            for start, part in piece:
                numpy.frombuffer(part, numpy.uint8)[:] = slot[start : start + part.nbytes]
            self.line.send(b"\0")

    def _next(self) -> NDArray[numpy.uint8]:
        if not self._waiting:
            until = time.perf_counter() + POLLED
            while time.perf_counter() < until and not self._arrivals.poll(0):
                pass
            self._waiting = len(self.line.recv(_SLOTS))
            if not self._waiting:
                raise ConnectionError("the peer closed the connection")
        self._waiting -= 1
        self._turn = (self._turn + 1) % _SLOTS
        slot: NDArray[numpy.uint8] = self._memory[self._turn]
        return slot


def _pieces(parts: Sequence[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """``parts`` cut into what fits a slot: where each part of a piece begins in it."""
    piece: list[tuple[int, memoryview]] = []
    used = 0
    for part in parts:
        while part.nbytes:
            head, part = part[: _PIECE - used], part[_PIECE - used :]
            piece.append((used, head))
            used += head.nbytes
            if used == _PIECE:
                yield piece
                piece, used = [], 0
    if piece:
        yield piece


def offer(connection: socket.socket) -> tuple[Lane, Lane]:
    """What is to be sent and received from now on; the peer is given the other ends, and calls :func:`accept`."""
    memory = os.memfd_create("worldsize", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 2 * _SIZE)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _seals())
    here, there = zip(socket.socketpair(), socket.socketpair(), strict=True)
    socket.send_fds(connection, [b"\0"], [memory, *(line.fileno() for line in there)])
    for line in there:
        line.close()
    first, second = _mapped(memory)
    os.close(memory)
    return Lane.sender(first, here[0]), Lane(second, here[1])


def accept(connection: socket.socket) -> tuple[Lane, Lane]:
    """As the peer of :func:`offer`.

    Raises:
        RefusedError: what came is not what it sends; memory that could shrink would kill who reads it.
    """
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3, socket.MSG_CMSG_CLOEXEC)
    try:
        memory, *lines = descriptors
        sealed = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
        if len(lines) != 2 or os.fstat(memory).st_size != 2 * _SIZE or sealed & _seals() != _seals():
            raise RefusedError("the memory that a worker shares has another size, or could be cut")
        theirs, ours = _mapped(memory)
        there, back = (socket.fromfd(line, socket.AF_UNIX, socket.SOCK_STREAM) for line in lines)
        return Lane.sender(ours, back), Lane(theirs, there)
    except (OSError, ValueError) as error:
        raise RefusedError(f"a worker shares no memory: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)


def _mapped(memory: int) -> tuple[NDArray[numpy.uint8], NDArray[numpy.uint8]]:
    """Of the two directions."""
    mapped = numpy.frombuffer(mmap.mmap(memory, 2 * _SIZE), numpy.uint8).reshape(2, _SLOTS, _PIECE)
    return mapped[0], mapped[1]
