"""The master's log of operations: its standby performs each operation before it is acknowledged."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, final

from worldsize.net.channel import Channel, LostError
from worldsize.net.frames import CommonOperation, Header, RefusedError
from worldsize.strategies.parameter_server.mastership import Mastership
from worldsize.strategies.parameter_server.state_transfer import send_tree

_logger = logging.getLogger(__name__)

_FENCED = 70  # exit code


@dataclass
class _Standby:
    """The server that has a copy of the shard, and the numbers of operations that it was sent and has performed."""

    channel: Channel
    sent: int = 0
    made: int = 0


Ticket = tuple[_Standby, int]  # the number of a forwarded operation


@final
class ReplicationLog:
    """Forwards changes of a shard to its standby, in the same order.

    Args:
        mastership: Renewed when a standby is given up; a server that lost it ends at once, without acknowledging.
        lease: Seconds without an answer after which a standby is given up.
        expects_standby: Whether a standby will connect.

    Attributes:
        changed: Guards the shard; notified when it has changed.
        ended: Set when the run is over.
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
        """Start to check the mastership regularly."""
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def _watch(self) -> None:
        """Send heartbeats to the standby, and end this process if another server has become master."""
        while not self.ended.wait(self._lease / 4):
            if not self._mastership.is_current():
                _end_fenced()
            with self.changed:
                self.forward(Header(CommonOperation.HEARTBEAT), [])

    def wait_for_standby(self) -> None:
        """Wait until a standby has connected, if one is expected, but no longer than a lease."""
        self._is_followed.wait(self._lease)

    def lead(self, channel: Channel, name: str, image: Callable[[], Any]) -> None:
        """Send the standby ``name`` a copy of the state, and every later operation, until it disconnects.

        Args:
            channel: The connection to the standby.
            name: The name of the standby.
            image: Returns the copy; called with the lock held.

        Raises:
            RefusedError: There is a standby already.
            LostError: The standby disconnected before it received the copy.
        """
        channel.wait_at_most(self._lease)
        standby = _Standby(channel)
        with self.changed:
            if self._standby is not None:
                raise RefusedError("there is a standby already")
            channel.send_message(CommonOperation.WELCOME, {})
            send_tree(channel, image())
            self._standby = standby
        self._is_followed.set()
        _logger.info("%s stands by", name)
        with suppress(LostError, RefusedError):
            while True:
                channel.answer(CommonOperation.DONE)
                with self.changed:
                    standby.made += 1
                    self.changed.notify_all()
        self._abandon(standby)

    def forward(self, header: Header, payload: Sequence[memoryview]) -> Ticket | None:
        """Send an operation to the standby, if there is one.

        The caller holds the lock until it has performed the operation itself, so that both perform all in the same
        order.
        """
        standby = self._standby
        if standby is None:
            return None
        try:
            standby.channel.send(header, payload)
        except LostError:
            self._abandon(standby)
            return None
        standby.sent += 1
        return standby, standby.sent

    def settle(self, ticket: Ticket | None) -> None:
        """Wait until the standby has performed the operation, or is given up. The caller holds no lock."""
        if ticket is not None:
            standby, number = ticket
            with self.changed:
                self.changed.wait_for(lambda: standby.made >= number or self._standby is not standby)

    def _abandon(self, standby: _Standby) -> None:
        """Continue without a standby, unless it has declared this server dead and become master."""
        with self.changed:
            if self._standby is not standby or self.ended.is_set():
                return
            if not self._mastership.renew():
                _end_fenced()
            self._standby = None
            self.changed.notify_all()
        _logger.info("there is no standby any more")


def _end_fenced() -> NoReturn:
    _logger.info("another server is master of this shard now")
    os._exit(_FENCED)
