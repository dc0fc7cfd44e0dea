"""Messages between the stages of a pipeline, with waits that end when the gang does.

When a wait for a message of gloo times out, gloo closes all connections of the group, so that nobody can look in
between whether the gang has ended; the wait for a collective can be tried again. So a message is a broadcast in a group
of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from worldsize.dist.step_timer import started, wait


def neighbours(pipeline: int, *, is_ring: bool) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ranks of a pipeline of which the first one sends to the second, forward and backward.

    ``is_ring``: the stage after the last rank's is on the first rank again.
    """
    for rank in range(pipeline if is_ring and pipeline > 2 else pipeline - 1):
        yield rank, (rank + 1) % pipeline
        yield (rank + 1) % pipeline, rank


@final
@dataclass(frozen=True)
class Edges:
    """Messages of pipeline rank ``rank``; ``groups``: by the ranks that send and receive, a group of the two.

    Both ranks must start the messages of a group in the same order.
    """

    rank: int
    groups: Mapping[tuple[int, int], ProcessGroup]

    def start(self, tensor: Tensor, source: int, target: int) -> Work:
        """Start to send ``tensor``, of any shape, if this is rank ``source``, or to fill it if it is ``target``."""
        first = 0 if source < target else 1  # the ranks of a group are in ascending order
        return started(dist.broadcast(tensor, group=self.groups[source, target], group_src=first, async_op=True))

    def messages(self, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return these messages between stages, to be sent and waited for in this way."""
        return [_Message(each, self) for each in messages]


@final
class _Message(dist.P2POp):
    def __new__(cls, message: dist.P2POp, edges: Edges) -> _Message:
        made = super().__new__(cls, message.op, message.tensor)
        assert isinstance(made, cls)
        return made

    def __init__(self, message: dist.P2POp, edges: Edges) -> None:
        sends, peer = message.op is dist.isend, message.group_peer
        pair = (edges.rank, peer) if sends else (peer, edges.rank)
        start: Any = partial(_started, edges, pair)  # what it returns need only have wait()
        super().__init__(start, message.tensor, message.peer, message.group, message.tag)


def _started(edges: Edges, pair: tuple[int, int], tensor: Tensor, **_: Any) -> _Patient:
    message = tensor.contiguous()  # gloo takes no other; torch may allocate what it receives with any strides
    receives = pair[1] == edges.rank and message is not tensor
    return _Patient(edges.start(message, *pair), message, tensor if receives else None)


@final
@dataclass(frozen=True)
class _Patient:
    """A message on its way; ``filled``: the tensor to copy it to once it is there, if it is not that tensor itself."""

    work: Work
    message: Tensor
    filled: Tensor | None

    def wait(self) -> None:
        wait(self.work)
        if self.filled is not None:
            self.filled.detach().copy_(self.message)
