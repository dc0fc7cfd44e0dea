"""How a server becomes master of its shard: first of all, from a standby, or back from a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, final

from worldsize.strategies.parameter_server.client import Dialer
from worldsize.strategies.parameter_server.server import Server
from worldsize.strategies.parameter_server.tree import receive_tree
from worldsize.transport.channel import Channel, LostError
from worldsize.transport.frames import Header, Operation, RefusedError
from worldsize.transport.registry import Entry

_POLL = 0.02  # seconds


@final
@dataclass
class Succession:
    """The path of one server to being master of ``shard``; ``epoch`` is that in which it is.

    ``founds``: this server is the one that begins. Afterwards it stays master only while :meth:`fence` says so.
    """

    dialer: Dialer
    shard: int
    address: str
    lease: float
    founds: bool
    epoch: int = field(default=0, init=False)

    def run(self, server: Server) -> None:
        """Returns when this server is master.

        Raises:
            EndedError: the run is over, and it was never needed.
            WorldsizeError: nobody became master in time.
        """
        while not self._is_master(server):
            pass
        print(f"{self.dialer.name} is master of shard {self.shard} in epoch {self.epoch}", flush=True)

    def fence(self) -> bool:
        """Become master anew, of the next epoch; False if another server has."""
        if not self.dialer.directory.claim(self.shard, self.epoch + 1, self.address, self.dialer.name):
            return False
        self.epoch += 1
        return True

    def is_master(self) -> bool:
        """Whether no other server has become master since."""
        entry = self.dialer.directory.newest(self.shard)
        return entry is None or entry.epoch == self.epoch

    def _is_master(self, server: Server) -> bool:
        entry = self.dialer.directory.newest(self.shard)
        if entry is None and self.founds:
            return self.fence()
        entry = entry or self.dialer.directory.wait(self.shard)
        self.epoch = entry.epoch
        try:
            if self._stand_by(server, entry):
                return self.fence()
        except RefusedError:  # it has not noticed yet that its old standby is dead
            time.sleep(_POLL)
            return False
        return self._nobody_came(server, entry) and self.fence()

    def _stand_by(self, server: Server, entry: Entry) -> bool:
        """Be the master's standby until it dies; False if it is dead already. Raises RefusedError: it has one."""
        self.dialer.directory.check_open()
        try:
            channel, _ = self.dialer.attempt(entry, "standby")
        except LostError:
            return False
        try:
            image = receive_tree(channel)
        except LostError:
            channel.close()
            return False
        server.adopt(image)
        channel.wait_at_most(self.lease)
        print(f"{self.dialer.name} stands by for {entry.name}", flush=True)
        try:
            _follow(server, channel)
        except LostError as error:
            self.dialer.directory.check_open()
            print(f"{entry.name} is gone: {error}", flush=True)
        finally:
            channel.close()
        return True

    def _nobody_came(self, server: Server, entry: Entry) -> bool:
        """After the master's death: whether no standby has taken over within a lease."""
        deadline = time.monotonic() + (self.lease if server.replicated else 0.0)
        while (now := self.dialer.directory.newest(self.shard)) is None or now.epoch == entry.epoch:
            self.dialer.directory.check_open()
            if time.monotonic() > deadline:
                return True
            time.sleep(_POLL)
        return False


def _follow(server: Server, channel: Channel) -> None:
    """Make every operation of the master, in its order. What it refused changes nothing here either."""
    while True:
        header = channel.header()
        try:
            _make(server, channel, header)
        except RefusedError as error:
            print(f"as the master, refused: {error}", flush=True)
        channel.send(Header(Operation.DONE))


def _make(server: Server, channel: Channel, header: Header) -> None:
    match header.operation:
        case Operation.PUSH | Operation.PUSH_ROWS:
            server.follow(channel, header)
        case Operation.APPLY:
            facts: dict[str, Any] = channel.message(header)
            server.shard.apply(facts["step"], facts["factor"])
        case Operation.RESET:
            server.reset(**channel.message(header))
        case Operation.HEARTBEAT:
            pass
        case _:
            raise RefusedError(f"{header.operation.name} from the master")
