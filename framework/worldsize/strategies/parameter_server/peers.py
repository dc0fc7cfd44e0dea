"""Requests to the masters of shards, whichever processes these currently are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

from worldsize.net.channel import Channel, LostError
from worldsize.net.dialer import Dialer
from worldsize.net.frames import CommonOperation, Header, message
from worldsize.strategies.parameter_server.operations import Operation, shard_service
from worldsize.strategies.parameter_server.state_transfer import receive_tree

T = TypeVar("T")
Frame = tuple[Header, Sequence[memoryview]]


@final
class Peer:
    """Sends requests to the current master of a shard, and repeats them if the connection breaks."""

    def __init__(self, dialer: Dialer, shard: int) -> None:
        self._dialer, self._service = dialer, shard_service(shard)
        self._channel, _ = dialer.connect(self._service, "peer")

    def _request(self, frame: Frame, receive: Callable[[Channel], T]) -> T:
        while True:
            try:
                self._channel.send(*frame)
                return receive(self._channel)
            except LostError:
                self._channel.close()
                self._channel, _ = self._dialer.connect(self._service, "peer")

    def ask(self, operation: Operation) -> Any:
        """Request a message: NORMS or FACTS."""
        frame: Frame = (Header(operation), [])
        return self._request(frame, lambda channel: channel.message(channel.answer(CommonOperation.MESSAGE)))

    def command(self, operation: Operation, facts: Any) -> None:
        """Send a command, such as APPLY, and wait until it is done."""
        self._request(message(operation, facts), lambda channel: channel.answer(CommonOperation.DONE))

    def state(self) -> Any:
        """Request a copy of the shard's state."""

        def receive(channel: Channel) -> Any:
            channel.answer(CommonOperation.DONE)
            return receive_tree(channel)

        return self._request((Header(Operation.STATE), []), receive)


@final
class Peers:
    """Sends requests to the masters of several ``shards`` concurrently, each in its own thread."""

    def __init__(self, dialer: Dialer, shards: Iterable[int]) -> None:
        self._peers = [Peer(dialer, shard) for shard in shards]
        self._pool = ThreadPoolExecutor(max(1, len(self._peers)), "peer")

    def request(self, question: Callable[[Peer], T]) -> list[T]:
        """Call ``question`` with each peer; return the answers in the order of the shards."""
        return list(self._pool.map(question, self._peers))

    def ask(self, operation: Operation) -> list[Any]:
        """Request a message from each, see :meth:`Peer.ask`."""
        return self.request(lambda peer: peer.ask(operation))

    def command(self, operation: Operation, facts: Any) -> None:
        """Send a command to each, and wait until all are done, see :meth:`Peer.command`."""
        self.request(lambda peer: peer.command(operation, facts))
