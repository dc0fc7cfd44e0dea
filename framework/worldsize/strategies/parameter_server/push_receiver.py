"""Receives gradients, after checking that a worker announces what the shard has room for."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from worldsize.net.channel import Channel
from worldsize.net.frames import Header, RefusedError, view
from worldsize.strategies.parameter_server.gradient_codecs import GradientCodec
from worldsize.strategies.parameter_server.operations import Fields, Operation
from worldsize.strategies.parameter_server.row_tables import Rows
from worldsize.strategies.parameter_server.shard import Shard
from worldsize.strategies.parameter_server.step_gradients import Gradient

_ID_BYTES, _NUMBER_BYTES = 8, 4


@final
class PushReceiver:
    """Receives payloads of pushes to ``shard``, and decodes them with ``codec`` (None: they are not compressed)."""

    def __init__(self, shard: Shard, codec: GradientCodec | None) -> None:
        self.shard, self._codec = shard, codec

    def receive(self, channel: Channel, header: Header) -> tuple[list[memoryview], Gradient]:
        """Receive the payload of a push; return its bytes and the decoded gradient.

        A number for each piece follows the gradient of a bucket that lacks some, see :func:`with_presence`; the result
        has them, too.

        Raises:
            LostError: The peer has gone.
            RefusedError: The shard has no such bucket or table, or the payload has the wrong size.
        """
        if header.operation == Operation.PUSH_ROWS:
            return self._receive_rows(channel, header)
        table, buckets, codec = Fields._make(header.fields).table, self.shard.parameters.buckets, self._codec
        if table >= len(buckets):
            raise RefusedError(f"PUSH of table {table}; there are {len(buckets)}")
        bucket = buckets[table]
        dtype, length = (codec.dtype, codec.length(bucket.numel)) if codec else (bucket.dtype, bucket.numel)
        pieces = len(bucket.pieces) if header.shape == (length + len(bucket.pieces),) else 0
        header.require(dtype, (length + pieces,))
        received = torch.empty(length + pieces, dtype=dtype)
        channel.fill(payload := [view(received)])
        if codec is None:
            return payload, received
        gradient_n = codec.decode(received[:length], bucket.numel)
        return payload, torch.cat([gradient_n, received[length:].to(gradient_n.dtype)]) if pieces else gradient_n

    def _receive_rows(self, channel: Channel, header: Header) -> tuple[list[memoryview], Gradient]:
        rows = self._rows(header)
        count, rest = divmod(header.length, _ID_BYTES + _NUMBER_BYTES * rows.table.dim)
        if rest or header.dtype != torch.uint8 or count > rows.table.rows:
            raise RefusedError(f"PUSH_ROWS of {rows.table.name} carries {header.length} bytes")
        ids_n, gradients_nd = torch.empty(count, dtype=torch.int64), torch.empty(count, rows.table.dim)
        channel.fill(payload := [view(ids_n), view(gradients_nd)])
        _check_ids(rows, ids_n)
        return payload, (ids_n, gradients_nd)

    def receive_ids(self, channel: Channel, header: Header) -> tuple[Rows, Tensor]:
        """Receive the payload of PULL_ROWS: the table, and ids, int64 (n,). Raises the errors of :meth:`receive`."""
        rows = self._rows(header)
        if header.dtype != torch.int64 or len(header.shape) != 1 or header.shape[0] > rows.table.rows:
            raise RefusedError(f"PULL_ROWS of {rows.table.name} carries {header.dtype} {list(header.shape)}")
        ids_n = torch.empty(header.shape, dtype=torch.int64)
        channel.fill([view(ids_n)])
        _check_ids(rows, ids_n)
        return rows, ids_n

    def _rows(self, header: Header) -> Rows:
        table, tables = Fields._make(header.fields).table, self.shard.parameters.tables
        if table >= len(tables):
            raise RefusedError(f"rows of table {table}; there are {len(tables)}")
        return tables[table]

    def take(self, header: Header, gradient: Gradient) -> None:
        """Push a received gradient to the shard. Raises RefusedError like :meth:`Shard.push`."""
        fields = Fields._make(header.fields)
        first = len(self.shard.parameters.buckets) if header.operation == Operation.PUSH_ROWS else 0
        part = {"step": fields.step, "width": fields.width, "node": fields.node, "seen": fields.seen}
        present = None
        if isinstance(gradient, Tensor):
            numel = self.shard.parameters.buckets[fields.table].numel
            present = gradient[numel:] > 0 if len(gradient) > numel else None
            gradient = gradient[:numel]
        self.shard.push(first + fields.table, gradient, present=present, **part)


def _check_ids(rows: Rows, ids_n: Tensor) -> None:
    """Raise RefusedError unless these are unique sorted ids (n,) of rows of this server."""
    ids = ids_n.numpy()  # its calls cost a quarter of torch's for few rows
    if not len(ids):
        return
    if not (ids[1:] > ids[:-1]).all():
        raise RefusedError(f"ids of rows of {rows.table.name} must be sorted and unique; these are not")
    if ids[0] < 0 or ids[-1] >= rows.table.rows:
        raise RefusedError(f"{rows.table.name} has rows 0 to {rows.table.rows - 1}; the request has others")
    if rows.rule.shards > 1 and not bool((rows.rule.shard_of(ids_n, rows.table) == rows.shard).all()):
        raise RefusedError(f"the request has rows of {rows.table.name} that belong to another server")
