"""A worker's signs of life."""

from __future__ import annotations

import threading
from typing import final

from worldsize.strategies.parameter_server.operations import shard_service
from worldsize.transport.channel import Channel, LostError
from worldsize.transport.dialer import Dialer
from worldsize.transport.frames import CommonOperation, Header, RefusedError
from worldsize.transport.registry import EndedError


@final
class WorkerHeartbeat:
    """Sends signs of life to the server that leads, from a thread of its own while the worker computes.

    Args:
        dialer: Finds that server.
        lease: Seconds after which the worker is taken for dead; four signs are sent in that time.
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
        """Stop sending signs of life."""
        self._ended.set()
