"""Connects to services: looks one up, authenticates, joins, and retries while another process takes it over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, final

from worldsize.net.certificates import Credentials
from worldsize.net.channel import Channel, LostError
from worldsize.net.endpoints import connect
from worldsize.net.frames import CommonOperation, RefusedError
from worldsize.net.registry import Entry, Registry

_RETRY = 0.02  # seconds


@final
@dataclass(frozen=True)
class Dialer:
    """Connects a process of the run to services, whichever process currently serves them.

    Attributes:
        name: The name of this process, as in its certificate.
        registry: The registry of the run's services.
        credentials: The certificate of this process; None if the services need none.
        timeout: Seconds to look for a service, and to wait for a peer that makes no progress.
        operations: The protocol.
    """

    name: str
    registry: Registry
    credentials: Credentials | None
    timeout: float
    operations: type[IntEnum]

    def connect(self, service: str, kind: str, **facts: Any) -> tuple[Channel, Mapping[str, Any]]:
        """Join ``service`` for the purpose ``kind``, and retry until the timeout if nobody answers.

        Args:
            service: The name of the service in the registry.
            kind: The purpose of the connection, by which the server chooses how to serve it.
            facts: Further facts for the server, plain values.

        Returns:
            A channel, and the facts of the server's WELCOME.

        Raises:
            LostError: No server answers in time.
            EndedError: The run has ended.
            WorldsizeError: No process has taken the service in time.
            RefusedError: The server does not accept this process.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            entry = self.registry.wait(service)
            try:
                return self.attempt(entry, kind, **facts)
            except LostError as error:
                self.registry.check_open()
                if time.monotonic() > deadline:
                    raise LostError(f"{service} ({entry.name}) does not answer: {error}") from error
                time.sleep(_RETRY)

    def attempt(self, entry: Entry, kind: str, **facts: Any) -> tuple[Channel, Mapping[str, Any]]:
        """Join the process of ``entry`` as :meth:`connect` does, without retries. Raises LostError or RefusedError."""
        channel = connect(
            entry.address, self.credentials, peer=entry.name, seconds=self.timeout, operations=self.operations
        )
        try:
            channel.wait_at_most(self.timeout)
            channel.send_message(CommonOperation.JOIN, {"kind": kind, "name": self.name, **facts})
            return channel, channel.message(channel.answer(CommonOperation.WELCOME))
        except (LostError, RefusedError):
            channel.close()
            raise
