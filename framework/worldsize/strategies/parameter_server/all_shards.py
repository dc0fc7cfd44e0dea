"""Requests of the server that leads to all shards: its own, and those of the other servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

from worldsize.strategies.parameter_server.operations import Operation, shard_service
from worldsize.strategies.parameter_server.server import ShardServer
from worldsize.strategies.parameter_server.state_transfer import receive_tree
from worldsize.transport.channel import Channel, LostError
from worldsize.transport.dialer import Dialer
from worldsize.transport.frames import CommonOperation, Header, message

T = TypeVar("T")
Frame = tuple[Header, Sequence[memoryview]]


@final
class Peer:
    """Asks the master of a shard, whichever process that is; a request is made again if the connection breaks."""

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
        """Ask for a message: NORMS or FACTS."""
        frame: Frame = (Header(operation), [])
        return self._request(frame, lambda channel: channel.message(channel.answer(CommonOperation.MESSAGE)))

    def command(self, operation: Operation, facts: Any) -> None:
        """Have the shard do something, APPLY, RESET, WEIGH or STOP, and wait until it has."""
        self._request(message(operation, facts), lambda channel: channel.answer(CommonOperation.DONE))

    def state(self) -> Any:
        """Ask for a copy of the shard's state."""

        def receive(channel: Channel) -> Any:
            channel.answer(CommonOperation.DONE)
            return receive_tree(channel)

        return self._request((Header(Operation.STATE), []), receive)


@final
class AllShards:
    """Every shard of the run, as the server that leads sees them: ``own``, and ``peers`` for the others."""

    def __init__(self, own: ShardServer, peers: Sequence[Peer]) -> None:
        self.own, self._master, self._peers = own, own.master, peers
        self._pool = ThreadPoolExecutor(max(1, len(peers)), "peer")

    def _ask(self, question: Callable[[Peer], T]) -> list[T]:
        """Ask all peers at once."""
        return list(self._pool.map(question, self._peers))

    def reset(self, step: int, factor: float | None) -> None:
        """Bring every shard to where this server is, which leads from now on; see :meth:`Shard.reset`."""
        self._master.reset(step, factor)
        for peer in self._peers:
            peer.command(Operation.RESET, {"step": step, "factor": factor})

    def apply(self, step: int, factor: float | None) -> None:
        """Commit the update of ``step`` on every shard; see :meth:`Shard.apply`."""
        self._master.apply(step, factor)  # from here on it is decided, also if this server dies
        self._ask(lambda peer: peer.command(Operation.APPLY, {"step": step, "factor": factor}))

    def weigh(self, step: int, factor: float) -> None:
        """Multiply the mean gradient of ``step`` on every shard; see :meth:`Shard.weigh`."""
        self._master.weigh(step, factor)
        self._ask(lambda peer: peer.command(Operation.WEIGH, {"step": step, "factor": factor}))

    def norms(self) -> dict[str, list[float]]:
        """Return the norms of the pieces of the gradient that waits for its commit, by parameter."""
        norms = self._master.norms()
        for others in self._ask(lambda peer: peer.ask(Operation.NORMS)):
            for name, more in others.items():
                norms.setdefault(name, []).extend(more)
        return norms

    def states(self) -> list[Mapping[str, Any]]:
        """Copy the state of every shard."""
        return [self._master.state(), *self._ask(Peer.state)]

    def facts(self) -> list[Mapping[str, Any]]:
        """Return the load of every server since the last call."""
        return [self.own.facts(), *self._ask(lambda peer: peer.ask(Operation.FACTS))]

    def stop(self) -> None:
        """Tell every server that the run is over."""
        self._master.log.ended.set()
        for peer in self._peers:
            peer.command(Operation.STOP, {})
