"""Sends state trees over a channel: JSON and the tensors' bytes in one frame. Nothing is unpickled."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch

from worldsize.checkpoint.tree import join, split
from worldsize.net.channel import Channel
from worldsize.net.frames import DTYPES, MAX_MESSAGE_BYTES, Header, RefusedError, view
from worldsize.strategies.parameter_server.operations import Operation
from worldsize.strict_json import parse

_LENGTH = struct.Struct("<Q")
_NAMES = {str(dtype): dtype for dtype in (*DTYPES, torch.bool, torch.int32, torch.int16, torch.int8)}


def send_tree(channel: Channel, tree: Any) -> None:
    """Send a state: dicts, lists, tensors and plain values. Raises LostError."""
    tensors, values = split(tree)
    facts = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    head = json.dumps({"values": values, "tensors": facts}).encode()
    parts = [memoryview(_LENGTH.pack(len(head)) + head), *(view(t.contiguous()) for t in tensors.values())]
    channel.send(Header(Operation.TREE, shape=(sum(part.nbytes for part in parts),)), parts)


def receive_tree(channel: Channel) -> Any:
    """Receive a state that :func:`send_tree` sent.

    Raises:
        LostError: The peer has gone.
        RefusedError: The frame is not a state, or its length is not that of the tensors.
    """
    header = channel.answer(Operation.TREE)
    head = bytearray(_LENGTH.size)
    channel.fill([memoryview(head)])
    (length,) = _LENGTH.unpack(head)
    if header.dtype != torch.uint8 or not 0 < length <= min(header.length, MAX_MESSAGE_BYTES):
        raise RefusedError(f"a state announces {length} bytes of names in {header.length}")
    facts = bytearray(length)
    channel.fill([memoryview(facts)])
    try:
        described = parse(bytes(facts), at_most=MAX_MESSAGE_BYTES)
    except ValueError as error:
        raise RefusedError(f"a state's names are not JSON: {error}") from None
    tensors = {name: torch.empty(shape, dtype=_NAMES[dtype]) for name, (dtype, shape) in described["tensors"].items()}
    if sum(tensor.nbytes for tensor in tensors.values()) + length + _LENGTH.size != header.length:
        raise RefusedError("a state's tensors are not as long as its frame")
    channel.fill([view(tensor) for tensor in tensors.values()])
    return join(described["values"], tensors)
