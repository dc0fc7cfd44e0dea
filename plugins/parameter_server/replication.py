"""Shard replication: a master acknowledges a push only after its standby has applied it.

Mastership is the exclusive right to acknowledge pushes to a shard. The master forwards its log of operations to its
standby. A server becomes master of its shard as the first server, as a standby, or from a checkpoint.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, final

from plugins.parameter_server.protocol import Fields, Operation, Sessions, receive_tree, send_tree
from plugins.parameter_server.shard import PushReceiver
from worldsize.net.channel import Channel, LostError
from worldsize.net.frames import CommonOperation, Header, RefusedError
from worldsize.net.registry import Dialer, Registration, Registry

_logger = logging.getLogger(__name__)

_FENCED = 70  # exit code of a server that lost its mastership


@dataclass
class _Standby:
    """Connection to a standby, with the numbers of sent and of completed operations."""

    channel: Channel
    sent: int = 0
    made: int = 0


Ticket = tuple[_Standby, int]  # a standby, and the number of an operation sent to it


@final
class ReplicationLog:
    """Forwards changes of a shard to its standby, in order.

    Args:
        mastership: Renewed when a standby is given up. A server that has lost it exits at once, without acknowledging.
        lease: Seconds without an answer before a standby is given up.
        expects_standby: Whether a standby will connect.

    Attributes:
        changed: Guards the shard; notified when it has changed.
        ended: Set when the run has ended.
    """

    def __init__(self, mastership: Mastership, *, lease: float, expects_standby: bool) -> None:
        self._mastership, self._lease = mastership, lease
        self.changed = threading.Condition()
        self.ended = threading.Event()
        self._standby: _Standby | None = None
        self._is_followed = threading.Event()
        if not expects_standby:
            self._is_followed.set()

    def start(self) -> None:
        """Start a thread that regularly checks whether this server is still the master."""
        threading.Thread(target=self._watch_mastership, daemon=True, name="watch").start()

    def _watch_mastership(self) -> None:
        """Send heartbeats to the standby; exit this process if a different server has become master."""
        while not self.ended.wait(self._lease / 4):
            if not self._mastership.is_current():
                _end_fenced()
            with self.changed:
                self.forward_operation(Header(CommonOperation.HEARTBEAT), [])

    def wait_for_standby(self) -> None:
        """Wait for at most one lease until a standby has connected, if one is expected."""
        self._is_followed.wait(self._lease)

    def serve_standby(self, channel: Channel, name: str, image: Callable[[], Any]) -> None:
        """Send the standby ``name`` the state, then all operations until it disconnects.

        Args:
            channel: The connection to the standby.
            name: The name of the standby.
            image: Returns the copy; called with the lock held.

        Raises:
            RefusedError: There already is a standby.
            LostError: The standby disconnected before it received the copy.
        """
        channel.wait_at_most(self._lease)
        standby = _Standby(channel)
        with self.changed:
            if self._standby is not None:
                raise RefusedError("a standby is already connected")
            channel.send_message(CommonOperation.WELCOME, {})
            send_tree(channel, image())
            self._standby = standby
        self._is_followed.set()
        _logger.info("%s is the standby", name)
        with suppress(LostError, RefusedError):
            while True:
                channel.receive_answer(CommonOperation.DONE)
                with self.changed:
                    standby.made += 1
                    self.changed.notify_all()
        self._drop_standby(standby)

    def forward_operation(self, header: Header, payload: Sequence[memoryview]) -> Ticket | None:
        """Send an operation to the standby, if there is one.

        The caller must hold the lock until it has performed the operation itself, so that the order is the same on
        both.
        """
        standby = self._standby
        if standby is None:
            return None
        try:
            standby.channel.send(header, payload)
        except LostError:
            self._drop_standby(standby)
            return None
        standby.sent += 1
        return standby, standby.sent

    def wait_for_ticket(self, ticket: Ticket | None) -> None:
        """Wait until the standby has done the operation or is given up. Call it without the lock."""
        if ticket is not None:
            standby, number = ticket
            with self.changed:
                self.changed.wait_for(lambda: standby.made >= number or self._standby is not standby)

    def _drop_standby(self, standby: _Standby) -> None:
        """Continue without a standby.

        If the standby has declared this server dead and become master, this process exits.
        """
        with self.changed:
            if self._standby is not standby or self.ended.is_set():
                return
            if not self._mastership.claim_next_epoch():
                _end_fenced()
            self._standby = None
            self.changed.notify_all()
        _logger.info("lost the standby")


def _end_fenced() -> NoReturn:
    _logger.info("another server is now master of this shard")
    os._exit(_FENCED)


_POLL = 0.02  # seconds between two polls of the registry


@final
class Succession:
    """Waits until this server becomes master of its shard, acting as a standby meanwhile if possible.

    Args:
        dialer: Connects this server to the others.
        mastership: The right to serve the shard; this server has it once :meth:`run` returns.
        receiver: Receives pushes to the shard, forwarded by the master while this server is its standby.
        sessions: The sessions of the shard's workers, copied from the master.
        lease: Seconds without a heartbeat before a master is declared dead.
        is_first: Whether this server becomes master if the shard has not had one.
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
        """Wait until this server is master.

        Raises:
            EndedError: The run has ended, and this server never became master.
            WorldsizeError: No server became master in time.
        """
        while not self._becomes_master():
            pass
        master = self.mastership
        _logger.info("%s is master of %s in epoch %d", self._dialer.name, master.service, master.epoch)

    def _becomes_master(self) -> bool:
        service = self.mastership.service
        entry = self._registry.read_newest(service)
        if entry is None and self._is_first:
            return self.mastership.claim_next_epoch()
        entry = entry or self._registry.wait_for_server(service)
        self.mastership.epoch = entry.epoch
        try:
            if self._stand_by(entry):
                return self.mastership.claim_next_epoch()
        except RefusedError:  # the master still has a standby, perhaps a dead one that it has not noticed yet
            time.sleep(_POLL)
            return False
        return self._nobody_came(entry) and self.mastership.claim_next_epoch()

    def _stand_by(self, entry: Registration) -> bool:
        """Act as the master's standby until it dies. Returns False if it is already dead.

        Raises:
            RefusedError: The master already has a standby.
        """
        self._registry.check_open()
        try:
            channel, _ = self._dialer.connect_once(entry, "standby")
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
        _logger.info("%s is the standby of %s", self._dialer.name, entry.name)
        try:
            self._follow_master(channel)
        except LostError as error:
            self._registry.check_open()
            _logger.info("lost %s: %s", entry.name, error)
        finally:
            channel.close()
        return True

    def _nobody_came(self, entry: Registration) -> bool:
        """Return whether no standby has taken over within a lease after the master's death."""
        deadline = time.monotonic() + (self._lease if self._has_standbys else 0.0)
        while (now := self._registry.read_newest(self.mastership.service)) is None or now.epoch == entry.epoch:
            self._registry.check_open()
            if time.monotonic() > deadline:
                return True
            time.sleep(_POLL)
        return False

    def _follow_master(self, channel: Channel) -> None:
        """Apply the master's operations in order. Pushes that the master refused are refused here, too."""
        while True:
            header = channel.receive_header()
            try:
                self._perform_operation(channel, header)
            except RefusedError as error:
                _logger.info("refused an operation, as the master did: %s", error)
            channel.send(Header(CommonOperation.DONE))

    def _perform_operation(self, channel: Channel, header: Header) -> None:
        shard = self.receiver.shard
        match header.operation:
            case Operation.PUSH | Operation.PUSH_ROWS:
                _, gradient = self.receiver.receive_push(channel, header)
                fields = Fields._make(header.fields)
                self.sessions.note_taken(fields.epoch, fields.sequence)
                self.receiver.push_gradient(header, gradient)
            case Operation.APPLY:
                shard.commit_step(**channel.receive_message(header))
            case Operation.WEIGH:
                shard.scale_gradient(**channel.receive_message(header))
            case Operation.ADVANCE:
                shard.parameters.advance_schedule_by(**channel.receive_message(header))
            case Operation.RESET:
                shard.reset_to_step(**channel.receive_message(header))
            case CommonOperation.HEARTBEAT:
                pass
            case _:
                raise RefusedError(f"unexpected {header.operation.name} from the master")


