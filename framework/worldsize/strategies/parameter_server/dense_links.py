"""The dense parameters of a worker, and its connections to the servers that own them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from worldsize.core import FaultPoints
from worldsize.net.frames import view
from worldsize.strategies.parameter_server.gradient_codecs import Feedback
from worldsize.strategies.parameter_server.shard_link import ShardLink
from worldsize.strategies.parameter_server.sharding import Bucket, BucketKey, ShardingPlan
from worldsize.strategies.parameter_server.step_gradients import with_presence


@final
class DenseLinks:
    """Pushes gradients of dense parameters to their servers, and pulls their weights into the model's own memory.

    Args:
        parameters: The model's trained parameters, by name.
        plan: The buckets of each server, and the wire format of gradients.
        first: The server to begin with, modulo their number: each worker begins with a different one, so that they do
            not all wait for the same link.
        faults: Points at which a fault can be injected between the pushes to two servers.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], plan: ShardingPlan, *, first: int, faults: FaultPoints
    ) -> None:
        self._shards, self._faults = plan.shards, faults
        self._links: Sequence[ShardLink] = ()
        self._order = [(first + turn) % len(plan.shards) for turn in range(len(plan.shards))]
        self._feedback = Feedback(plan.codec) if plan.codec else None
        self._memory = [
            [(bucket.dtype, [view(piece.of(parameters[piece.name])) for piece in bucket.pieces]) for bucket in shard]
            for shard in plan.shards
        ]

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self._shards)

    def connect(self, links: Sequence[ShardLink]) -> None:
        """Replace the connections to the servers."""
        self._links = links

    def pull(self, step: int) -> None:
        """Pull all weights, once they include the updates of steps up to ``step``."""
        for link in self._links:
            link.ask(step)
        for server in self._order:
            self._links[server].receive(self._memory[server])

    def push(self, gradients: Mapping[str, Tensor | None], *, step: int, width: int, node: int) -> None:
        """Push all gradients, by name and in the shapes of their parameters; see :meth:`push_bucket`."""
        part = {"step": step, "width": width, "node": node}
        for turn, server in enumerate(self._order):
            self._faults.at("push:next-server" if turn else "push:begin")
            for table in range(len(self._shards[server])):
                self.push_bucket((server, table), gradients, part)

    def push_bucket(self, key: BucketKey, gradients: Mapping[str, Tensor | None], part: Mapping[str, int]) -> None:
        """Push the gradient of one bucket.

        Args:
            key: The bucket.
            gradients: Gradients of the parameters in it, by name, in the shapes of the parameters; None: a parameter
                has none.
            part: The part of a step that they are, as keywords of :meth:`ShardLink.push`.
        """
        server, table = key
        bucket = self._shards[server][table]
        own = [gradients[piece.name] for piece in bucket.pieces]
        pieces = [
            torch.zeros(piece.shape, dtype=piece.dtype) if each is None else piece.of(each).cpu().contiguous()
            for piece, each in zip(bucket.pieces, own, strict=True)
        ]
        dtype, payload = self._encoded(bucket, pieces)
        if (presence := with_presence([each is not None for each in own], dtype)) is not None:
            payload.append(view(presence))
        self._links[server].push(table, dtype, payload, **part)

    def settle(self) -> None:
        """Wait until the servers have acknowledged all pushes over these links, including rows of tables."""
        for link in self._links:
            link.settle()

    def _encoded(self, bucket: Bucket, pieces: Sequence[Tensor]) -> tuple[torch.dtype, list[memoryview]]:
        if self._feedback is None:
            return bucket.dtype, [view(piece) for piece in pieces]
        flat_n = torch.cat([piece.flatten() for piece in pieces])
        return self._feedback.codec.dtype, [view(self._feedback.encode(bucket, flat_n))]
