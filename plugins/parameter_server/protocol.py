"""Protocol between workers and servers: additional operations, state trees, and retries.

A state tree is one frame of JSON and raw tensor bytes, without pickle. Requests go to the current master of a shard.
Servers record the pushes applied for each worker, so that each push is applied exactly once even if connections break.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar, final

import torch

from worldsize.checkpoint.manifest_tree import join_tensors, split_tensors
from worldsize.net.channel import Channel, LostError
from worldsize.net.frames import (
    DTYPES,
    MAX_MESSAGE_BYTES,
    CommonOperation,
    Header,
    RefusedError,
    encode_message,
    view_bytes,
)
from worldsize.net.registry import Dialer
from worldsize.strict_json import parse_strict_json

T = TypeVar("T")


class Operation(IntEnum):
    """Requests and answers. Messages are JSON. One answer per request, unless noted."""

    PUSH = 32  # gradient of one bucket; answered by DONE, in the order of the pushes of a step
    PULL = 33  # answered by one WEIGHTS per bucket
    WEIGHTS = 34
    PUSH_ROWS = 35  # ids as in PULL_ROWS, then gradients (float32) of rows of one table; answered by DONE
    PULL_ROWS = 36  # unique sorted ids (int64); answered by WEIGHTS of shape (rows, dim)
    TICK = 37  # message: result of the worker's last task; answered by TASK once there is one
    TASK = 38  # message
    NORMS = 39  # answered by a MESSAGE once all gradients of the step have arrived
    APPLY = 40  # message: the step, and a factor for its gradient; answered by DONE
    STATE = 41  # answered by DONE once the state is copied, then by TREE
    TREE = 42  # JSON and tensors; see send_tree
    STOP = 43  # message to a server: the run ends; answered by DONE
    RESET = 44  # message: the last completed step; drops gradients of later steps; answered by DONE
    FACTS = 45  # answered by a MESSAGE
    WEIGH = 46  # message: the step, and a factor for its mean gradient before NORMS; answered by DONE
    BEGIN = 47  # message: a step with several updates begins; answered by DONE
    ROLL_BACK = 48  # message: update number to continue from, at the step's start; answered by DONE
    ADVANCE = 49  # message: a metric's value, and the last step before its evaluation; answered by DONE


class Fields(NamedTuple):
    """Meanings of the seven integers in a frame's header.

    Attributes:
        table: Index of the bucket or table in the payload.
        width: Number of nodes on a level of the tree over logical ranks; see ``node``.
        node: Index of the tree node that the gradient is the sum of, on the level with ``width`` nodes.
        seen: Number of updates, modulo 2^32, included in the weights used for a gradient, or in pulled weights.
        epoch: Epoch of the pushing worker's admission to the run.
        sequence: Number of the worker's push in its epoch.
        step: The step of a gradient, or the last step included in pulled weights.
    """

    table: int = 0
    width: int = 0
    node: int = 0
    seen: int = 0
    epoch: int = 0
    sequence: int = 0
    step: int = 0


def shard_service(shard: int) -> str:
    """Return the name of a shard's service in the run's registry."""
    return f"shard {shard}"


_LENGTH = struct.Struct("<Q")
_NAMES = {str(dtype): dtype for dtype in (*DTYPES, torch.bool, torch.int32, torch.int16, torch.int8)}


def send_tree(channel: Channel, tree: Any) -> None:
    """Send a state of dicts, lists, tensors and plain values. Raises LostError."""
    tensors, values = split_tensors(tree)
    facts = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    head = json.dumps({"values": values, "tensors": facts}).encode()
    parts = [memoryview(_LENGTH.pack(len(head)) + head), *(view_bytes(t.contiguous()) for t in tensors.values())]
    channel.send(Header(Operation.TREE, shape=(sum(part.nbytes for part in parts),)), parts)


def receive_tree(channel: Channel) -> Any:
    """Receive a state sent by :func:`send_tree`.

    Raises:
        LostError: The peer has disconnected.
        RefusedError: The frame is not a state, or its length does not match the tensors.
    """
    header = channel.receive_answer(Operation.TREE)
    head = bytearray(_LENGTH.size)
    channel.receive_into([memoryview(head)])
    (length,) = _LENGTH.unpack(head)
    if header.dtype != torch.uint8 or not 0 < length <= min(header.length, MAX_MESSAGE_BYTES):
        raise RefusedError(f"invalid state: names take {length} bytes, the frame has {header.length}")
    facts = bytearray(length)
    channel.receive_into([memoryview(facts)])
    try:
        described = parse_strict_json(bytes(facts), at_most=MAX_MESSAGE_BYTES)
    except ValueError as error:
        raise RefusedError(f"invalid state: names are not JSON: {error}") from None
    tensors = {name: torch.empty(shape, dtype=_NAMES[dtype]) for name, (dtype, shape) in described["tensors"].items()}
    if sum(tensor.nbytes for tensor in tensors.values()) + length + _LENGTH.size != header.length:
        raise RefusedError("invalid state: tensors do not match the frame length")
    channel.receive_into([view_bytes(tensor) for tensor in tensors.values()])
    return join_tensors(described["values"], tensors)


Frame = tuple[Header, Sequence[memoryview]]


@final
class Peer:
    """Sends requests to the current master of a shard, and retries if the connection breaks."""

    def __init__(self, dialer: Dialer, shard: int) -> None:
        self._dialer, self._service = dialer, shard_service(shard)
        self._channel, _ = dialer.connect(self._service, "peer")

    def _send_request(self, frame: Frame, receive: Callable[[Channel], T]) -> T:
        while True:
            try:
                self._channel.send(*frame)
                return receive(self._channel)
            except LostError:
                self._channel.close()
                self._channel, _ = self._dialer.connect(self._service, "peer")

    def request_message(self, operation: Operation) -> Any:
        """Send NORMS or FACTS, and return the answer's message."""
        frame: Frame = (Header(operation), [])
        return self._send_request(
            frame, lambda channel: channel.receive_message(channel.receive_answer(CommonOperation.MESSAGE))
        )

    def send_command(self, operation: Operation, facts: Any) -> None:
        """Send a command, such as APPLY, and wait until it is done."""
        self._send_request(
            encode_message(operation, facts), lambda channel: channel.receive_answer(CommonOperation.DONE)
        )

    def request_state(self) -> Any:
        """Return a copy of the shard's state, requested from the master."""

        def receive_state(channel: Channel) -> Any:
            channel.receive_answer(CommonOperation.DONE)
            return receive_tree(channel)

        return self._send_request((Header(Operation.STATE), []), receive_state)