class Mastership(ABC):
    """A server's right to acknowledge pushes to its shard."""

    @abstractmethod
    def claim_next_epoch(self) -> bool:
        """Become master of the next epoch; return False if a different server already has."""

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether this server is still the latest master."""


@final
class SoleMastership(Mastership):
    """Mastership of a server without standbys, which needs no registration."""

    def claim_next_epoch(self) -> bool:
        return True

    def is_current(self) -> bool:
        return True


@final
class RegisteredMastership(Mastership):
    """Mastership by registration: it belongs to the server that registered for the latest epoch.

    Args:
        registry: The run's service registry.
        service: The shard's name in the registry.
        address: The address of this server's listener.
        name: The name of this server, as in its certificate.

    Attributes:
        epoch: The epoch of this server's mastership, or the latest one it has seen as a standby.
    """

    def __init__(self, registry: Registry, service: str, *, address: str, name: str) -> None:
        self._registry, self._address, self._name = registry, address, name
        self.service = service
        self.epoch = 0

    def claim_next_epoch(self) -> bool:
        if not self._registry.acquire(self.service, self.epoch + 1, self._address, self._name):
            return False
        self.epoch += 1
        return True

    def is_current(self) -> bool:
        entry = self._registry.read_newest(self.service)
        return entry is None or entry.epoch == self.epoch
