"""Sends large payloads between two processes of a host through shared memory, twice as fast as through a socket.

The memory is an anonymous file that one process creates and passes to its peer over their Unix socket; no third process
can open it. The peer accepts it only if it has the expected size and is sealed against resizing, since reading memory
that was cut off would kill the reader.
"""

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

from worldsize.net.frames import RefusedError

MIN_BYTES = 1 << 18  # of a payload; the kernel copies fewer bytes in less time than it takes to wake the peer
SPIN_SECONDS = 2e-4  # how long to poll for data before sleeping; waking up takes a good part of that
_SLOT_BYTES, _SLOTS = 1 << 20, 4  # fit the processor's cache, where the receiver finds what the sender wrote
_DIRECTION_BYTES = _SLOT_BYTES * _SLOTS
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, _SEALS[0])  # on Linux


@final
class SharedMemoryChannel:
    """One direction of a connection through shared memory.

    The sender fills the slots of ``memory`` in turn and the receiver empties them. Each notifies the other with a byte
    on ``signals``, a socket that closes when the peer ends.

    Args:
        memory: uint8 (slots, bytes of a slot).
        signals: This process's end of a socket pair.
        ready: Number of slots usable before the peer's first byte: all of them at the sender, 0 at the receiver.
    """

    def __init__(self, memory: NDArray[numpy.uint8], signals: socket.socket, *, ready: int) -> None:
        self._memory, self.signals = memory, signals
        self._arrivals = select.poll()
        self._arrivals.register(signals, select.POLLIN)
        self._turn, self._ready = 0, ready

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send one payload. Raises OSError if the peer has gone."""
        for piece in _pieces(parts):
            slot = self._next_slot()
            for start, part in piece:
                slot[start : start + part.nbytes] = numpy.frombuffer(part, numpy.uint8)
            self.signals.send(b"\0")

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Receive one payload, which ``parts`` hold exactly. Raises OSError if the peer has gone."""
        for piece in _pieces(parts):
            slot = self._next_slot()
            for start, part in piece:
                numpy.frombuffer(part, numpy.uint8)[:] = slot[start : start + part.nbytes]
            self.signals.send(b"\0")

    def _next_slot(self) -> NDArray[numpy.uint8]:
        if not self._ready:
            until = time.perf_counter() + SPIN_SECONDS
            while time.perf_counter() < until and not self._arrivals.poll(0):
                pass
            self._ready = len(self.signals.recv(_SLOTS))
            if not self._ready:
                raise ConnectionError("the peer closed the connection")
        self._ready -= 1
        self._turn = (self._turn + 1) % _SLOTS
        slot: NDArray[numpy.uint8] = self._memory[self._turn]
        return slot


Pair = tuple[SharedMemoryChannel, SharedMemoryChannel]  # for sending and for receiving


def _pieces(parts: Sequence[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """Cut ``parts`` into pieces that fit a slot; each piece lists its parts with their offsets in the slot."""
    piece: list[tuple[int, memoryview]] = []
    used = 0
    for part in parts:
        while part.nbytes:
            head, part = part[: _SLOT_BYTES - used], part[_SLOT_BYTES - used :]
            piece.append((used, head))
            used += head.nbytes
            if used == _SLOT_BYTES:
                yield piece
                piece, used = [], 0
    if piece:
        yield piece


def offer_shared_memory(connection: socket.socket) -> Pair:
    """Create shared memory and pass it to the peer of a Unix socket, which calls :func:`accept_shared_memory`.

    Raises:
        OSError: The peer has gone, or there is not enough memory.
    """
    memory = os.memfd_create("worldsize", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 2 * _DIRECTION_BYTES)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _seals())
    here, there = zip(socket.socketpair(), socket.socketpair(), strict=True)
    socket.send_fds(connection, [b"\0"], [memory, *(signals.fileno() for signals in there)])
    for signals in there:
        signals.close()
    first, second = _mapped(memory)
    os.close(memory)
    return SharedMemoryChannel(first, here[0], ready=_SLOTS), SharedMemoryChannel(second, here[1], ready=0)


def accept_shared_memory(connection: socket.socket) -> Pair:
    """Map the memory that the peer offers by :func:`offer_shared_memory`.

    Raises:
        RefusedError: The peer sent something else, or memory that could shrink.
    """
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3, socket.MSG_CMSG_CLOEXEC)
    try:
        memory, *lines = descriptors
        sealed = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
        if len(lines) != 2 or os.fstat(memory).st_size != 2 * _DIRECTION_BYTES or sealed & _seals() != _seals():
            raise RefusedError("the memory that a worker shares has the wrong size, or could shrink")
        theirs, ours = _mapped(memory)
        there, back = (socket.fromfd(line, socket.AF_UNIX, socket.SOCK_STREAM) for line in lines)
        return SharedMemoryChannel(ours, back, ready=_SLOTS), SharedMemoryChannel(theirs, there, ready=0)
    except (OSError, ValueError) as error:
        raise RefusedError(f"a worker shares no memory: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)


def _mapped(memory: int) -> tuple[NDArray[numpy.uint8], NDArray[numpy.uint8]]:
    """Map the memory and return its two directions, each uint8 (slots, bytes of a slot)."""
    mapped = numpy.frombuffer(mmap.mmap(memory, 2 * _DIRECTION_BYTES), numpy.uint8).reshape(2, _SLOTS, _SLOT_BYTES)
    return mapped[0], mapped[1]
