"""The wire format: a header of 88 bytes, then as many bytes as its dtype and shape say. No pickle.

A header is checked by itself in :func:`parse`, and by :meth:`Header.require` against what its receiver expects,
before a byte of the payload is received or allocated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from worldsize.errors import WorldsizeError

MAGIC = b"wsP1"
LAYOUT = Struct("<4sBBBxIIIIQQQQ4Q")  # magic, operation, dtype, dimensions, table, width, node, seen, ..., shape
SIZE = LAYOUT.size
DTYPES = (torch.uint8, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_DIMENSIONS = 4
LARGEST = 1 << 42  # bytes of a payload; what is larger cannot be meant
LARGEST_MESSAGE = 1 << 24  # bytes of JSON


class RefusedError(WorldsizeError):
    """A frame that its receiver does not accept; nothing that it carried has taken effect."""


class Operation(IntEnum):
    """What a frame asks for, or answers. Messages are JSON; each request gets one answer unless it says otherwise."""

    JOIN = 1  # message: who, and what for
    WELCOME = 2  # message
    PUSH = 3  # a gradient of one bucket; answered by DONE, all pushes of a step in their order
    PULL = 4  # answered by WEIGHTS, once for each bucket
    WEIGHTS = 5
    DONE = 6
    TICK = 7  # message: what the worker has finished; answered by TASK when there is one
    TASK = 8  # message
    HEARTBEAT = 9  # not answered
    NORMS = 10  # answered by a MESSAGE once the step's gradients have all come
    APPLY = 11  # message
    STATE = 12  # answered by DONE once the state is copied, then by TREE
    TREE = 13  # JSON and tensors, see :mod:`tree`
    MESSAGE = 14
    STOP = 15  # to a server: the run ends; answered by DONE
    PUSH_ROWS = 19  # ids as below, then gradients (float32) of rows of one table; answered by DONE
    PULL_ROWS = 20  # ids (int64), sorted and each once; answered by WEIGHTS of shape [rows, dim]
    RESET = 16  # message: the step that is done; what has come of later ones is dropped; answered by DONE
    FACTS = 17  # answered by a MESSAGE
    SHARE = 21  # not answered; then three descriptors, see :mod:`lane`
    REFUSED = 18  # message: why; the connection ends


class Header(NamedTuple):  # which is made three times as fast as a frozen dataclass
    """``shape=()`` means no payload. ``width`` and ``node``: which part of a step a gradient belongs to.

    ``seen``: updates in the weights that it was computed with, or that these weights have seen (modulo 2^32).
    """

    operation: Operation
    table: int = 0
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    width: int = 0
    node: int = 0
    seen: int = 0
    epoch: int = 0
    sequence: int = 0
    step: int = 0

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return math.prod(self.shape) * self.dtype.itemsize if self.shape else 0

    def pack(self) -> bytes:
        shape = (*self.shape, *([0] * (_DIMENSIONS - len(self.shape))))
        numbers = (self.table, self.width, self.node, self.seen, self.epoch, self.sequence, self.step, self.length)
        return LAYOUT.pack(MAGIC, self.operation, _CODES[self.dtype], len(self.shape), *numbers, *shape)

    def require(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raise RefusedError unless the payload is what the receiver has room for."""
        if self.dtype != dtype or self.shape != tuple(shape):
            raise RefusedError(
                f"{self.operation.name} of table {self.table} carries {self.dtype} {list(self.shape)}; "
                f"expected {dtype} {list(shape)}"
            )

    def require_message(self) -> None:
        if self.dtype != torch.uint8 or len(self.shape) != 1 or self.length > LARGEST_MESSAGE:
            raise RefusedError(f"{self.operation.name} announces a message of {self.dtype} {list(self.shape)}")


def parse(data: bytes | bytearray | memoryview) -> Header:
    """The header in ``data``.

    Raises:
        RefusedError: it is not one, or contradicts itself.
    """
    magic, operation, code, dimensions, table, width, node, seen, epoch, sequence, step, length, *shape = LAYOUT.unpack(
        data
    )
    if magic != MAGIC:
        raise RefusedError(f"not a frame: it begins with {magic!r}")
    if operation not in _OPERATIONS or code >= len(DTYPES) or dimensions > _DIMENSIONS:
        raise RefusedError(f"unknown operation {operation}, dtype {code} or {dimensions} dimensions")
    dtype, used = DTYPES[code], tuple(shape[:dimensions])
    header = Header(_OPERATIONS[operation], table, dtype, used, width, node, seen, epoch, sequence, step)
    if header.length != length or length > LARGEST or any(shape[dimensions:]):
        raise RefusedError(f"{header.operation.name} announces {length} bytes for {dtype} {list(used)}")
    return header


_OPERATIONS = {int(operation): operation for operation in Operation}


def view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to send from or receive into without a copy."""
    tensor = tensor.detach()
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    data: memoryview = array.reshape(-1).view(numpy.uint8).data
    return data


def message(operation: Operation, facts: Any) -> tuple[Header, list[memoryview]]:
    """A frame that carries JSON."""
    data = json.dumps(facts).encode()
    return Header(operation, shape=(len(data),)), [memoryview(data)]
