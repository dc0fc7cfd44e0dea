"""A worker's connections to the shards: pushes of gradients, pulls of weights and rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from plugins.parameter_server.gradients import Feedback, encode_presence
from plugins.parameter_server.protocol import Fields, Operation, shard_service
from plugins.parameter_server.sharding import Bucket, BucketKey, ShardingPlan
from worldsize.core import FaultPoints
from worldsize.net.channel import LostError
from worldsize.net.frames import CommonOperation, Header, RefusedError, view_bytes
from worldsize.net.registry import Dialer


@dataclass
class _Push:
    """A push not yet acknowledged by the server; its buffers must not change until then."""

    header: Header
    payload: Sequence[memoryview]


@final
class ShardLink:
    """Pushes to and pulls from one shard. Lost pushes are resent, and applied once.

    Args:
        dialer: Connects to the current master of the shard.
        shard: Index of the shard.
        epoch: The epoch of the worker's admission; see :class:`TaskScheduler`.

    Attributes:
        step: The last step completed by the shard when this link was created.
    """

    def __init__(self, dialer: Dialer, shard: int, epoch: int) -> None:
        self._dialer, self._service, self._epoch = dialer, shard_service(shard), epoch
        self._sequence = 0
        self._seen = 0
        self._asked_step = 0
        self._pending: deque[_Push] = deque()
        self._channel, facts = dialer.connect(self._service, "data", epoch=epoch)
        self._channel.offer_share(dialer.timeout)
        self.step = int(facts["step"])

    def push_bucket(
        self, table: int, dtype: torch.dtype, payload: Sequence[memoryview], *, step: int, width: int, node: int
    ) -> None:
        """Send the gradient of a bucket; :meth:`wait_for_pushes` waits until it is acknowledged."""
        shape = (sum(part.nbytes for part in payload) // dtype.itemsize,)
        header = Header(Operation.PUSH, dtype, shape, Fields(table, width, node, step=step))
        self._send_push(header, payload)

    def push_rows(self, table: int, ids_n: Tensor, gradients_nd: Tensor, *, step: int, width: int, node: int) -> None:
        """Send row gradients, float32 (n, dim), with unique sorted ids, int64 (n,)."""
        payload = [view_bytes(ids_n), view_bytes(gradients_nd.contiguous())]
        shape = (ids_n.nbytes + gradients_nd.nbytes,)
        header = Header(Operation.PUSH_ROWS, torch.uint8, shape, Fields(table, width, node, step=step))
        self._send_push(header, payload)

    def _send_push(self, header: Header, payload: Sequence[memoryview]) -> None:
        self._sequence += 1
        table, width, node, _, _, _, step = header.fields
        fields = Fields(table, width, node, self._seen, self._epoch, self._sequence, step)
        numbered = header._replace(fields=fields)
        self._pending.append(_Push(numbered, payload))
        self._send_or_recover(lambda: self._channel.send(numbered, payload))

    def ask_rows(self, table: int, ids_n: Tensor, *, step: int) -> None:
        """Request rows ``ids_n``, int64 (n,), with all updates up to ``step`` and this link's pushes."""
        header = Header(Operation.PULL_ROWS, torch.int64, (len(ids_n),), Fields(table, step=step))
        while not self._send_or_recover(lambda: self._channel.send(header, [view_bytes(ids_n)])):
            pass

    def receive_rows(self, table: int, ids_n: Tensor, dim: int, *, step: int) -> tuple[Tensor, int]:
        """Receive the requested rows.

        Returns:
            The rows, float32 (n, dim), and the last step up to which they include all updates.
        """
        rows_nd = torch.empty(len(ids_n), dim)
        while True:
            try:
                answer = self._receive_weights_header()
                answer.require_payload(torch.float32, (len(ids_n), dim))
                self._channel.receive_into([view_bytes(rows_nd)])
                fields = Fields._make(answer.fields)
                self._seen = fields.seen
                return rows_nd, fields.step
            except LostError:
                self._reconnect()
                self.ask_rows(table, ids_n, step=step)

    def _receive_weights_header(self) -> Header:
        """Receive acknowledgments of pushes up to the next weights, and return the weights' header."""
        done = CommonOperation.DONE
        while (header := self._channel.receive_answer(Operation.WEIGHTS, done)).operation == done:
            self._pending.popleft()
        return header

    def wait_for_pushes(self) -> None:
        """Wait until all pushes are acknowledged."""
        while self._pending:
            try:
                self._channel.receive_answer(CommonOperation.DONE)
                self._pending.popleft()
            except LostError:
                self._reconnect()

    def request_weights(self, step: int) -> None:
        """Request weights that include all updates up to ``step``."""
        self._asked_step = step
        while not self._send_or_recover(lambda: self._channel.send(Header(Operation.PULL, fields=Fields(step=step)))):
            pass

    def _send_or_recover(self, send: Callable[[], None]) -> bool:
        """Return whether ``send`` succeeded; if not, reconnect and resend the unacknowledged pushes."""
        try:
            send()
        except LostError:
            self._reconnect()
            return False
        return True

    def receive_weights(self, tables: Sequence[tuple[torch.dtype, Sequence[memoryview]]]) -> None:
        """Receive the requested weights directly into the memory of ``tables``."""
        while True:
            try:
                for index, (dtype, parts) in enumerate(tables):
                    header = self._receive_weights_header()
                    fields = Fields._make(header.fields)
                    header.require_payload(dtype, (sum(part.nbytes for part in parts) // dtype.itemsize,))
                    if fields.table != index:
                        raise RefusedError(f"received weights of table {fields.table}, expected table {index}")
                    self._channel.receive_into(parts)
                    self._seen = fields.seen
                return
            except LostError:
                self._reconnect()
                self.request_weights(self._asked_step)

    def _reconnect(self) -> None:
        """Reconnect to the current master, and resend the pushes that it has not applied."""
        while True:
            self._channel.close()
            self._channel, facts = self._dialer.connect(self._service, "data", epoch=self._epoch, seen=self._seen)
            taken = facts["sequence"]  # lower than before if the server was restored from a checkpoint
            self._pending = deque(push for push in self._pending if push.header.fields[_SEQUENCE] > taken)
            for number, push in enumerate(self._pending, taken + 1):
                fields = Fields._make(push.header.fields)._replace(sequence=number)
                push.header = push.header._replace(fields=fields)
            self._sequence = taken + len(self._pending)
            with suppress(LostError):
                self._channel.offer_share(self._dialer.timeout)
                for push in self._pending:
                    self._channel.send(push.header, push.payload)
                return

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


_SEQUENCE = Fields._fields.index("sequence")


@final
class DenseLinks:
    """Pushes dense gradients to servers, and pulls weights directly into the model.

    Args:
        parameters: The model's trained parameters, by name.
        plan: The buckets of each server, and the wire format of gradients.
        first: Index, modulo their number, of the first server to use; it differs between workers, so that they do not
            all wait for the same link.
        faults: Fault injection points before the push to each server.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], plan: ShardingPlan, *, first: int, faults: FaultPoints
    ) -> None:
        self._shards, self._faults = plan.shards, faults
        self._links: Sequence[ShardLink] = ()
        self._order = [(first + turn) % len(plan.shards) for turn in range(len(plan.shards))]
        self._feedback = Feedback(plan.codec) if plan.codec else None
        self._memory = [
            [
                (bucket.dtype, [view_bytes(piece.slice_tensor(parameters[piece.name])) for piece in bucket.pieces])
                for bucket in shard
            ]
            for shard in plan.shards
        ]

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self._shards)

    def replace_dense_links(self, links: Sequence[ShardLink]) -> None:
        """Replace the connections to the servers."""
        self._links = links

    def pull_weights(self, step: int) -> None:
        """Pull all weights into the model; the servers wait for the updates up to ``step``."""
        for link in self._links:
            link.request_weights(step)
        for server in self._order:
            self._links[server].receive_weights(self._memory[server])

    def push_buckets(self, gradients: Mapping[str, Tensor | None], *, step: int, width: int, node: int) -> None:
        """Push all gradients, by parameter name and in parameter shapes; see :meth:`push_bucket`."""
        part = {"step": step, "width": width, "node": node}
        for turn, server in enumerate(self._order):
            self._faults.report_point("push:next-server" if turn else "push:begin")
            for table in range(len(self._shards[server])):
                self.push_bucket((server, table), gradients, part)

    def push_bucket(self, key: BucketKey, gradients: Mapping[str, Tensor | None], part: Mapping[str, int]) -> None:
        """Push the gradient of one bucket.

        Args:
            key: The bucket.
            gradients: Gradients of the bucket's parameters by name, in parameter shapes; None for a missing gradient.
            part: Keyword arguments ``step``, ``width`` and ``node`` of :meth:`ShardLink.push_bucket`.
        """
        server, table = key
        bucket = self._shards[server][table]
        own = [gradients[piece.name] for piece in bucket.pieces]
        pieces = [
            torch.zeros(piece.shape, dtype=piece.dtype) if each is None else piece.slice_tensor(each).cpu().contiguous()
            for piece, each in zip(bucket.pieces, own, strict=True)
        ]
        dtype, payload = self._encode_pieces(bucket, pieces)
        if (presence := encode_presence([each is not None for each in own], dtype)) is not None:
            payload.append(view_bytes(presence))
        self._links[server].push_bucket(table, dtype, payload, **part)

    def wait_for_all_pushes(self) -> None:
        """Wait until all pushes on these links, including rows, are acknowledged."""
        for link in self._links:
            link.wait_for_pushes()

    def _encode_pieces(self, bucket: Bucket, pieces: Sequence[Tensor]) -> tuple[torch.dtype, list[memoryview]]:
        if self._feedback is None:
            return bucket.dtype, [view_bytes(piece) for piece in pieces]
        flat_n = torch.cat([piece.flatten() for piece in pieces])
        return self._feedback.codec.dtype, [view_bytes(self._feedback.encode(bucket, flat_n))]
