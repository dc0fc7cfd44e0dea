"""The service of a server for workers: it receives pushes, and sends weights and rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from worldsize.net.channel import Channel
from worldsize.net.frames import CommonOperation, Header, RefusedError, view
from worldsize.strategies.parameter_server.operations import Fields, Operation
from worldsize.strategies.parameter_server.sessions import Session
from worldsize.strategies.parameter_server.shard_master import ShardMaster

_SEEN_MODULUS = 2**32


@final
class WorkerService:
    """Serves pushes and pulls of the shard that ``master`` keeps."""

    def __init__(self, master: ShardMaster) -> None:
        self._master = master

    def serve(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Serve the connection of one worker until it ends. Raises LostError or RefusedError."""
        self._master.log.wait_for_standby()
        session = self._master.open_session(str(facts["name"]), _number(facts, "epoch"), seen=_number(facts, "seen", 0))
        welcome = {"sequence": session.sequence, "step": self._master.shard.step}
        channel.send_message(CommonOperation.WELCOME, welcome)
        while True:
            header = channel.header()
            match header.operation:
                case Operation.PUSH | Operation.PUSH_ROWS:
                    self._push(channel, header, session)
                case Operation.PULL:
                    self._pull(channel, header)
                case Operation.PULL_ROWS:
                    self._pull_rows(channel, header)
                case CommonOperation.SHARE:
                    channel.accept_share(self._master.timeout)
                case _:
                    raise RefusedError(f"{header.operation.name} from a worker")

    def _push(self, channel: Channel, header: Header, session: Session) -> None:
        fields = Fields._make(header.fields)
        if fields.epoch != session.epoch or fields.sequence != session.sequence + 1:
            raise RefusedError(
                f"received PUSH {fields.sequence} of epoch {fields.epoch}, expected {session.sequence + 1} of "
                f"{session.epoch}"
            )
        payload, gradient = self._master.receiver.receive(channel, header)
        self._master.push(header, payload, gradient, session)
        acknowledged = Fields(table=fields.table, sequence=fields.sequence)
        channel.send_later(Header(CommonOperation.DONE, fields=acknowledged))

    def _pull(self, channel: Channel, header: Header) -> None:
        """Send all buckets, once the updates of steps up to the one in the header are applied."""
        shard = self._master.shard
        seen = self._master.wait_for(Fields._make(header.fields).step) % _SEEN_MODULUS
        parameters = shard.parameters
        for index, (bucket, values_n) in enumerate(zip(parameters.buckets, parameters.values, strict=True)):
            fields = Fields(index, seen=seen, step=shard.step)
            channel.send(Header(Operation.WEIGHTS, bucket.dtype, (bucket.numel,), fields), [view(values_n)])
        self._master.count_pull(sum(values_n.nbytes for values_n in parameters.values))

    def _pull_rows(self, channel: Channel, header: Header) -> None:
        """Send rows by their ids, once the updates of steps up to the one in the header are applied."""
        asked = Fields._make(header.fields)
        rows, ids_n = self._master.receiver.receive_ids(channel, header)
        rows_nd, updates, step = self._master.pull_rows(rows, ids_n, step=asked.step)
        fields = Fields(asked.table, seen=updates % _SEEN_MODULUS, step=step)
        channel.send(Header(Operation.WEIGHTS, torch.float32, tuple(rows_nd.shape), fields), [view(rows_nd)])
        self._master.count_pull(rows_nd.nbytes)


def _number(facts: Mapping[str, Any], key: str, default: int | None = None) -> int:
    number = facts.get(key, default)
    if not isinstance(number, int):
        raise RefusedError(f"JOIN says {key}={str(number)[:50]}")
    return number