@final
class Peers:
    """Sends requests to the masters of ``shards`` concurrently, one thread per shard."""

    def __init__(self, dialer: Dialer, shards: Iterable[int]) -> None:
        self._peers = [Peer(dialer, shard) for shard in shards]
        self._pool = ThreadPoolExecutor(max(1, len(self._peers)), "peer")

    def call_peers(self, question: Callable[[Peer], T]) -> list[T]:
        """Call ``question`` with each peer concurrently; return the results in shard order."""
        return list(self._pool.map(question, self._peers))

    def request_messages(self, operation: Operation) -> list[Any]:
        """Request a message from each peer; see :meth:`Peer.request_message`."""
        return self.call_peers(lambda peer: peer.request_message(operation))

    def send_commands(self, operation: Operation, facts: Any) -> None:
        """Send a command to each peer, and wait until all are done; see :meth:`Peer.send_command`."""
        self.call_peers(lambda peer: peer.send_command(operation, facts))


@dataclass
class Session:
    """A worker's membership in the run; its pushes are numbered from 1.

    Attributes:
        epoch: The epoch of the worker's admission.
        sequence: Number of the last applied push.
    """

    epoch: int
    sequence: int = 0


@final
class Sessions:
    """The sessions of all workers on one server. The caller must hold the shard's lock."""

    def __init__(self) -> None:
        self._by_name: dict[str, Session] = {}
        self._taken_by_master: dict[int, int] = {}  # last sequence number by epoch, recorded as a standby

    def open_session(self, name: str, epoch: int) -> Session:
        """Return a worker's session: a new one for a later epoch, else the existing one.

        Raises:
            RefusedError: The worker has rejoined in a later epoch.
        """
        session = self._by_name.get(name)
        if session is None or epoch > session.epoch:
            session = self._by_name[name] = Session(epoch, self._taken_by_master.get(epoch, 0))
        if epoch < session.epoch:
            raise RefusedError(f"stale epoch {epoch}: {name} has rejoined in epoch {session.epoch}")
        return session

    def note_taken(self, epoch: int, sequence: int) -> None:
        """Record, on a standby, the last push that the master has applied."""
        self._taken_by_master[epoch] = sequence

    def export_sequences(self) -> dict[int, int]:
        """Return the last sequence number of each epoch, for a standby."""
        return {**self._taken_by_master, **{each.epoch: each.sequence for each in self._by_name.values()}}

    def restore(self, image: Mapping[int, int]) -> None:
        """Load an :meth:`export_sequences` from a master."""
        self._taken_by_master = dict(image)
