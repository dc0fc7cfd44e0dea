"""A worker's connection to one shard, for gradients and weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from worldsize.strategies.parameter_server.operations import Fields, Operation, shard_service
from worldsize.transport.channel import LostError
from worldsize.transport.dialer import Dialer
from worldsize.transport.frames import CommonOperation, Header, RefusedError, view


@dataclass
class _Push:
    """A push that the server has not acknowledged; its buffers stay as they are until then."""

    header: Header
    payload: Sequence[memoryview]


@final
class ShardLink:
    """Pushes to and pulls from one shard; what is lost with a connection is sent again, and taken once.

    Args:
        dialer: Finds the shard's master, whoever that is by then.
        shard: The number of the shard.
        epoch: The epoch in which the worker was admitted, see :class:`TaskScheduler`.

    Attributes:
        step: The last step that the shard had done when this link was made.
    """

    def __init__(self, dialer: Dialer, shard: int, epoch: int) -> None:
        self._dialer, self._service, self._epoch = dialer, shard_service(shard), epoch
        self._sequence = 0
        self._seen = 0
        self._asked_step = 0
        self._pending: deque[_Push] = deque()
        self._channel, facts = dialer.connect(self._service, "data", epoch=epoch)
        self._channel.share(dialer.timeout)
        self.step = int(facts["step"])

    def push(
        self, table: int, dtype: torch.dtype, payload: Sequence[memoryview], *, step: int, width: int, node: int
    ) -> None:
        """Send the gradient of a bucket; :meth:`settle` waits until it has been taken."""
        shape = (sum(part.nbytes for part in payload) // dtype.itemsize,)
        header = Header(Operation.PUSH, dtype, shape, Fields(table, width, node, step=step))
        self._push(header, payload)

    def push_rows(self, table: int, ids_n: Tensor, gradients_nd: Tensor, *, step: int, width: int, node: int) -> None:
        """Send gradients of rows, whose ids are sorted and each there once."""
        payload = [view(ids_n), view(gradients_nd.contiguous())]
        shape = (ids_n.nbytes + gradients_nd.nbytes,)
        header = Header(Operation.PUSH_ROWS, torch.uint8, shape, Fields(table, width, node, step=step))
        self._push(header, payload)

    def _push(self, header: Header, payload: Sequence[memoryview]) -> None:
        self._sequence += 1
        table, width, node, _, _, _, step = header.fields
        fields = Fields(table, width, node, self._seen, self._epoch, self._sequence, step)
        numbered = header._replace(fields=fields)
        self._pending.append(_Push(numbered, payload))
        self._persist(lambda: self._channel.send(numbered, payload))

    def ask_rows(self, table: int, ids_n: Tensor, *, step: int) -> None:
        """Begin to pull rows that have seen all updates up to ``step``, and all that was pushed before."""
        header = Header(Operation.PULL_ROWS, torch.int64, (len(ids_n),), Fields(table, step=step))
        while not self._persist(lambda: self._channel.send(header, [view(ids_n)])):
            pass

    def receive_rows(self, table: int, ids_n: Tensor, dim: int, *, step: int) -> tuple[Tensor, int]:
        """Receive the rows that were asked for.

        Returns:
            float32 [n, dim], and the step up to which they have seen all updates.
        """
        rows_nd = torch.empty(len(ids_n), dim)
        while True:
            try:
                answer = self._weights()
                answer.require(torch.float32, (len(ids_n), dim))
                self._channel.fill([view(rows_nd)])
                fields = Fields._make(answer.fields)
                self._seen = fields.seen
                return rows_nd, fields.step
            except LostError:
                self._recover()
                self.ask_rows(table, ids_n, step=step)

    def _weights(self) -> Header:
        """Receive the header of the next weights, which come after acknowledgements of pushes."""
        done = CommonOperation.DONE
        while (header := self._channel.answer(Operation.WEIGHTS, done)).operation == done:
            self._pending.popleft()
        return header

    def settle(self) -> None:
        """Wait until all pushes have been taken."""
        while self._pending:
            try:
                self._channel.answer(CommonOperation.DONE)
                self._pending.popleft()
            except LostError:
                self._recover()

    def ask(self, step: int) -> None:
        """Begin to pull the weights that have seen all updates up to ``step``."""
        self._asked_step = step
        while not self._persist(lambda: self._channel.send(Header(Operation.PULL, fields=Fields(step=step)))):
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
        """Receive the weights that were asked for, straight into the memory of ``tables``."""
        while True:
            try:
                for index, (dtype, parts) in enumerate(tables):
                    header = self._weights()
                    fields = Fields._make(header.fields)
                    header.require(dtype, (sum(part.nbytes for part in parts) // dtype.itemsize,))
                    if fields.table != index:
                        raise RefusedError(f"weights of table {fields.table} came, those of {index} were expected")
                    self._channel.fill(parts)
                    self._seen = fields.seen
                return
            except LostError:
                self._recover()
                self.ask(self._asked_step)

    def _recover(self) -> None:
        """Connect again, to whoever is master now, and send again what it has not seen."""
        while True:
            self._channel.close()
            self._channel, facts = self._dialer.connect(self._service, "data", epoch=self._epoch, seen=self._seen)
            taken = facts["sequence"]  # of a server that has come back from a checkpoint, lower than before
            self._pending = deque(push for push in self._pending if push.header.fields[_SEQUENCE] > taken)
            for number, push in enumerate(self._pending, taken + 1):
                fields = Fields._make(push.header.fields)._replace(sequence=number)
                push.header = push.header._replace(fields=fields)
            self._sequence = taken + len(self._pending)
            with suppress(LostError):
                self._channel.share(self._dialer.timeout)
                for push in self._pending:
                    self._channel.send(push.header, push.payload)
                return

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


_SEQUENCE = Fields._fields.index("sequence")
