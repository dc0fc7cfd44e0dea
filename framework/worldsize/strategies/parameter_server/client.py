"""A worker's connections: to the server that leads, for its tasks, and to every server, for gradients and weights."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from worldsize.transport.certificates import Keys
from worldsize.transport.channel import Channel, LostError, connect
from worldsize.transport.frames import Header, Operation, RefusedError, view
from worldsize.transport.registry import Directory, EndedError, Entry

_RETRY = 0.02  # seconds


@final
@dataclass(frozen=True)
class Dialer:
    """Connects to the master of a shard, whoever that is by then."""

    name: str
    directory: Directory
    keys: Keys | None
    timeout: float

    def connect(self, shard: int, kind: str, **facts: Any) -> tuple[Channel, Mapping[str, Any]]:
        """A channel that has joined for ``kind``, and what the server said to that; tries until the timeout.

        Raises:
            LostError: no server answers in time.
            EndedError: none will.
            RefusedError: it does not want us.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            entry = self.directory.wait(shard)
            try:
                return self.attempt(entry, kind, **facts)
            except LostError as error:
                self.directory.check_open()
                if time.monotonic() > deadline:
                    raise LostError(f"shard {shard} ({entry.name}) does not answer: {error}") from error
                time.sleep(_RETRY)

    def attempt(self, entry: Entry, kind: str, **facts: Any) -> tuple[Channel, Mapping[str, Any]]:
        """As :meth:`connect`, once."""
        channel = connect(entry.address, self.keys, peer=entry.name, seconds=self.timeout)
        try:
            channel.wait_at_most(self.timeout)
            channel.tell(Operation.JOIN, {"kind": kind, "name": self.name, **facts})
            return channel, channel.message(channel.answer(Operation.WELCOME))
        except (LostError, RefusedError):
            channel.close()
            raise


@dataclass
class _Push:
    """One that the server has not acknowledged; its buffers stay as they are until then."""

    header: Header
    payload: Sequence[memoryview]


@final
class ShardLink:
    """Pushes to and pulls from one shard; what is lost with a connection is sent again, and taken once."""

    def __init__(self, dialer: Dialer, shard: int, epoch: int) -> None:
        self._dialer, self._shard, self._epoch = dialer, shard, epoch
        self._sequence = 0
        self._seen = 0
        self._pending: deque[_Push] = deque()
        self._channel, facts = dialer.connect(shard, "data", epoch=epoch)
        self._channel.share(dialer.timeout)
        self.step = int(facts["step"])  # of the shard when this connection was made

    def push(
        self, table: int, dtype: torch.dtype, payload: Sequence[memoryview], *, step: int, width: int, node: int
    ) -> None:
        """Send a gradient; :meth:`settle` waits until it has been taken."""
        shape = (sum(part.nbytes for part in payload) // dtype.itemsize,)
        self._push(Operation.PUSH, table, dtype, shape, (width, node, step), payload)

    def push_rows(self, table: int, ids_n: Tensor, gradients_nd: Tensor, *, step: int, width: int, node: int) -> None:
        """Send gradients of rows, whose ids are sorted and each there once."""
        payload = [view(ids_n), view(gradients_nd.contiguous())]
        shape = (ids_n.nbytes + gradients_nd.nbytes,)
        self._push(Operation.PUSH_ROWS, table, torch.uint8, shape, (width, node, step), payload)

    def _push(
        self,
        operation: Operation,
        table: int,
        dtype: torch.dtype,
        shape: tuple[int],
        part: tuple[int, int, int],
        payload: Sequence[memoryview],
    ) -> None:
        self._sequence += 1
        width, node, step = part
        header = Header(operation, table, dtype, shape, width, node, self._seen, self._epoch, self._sequence, step)
        self._pending.append(_Push(header, payload))
        self._persist(lambda: self._channel.send(header, payload))

    def pull_rows(self, table: int, ids_n: Tensor, dim: int, *, step: int) -> tuple[Tensor, int]:
        """float32 [n, dim]: rows that have seen all updates up to ``step``, and what was pushed before; and up to which
        step they have seen all.
        """
        rows_nd = torch.empty(len(ids_n), dim)
        header = Header(Operation.PULL_ROWS, table, torch.int64, (len(ids_n),), step=step)
        while True:
            try:
                self._channel.send(header, [view(ids_n)])
                answer = self._weights()
                answer.require(torch.float32, (len(ids_n), dim))
                self._channel.fill([view(rows_nd)])
                self._seen = answer.seen
                return rows_nd, answer.step
            except LostError:
                self._recover()

    def _weights(self) -> Header:
        """Of the weights that come next, after answers to pushes."""
        while (header := self._channel.answer(Operation.WEIGHTS, Operation.DONE)).operation == Operation.DONE:
            self._pending.popleft()
        return header

    def settle(self) -> None:
        """Wait until all pushes have been taken."""
        while self._pending:
            try:
                self._channel.answer(Operation.DONE)
                self._pending.popleft()
            except LostError:
                self._recover()

    def ask(self, step: int) -> None:
        """Begin to pull the weights that have seen all updates up to ``step``."""
        self._step = step
        while not self._persist(lambda: self._channel.send(Header(Operation.PULL, step=step))):
            pass

    def _persist(self, send: Callable[[], None]) -> bool:
        """Whether ``send`` succeeded; if not, there is a new connection on which the pushes have been sent again."""
        try:
            send()
        except LostError:
            self._recover()
            return False
        return True

    def receive(self, tables: Sequence[tuple[torch.dtype, Sequence[memoryview]]]) -> None:
        """The weights that were asked for, straight into the memory of ``tables``."""
        while True:
            try:
                for index, (dtype, parts) in enumerate(tables):
                    header = self._weights()
                    header.require(dtype, (sum(part.nbytes for part in parts) // dtype.itemsize,))
                    if header.table != index:
                        raise RefusedError(f"weights of table {header.table} came, those of {index} were expected")
                    self._channel.fill(parts)
                    self._seen = header.seen
                return
            except LostError:
                self._recover()
                self.ask(self._step)

    def _recover(self) -> None:
        """Connect again, to whoever is master now, and send again what it has not seen."""
        while True:
            self._channel.close()
            self._channel, facts = self._dialer.connect(self._shard, "data", epoch=self._epoch, seen=self._seen)
            taken = facts["sequence"]  # of a server that has come back from a checkpoint, lower than before
            self._pending = deque(push for push in self._pending if push.header.sequence > taken)
            for number, push in enumerate(self._pending, taken + 1):
                push.header = push.header._replace(sequence=number)
            self._sequence = taken + len(self._pending)
            with suppress(LostError):
                self._channel.share(self._dialer.timeout)
                for push in self._pending:
                    self._channel.send(push.header, push.payload)
                return

    def close(self) -> None:
        self._channel.close()


@final
class Heart:
    """Signs of life, a quarter of a lease apart, from a thread of their own while the worker computes."""

    def __init__(self, dialer: Dialer, lease: float) -> None:
        self._dialer, self._interval = dialer, lease / 4
        self._ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def _beat(self) -> None:
        channel: Channel | None = None
        while not self._ended.wait(self._interval):
            try:
                channel = channel or self._dialer.connect(0, "beat")[0]
                channel.send(Header(Operation.HEARTBEAT))
            except EndedError:
                return
            except (LostError, RefusedError):
                channel = None

    def stop(self) -> None:
        self._ended.set()
