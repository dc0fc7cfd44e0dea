"""Succession: how a server becomes master of its shard, as the first one, as a standby, or from a checkpoint."""

from __future__ import annotations

import logging
import time
from typing import final

from worldsize.net.channel import Channel, LostError
from worldsize.net.dialer import Dialer
from worldsize.net.frames import CommonOperation, Header, RefusedError
from worldsize.net.registry import Entry
from worldsize.strategies.parameter_server.mastership import RegisteredMastership
from worldsize.strategies.parameter_server.operations import Fields, Operation
from worldsize.strategies.parameter_server.push_receiver import PushReceiver
from worldsize.strategies.parameter_server.sessions import Sessions
from worldsize.strategies.parameter_server.state_transfer import receive_tree

_logger = logging.getLogger(__name__)

_POLL = 0.02  # seconds


@final
class Succession:
    """Waits until a server is master of its shard, as a standby of the current master if there is one.

    Args:
        dialer: Connects this server to the others.
        mastership: The right to serve the shard; this server has it when :meth:`run` returns.
        receiver: Receives pushes to the shard; the master forwards them while this server is its standby.
        sessions: The sessions of the shard's workers, which are copied from the master meanwhile.
        lease: Seconds without a heartbeat after which a master is declared dead.
        is_first: Whether this server becomes master if the shard has had none.
        has_standbys: Whether another standby may take over from a dead master.
    """

    def __init__(
        self,
        dialer: Dialer,
        mastership: RegisteredMastership,
        receiver: PushReceiver,
        sessions: Sessions,
        *,
        lease: float,
        is_first: bool,
        has_standbys: bool,
    ) -> None:
        self.mastership, self.receiver, self.sessions = mastership, receiver, sessions
        self._dialer, self._registry = dialer, dialer.registry
        self._lease, self._is_first, self._has_standbys = lease, is_first, has_standbys

    def run(self) -> None:
        """Return when this server is master.

        Raises:
            EndedError: The run is over, and this server never became master.
            WorldsizeError: No server became master in time.
        """
        while not self._becomes_master():
            pass
        master = self.mastership
        _logger.info("%s is master of %s in epoch %d", self._dialer.name, master.service, master.epoch)

    def _becomes_master(self) -> bool:
        service = self.mastership.service
        entry = self._registry.newest(service)
        if entry is None and self._is_first:
            return self.mastership.renew()
        entry = entry or self._registry.wait(service)
        self.mastership.epoch = entry.epoch
        try:
            if self._stand_by(entry):
                return self.mastership.renew()
        except RefusedError:  # the master has not yet noticed that its old standby is dead
            time.sleep(_POLL)
            return False
        return self._nobody_came(entry) and self.mastership.renew()

    def _stand_by(self, entry: Entry) -> bool:
        """Be the master's standby until it dies; return False if it is dead already.

        Raises:
            RefusedError: The master has a standby.
        """
        self._registry.check_open()
        try:
            channel, _ = self._dialer.attempt(entry, "standby")
        except LostError:
            return False
        try:
            image = receive_tree(channel)
        except LostError:
            channel.close()
            return False
        self.receiver.shard.restore(image["shard"])
        self.sessions.restore(image["sessions"])
        channel.wait_at_most(self._lease)
        _logger.info("%s stands by for %s", self._dialer.name, entry.name)
        try:
            self._follow(channel)
        except LostError as error:
            self._registry.check_open()
            _logger.info("%s is gone: %s", entry.name, error)
        finally:
            channel.close()
        return True

    def _nobody_came(self, entry: Entry) -> bool:
        """Return whether no standby has taken over within a lease after the master's death."""
        deadline = time.monotonic() + (self._lease if self._has_standbys else 0.0)
        while (now := self._registry.newest(self.mastership.service)) is None or now.epoch == entry.epoch:
            self._registry.check_open()
            if time.monotonic() > deadline:
                return True
            time.sleep(_POLL)
        return False

    def _follow(self, channel: Channel) -> None:
        """Perform every operation of the master, in order. A push that it refused changes nothing here either."""
        while True:
            header = channel.header()
            try:
                self._make(channel, header)
            except RefusedError as error:
                _logger.info("as the master, refused: %s", error)
            channel.send(Header(CommonOperation.DONE))

    def _make(self, channel: Channel, header: Header) -> None:
        shard = self.receiver.shard
        match header.operation:
            case Operation.PUSH | Operation.PUSH_ROWS:
                _, gradient = self.receiver.receive(channel, header)
                fields = Fields._make(header.fields)
                self.sessions.note_taken(fields.epoch, fields.sequence)
                self.receiver.take(header, gradient)
            case Operation.APPLY:
                shard.apply(**channel.message(header))
            case Operation.WEIGH:
                shard.weigh(**channel.message(header))
            case Operation.ADVANCE:
                shard.parameters.advance_schedule_by(**channel.message(header))
            case Operation.RESET:
                shard.reset(**channel.message(header))
            case CommonOperation.HEARTBEAT:
                pass
            case _:
                raise RefusedError(f"{header.operation.name} from the master")
