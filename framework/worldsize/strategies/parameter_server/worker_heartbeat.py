"""A worker's heartbeats."""

from __future__ import annotations

import threading
from typing import final

from worldsize.net.channel import Channel, LostError
from worldsize.net.dialer import Dialer
from worldsize.net.frames import CommonOperation, Header, RefusedError
from worldsize.net.registry import EndedError
from worldsize.strategies.parameter_server.operations import shard_service


@final
class WorkerHeartbeat:
    """Sends heartbeats to the leading server, from a background thread while the worker computes.

    Args:
        dialer: Connects to that server.
        lease: Seconds after which the worker is declared dead; four heartbeats are sent in that time.
    """

    def __init__(self, dialer: Dialer, lease: float) -> None:
        self._dialer, self._interval = dialer, lease / 4
        self._ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def _beat(self) -> None:
        channel: Channel | None = None
        while not self._ended.wait(self._interval):
            try:
                channel = channel or self._dialer.connect(shard_service(0), "beat")[0]
                channel.send(Header(CommonOperation.HEARTBEAT))
            except EndedError:
                return
            except (LostError, RefusedError):
                channel = None

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._ended.set()
