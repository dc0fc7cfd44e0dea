"""Wire format of channels: a header of 104 bytes, then a payload of the announced size.

Nothing is unpickled. :func:`parse_header` checks that a header is consistent, and :meth:`Header.require_payload` that
it matches the receiver's expectation. Both run before memory for the payload is allocated or any of its bytes are
received.

A protocol defines its operations as an ``IntEnum`` with numbers from 32 to 255; numbers below 32 are reserved for
:class:`CommonOperation`, which is part of every protocol.

Between two processes of a host, large payloads are transferred through shared memory, twice as fast as through a
socket. One process creates the memory as an anonymous file and passes it to its peer over their Unix socket; no third
process can open it. The peer accepts it only with the expected size and sealed against resizing, since reading
truncated memory would kill the reader.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from struct import Struct
from typing import Any, NamedTuple, final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldsize.errors import WorldsizeError
from worldsize.strict_json import parse_strict_json as parse_json

MAGIC = b"wsP2"
LAYOUT = Struct("<4sBBBx7QQ4Q")  # magic, operation, dtype, dimensions, fields, length, shape
HEADER_BYTES = LAYOUT.size
DTYPES = (torch.uint8, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
MAX_DIMENSIONS = 4
MAX_PAYLOAD_BYTES = 1 << 42  # a frame that announces more is refused
MAX_MESSAGE_BYTES = 1 << 24
NO_FIELDS = (0,) * 7
FIRST_OWN_OPERATION = 32
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class RefusedError(WorldsizeError):
    """A peer, or one of its frames, was refused; a refused frame has had no effect."""


class CommonOperation(IntEnum):
    """Operations common to all protocols."""

    JOIN = 1  # message: first of a connection, with the caller ("name") and its purpose ("kind")
    WELCOME = 2  # message: answers JOIN
    REFUSED = 3  # message: the reason; the connection closes
    DONE = 4  # acknowledges a request; has no payload
    MESSAGE = 5  # message: any JSON
    HEARTBEAT = 6  # not answered
    SHARE = 7  # not answered; three file descriptors follow, see offer_shared_memory


class Header(NamedTuple):  # three times as fast to construct as a frozen dataclass
    """Header of a frame, sent before the payload.

    Attributes:
        operation: The frame's request or answer.
        dtype: Data type of the payload, one of :data:`DTYPES`.
        shape: Shape of the payload, with at most 4 dimensions; ``()`` for an empty payload.
        fields: Exactly 7 integers from 0 to 2^64 - 1; the protocol defines their meaning per ``operation``.
    """

    operation: IntEnum
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    fields: tuple[int, ...] = NO_FIELDS

    @property
    def length(self) -> int:
        """Length of the payload in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize if self.shape else 0

    def pack(self) -> bytes:
        """Encode the header in :data:`HEADER_BYTES` bytes."""
        shape = (*self.shape, *([0] * (MAX_DIMENSIONS - len(self.shape))))
        dimensions = len(self.shape)
        return LAYOUT.pack(MAGIC, self.operation, _CODES[self.dtype], dimensions, *self.fields, self.length, *shape)

    def require_payload(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raise RefusedError unless the payload has this dtype and shape."""
        if self.dtype != dtype or self.shape != tuple(shape):
            raise RefusedError(
                f"{self.operation.name}: expected {dtype} {list(shape)}, got {self.dtype} {list(self.shape)}"
            )

    def require_message(self) -> None:
        """Raise RefusedError unless the payload is a message of allowed size."""
        if self.dtype != torch.uint8 or len(self.shape) != 1 or self.length > MAX_MESSAGE_BYTES:
            raise RefusedError(f"{self.operation.name}: invalid message payload {self.dtype} {list(self.shape)}")


@cache
def operations_by_number(operations: type[IntEnum]) -> Mapping[int, IntEnum]:
    """Map numbers to the operations of a protocol, including the common operations.

    Raises:
        ValueError: A number of ``operations`` is below 32 or above 255.
    """
    for each in operations:
        if not FIRST_OWN_OPERATION <= each <= 255:
            raise ValueError(f"{each!r}: a role's operation numbers must be between {FIRST_OWN_OPERATION} and 255")
    return {int(each): each for each in (*CommonOperation, *operations)}


def parse_header(data: bytes | bytearray | memoryview, known: Mapping[int, IntEnum]) -> Header:
    """Decode a header received from a peer.

    Args:
        data: :data:`HEADER_BYTES` bytes.
        known: The operations of the protocol by number, see :func:`operations_by_number`.

    Raises:
        RefusedError: The bytes are not a header, name an unknown operation or dtype, are inconsistent, or announce more
            than :data:`MAX_PAYLOAD_BYTES`.
    """
    magic, number, code, dimensions, *numbers = LAYOUT.unpack(data)
    if magic != MAGIC:
        raise RefusedError(f"not a frame: expected magic {MAGIC!r}, got {magic!r}")
    operation = known.get(number)
    if operation is None or code >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
        raise RefusedError(f"unknown operation {number}, dtype {code} or {dimensions} dimensions")
    length, shape = numbers[7], numbers[8:]
    header = Header(operation, DTYPES[code], tuple(shape[:dimensions]), tuple(numbers[:7]))
    if header.length != length or length > MAX_PAYLOAD_BYTES or any(shape[dimensions:]):
        raise RefusedError(
            f"{operation.name}: invalid length of {length} bytes for {header.dtype} {list(header.shape)}"
        )
    return header


def view_bytes(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's bytes, to send or receive without a copy."""
    tensor = tensor.detach()
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    data: memoryview = array.reshape(-1).view(numpy.uint8).data
    return data


def encode_message(operation: IntEnum, facts: Any) -> tuple[Header, list[memoryview]]:
    """Return a frame with ``facts`` as JSON; numbers may be NaN or infinite."""
    try:
        text = json.dumps(facts, allow_nan=False)
    except ValueError:
        text = json.dumps(_encode_nonfinite(facts))
    data = text.encode()
    return Header(operation, shape=(len(data),)), [memoryview(data)]


def read_message(data: bytes) -> Any:
    """Decode a payload encoded by :func:`encode_message`.

    Raises:
        ValueError: The data is too long, nested too deeply, or not JSON.
    """
    return parse_json(data, at_most=MAX_MESSAGE_BYTES, mapping=_decode_nonfinite)


def _encode_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, with values such as ``{"$float": "nan"}``."""
    if isinstance(value, Mapping):
        return {key: _encode_nonfinite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_nonfinite(child) for child in value]
    return {"$float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _decode_nonfinite(facts: dict[str, Any]) -> Any:
    text = facts.get("$float")
    return float(text) if len(facts) == 1 and isinstance(text, str) else facts


def tensor_frame(operation: IntEnum, tensor: Tensor) -> tuple[Header, list[memoryview]]:
    """Return a frame for a contiguous CPU tensor with 1 to 4 dimensions, without a copy.

    The header contains the tensor's shape. Scalars cannot be sent, since an empty shape means an empty payload.
    """
    return Header(operation, tensor.dtype, tuple(tensor.shape)), [view_bytes(tensor)]


MIN_BYTES = 1 << 18  # smallest payload for shared memory; for a smaller one, waking the peer takes longer than a copy
SPIN_SECONDS = 2e-4  # seconds to poll for data before sleeping; waking up takes much of this time
_SLOT_BYTES, _SLOTS = 1 << 20, 4  # small enough for the receiver to read from the processor's cache
_DIRECTION_BYTES = _SLOT_BYTES * _SLOTS
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, _SEALS[0])  # Linux only


@final
class SharedMemoryChannel:
    """One direction of a connection through shared memory.

    The sender fills the slots of ``memory`` in turn, and the receiver empties them. Each notifies the other with a byte
    on the socket ``signals``, which closes when the peer exits.

    Args:
        memory: Array of uint8, shape (slots, bytes per slot).
        signals: This process's end of a socket pair.
        ready: Number of slots usable before the peer's first byte: all for the sender, 0 for the receiver.
    """

    def __init__(self, memory: NDArray[numpy.uint8], signals: socket.socket, *, ready: int) -> None:
        self._memory, self.signals = memory, signals
        self._arrivals = select.poll()
        self._arrivals.register(signals, select.POLLIN)
        self._turn, self._ready = 0, ready

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send one payload. Raises OSError if the connection is lost."""
        for piece in _split_into_slots(parts):
            slot = self._next_slot()
            for start, part in piece:
                slot[start : start + part.nbytes] = numpy.frombuffer(part, numpy.uint8)
            self.signals.send(b"\0")

    def receive_payload(self, parts: Sequence[memoryview]) -> None:
        """Receive one payload into ``parts`` of the same total size. Raises OSError."""
        for piece in _split_into_slots(parts):
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


Pair = tuple[SharedMemoryChannel, SharedMemoryChannel]  # (sending, receiving)


def _split_into_slots(parts: Sequence[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """Split ``parts`` into pieces of at most a slot: lists of (offset in the slot, bytes)."""
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
    """Create shared memory for the peer, which calls :func:`accept_shared_memory`.

    Raises:
        OSError: The connection is lost, or there is not enough memory.
    """
    memory = os.memfd_create("worldsize", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 2 * _DIRECTION_BYTES)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _combine_seals())
    here, there = zip(socket.socketpair(), socket.socketpair(), strict=True)
    socket.send_fds(connection, [b"\0"], [memory, *(signals.fileno() for signals in there)])
    for signals in there:
        signals.close()
    first, second = _map_memory(memory)
    os.close(memory)
    return SharedMemoryChannel(first, here[0], ready=_SLOTS), SharedMemoryChannel(second, here[1], ready=0)


def accept_shared_memory(connection: socket.socket) -> Pair:
    """Map the shared memory that the peer offered with :func:`offer_shared_memory`.

    Raises:
        OSError: The connection is lost.
        RefusedError: The peer did not send memory of the expected size, or the memory could shrink.
    """
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3, socket.MSG_CMSG_CLOEXEC)
    try:
        memory, *lines = descriptors
        sealed = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
        if (
            len(lines) != 2
            or os.fstat(memory).st_size != 2 * _DIRECTION_BYTES
            or sealed & _combine_seals() != _combine_seals()
        ):
            raise RefusedError("a worker's shared memory has the wrong size or is not sealed against resizing")
        theirs, ours = _map_memory(memory)
        there, back = (socket.fromfd(line, socket.AF_UNIX, socket.SOCK_STREAM) for line in lines)
        return SharedMemoryChannel(ours, back, ready=_SLOTS), SharedMemoryChannel(theirs, there, ready=0)
    except (OSError, ValueError) as error:
        raise RefusedError(f"failed to map a worker's shared memory: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _combine_seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)


def _map_memory(memory: int) -> tuple[NDArray[numpy.uint8], NDArray[numpy.uint8]]:
    """Map the memory; return an array per direction, uint8 (slots, bytes per slot)."""
    mapped = numpy.frombuffer(mmap.mmap(memory, 2 * _DIRECTION_BYTES), numpy.uint8).reshape(2, _SLOTS, _SLOT_BYTES)
    return mapped[0], mapped[1]
