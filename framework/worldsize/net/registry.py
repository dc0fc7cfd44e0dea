"""Registry of a run's services: a shared folder, with an epoch per takeover.

A service is anything that processes connect to, such as "shard 0" or "centre". Its server in an epoch is the process
that created the epoch's file. Creation is exclusive, so an epoch cannot have two servers. Any process with write access
can become a server, so the folder must be private to the run. (With credentials, servers also prove their names.)

:class:`Dialer` looks up a service, authenticates, joins, and retries during a takeover.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, final

from worldsize.errors import WorldsizeError
from worldsize.files import read_regular
from worldsize.net.channel import Channel, LostError
from worldsize.net.credentials import Credentials
from worldsize.net.endpoints import connect_channel
from worldsize.net.frames import CommonOperation, RefusedError

_POLL = 0.01  # seconds between two look-ups
_LARGEST = 1 << 16  # maximum bytes per entry


class EndedError(WorldsizeError):
    """The run and its services have ended."""


@final
@dataclass(frozen=True)
class Registration:
    """A service's server in one epoch.

    Attributes:
        epoch: Number of the takeover, from 1.
        address: Address at which the server listens, see :mod:`worldsize.net.endpoints`.
        name: The server's name, as in its certificate.
    """

    epoch: int
    address: str
    name: str


@final
@dataclass(frozen=True)
class Registry:
    """Registry of a run's services.

    Attributes:
        folder: Folder shared by all processes of the run.
        timeout: Maximum seconds to wait for a server.
    """

    folder: Path
    timeout: float

    def read_newest(self, service: str) -> Registration | None:
        """Return the newest server of ``service``; None if it has not had one yet."""
        files = sorted(self._get_folder(service).glob("epoch_*.json"), key=_parse_epoch)
        if not files:
            return None
        return Registration(_parse_epoch(files[-1]), **json.loads(read_regular(files[-1], at_most=_LARGEST)))

    def acquire(self, service: str, epoch: int, address: str, name: str) -> bool:
        """Try to become the server of ``service`` in ``epoch``; return False if there is one."""
        folder = self._get_folder(service)
        for each in (self.folder, folder):  # without parents=True, so that a deleted run folder is not recreated
            each.mkdir(exist_ok=True)
        draft = folder / f".{name}"
        draft.write_text(json.dumps({"address": address, "name": name}))
        try:
            os.link(draft, folder / f"epoch_{epoch:06d}.json")  # atomic, and fails if the file exists
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def wait_for_server(self, service: str, after: int = 0) -> Registration:
        """Wait for a registration in an epoch later than ``after``, and return the newest.

        Raises:
            WorldsizeError: No process registered in time.
            EndedError: The run has ended, so no process will register.
        """
        deadline = time.monotonic() + self.timeout
        while (entry := self.read_newest(service)) is None or entry.epoch <= after:
            self.check_open()
            if time.monotonic() > deadline:
                raise WorldsizeError(
                    f"no server for {service} was registered within {self.timeout:g} s (cluster.timeout)."
                )
            time.sleep(_POLL)
        return entry

    def mark_ended(self) -> None:
        """Mark the run as ended, so that processes stop waiting for services."""
        (self.folder / "ended").touch()

    def check_open(self) -> None:
        """Raise EndedError if the run has ended."""
        if (self.folder / "ended").exists():
            raise EndedError("the run has ended.")

    def _get_folder(self, service: str) -> Path:
        return self.folder / service.replace(" ", "_")


def _parse_epoch(path: Path) -> int:
    return int(path.stem.removeprefix("epoch_"))


_RETRY = 0.02  # seconds between two attempts


@final
@dataclass(frozen=True)
class Dialer:
    """Connects this process to the current servers of services.

    Attributes:
        name: The name of this process, as in its certificate.
        registry: The registry of the run's services.
        credentials: The credentials of this process; None without TLS.
        timeout: Maximum seconds to wait for a service to register, and for a peer to make progress.
        operations: The operations of the protocol.
    """

    name: str
    registry: Registry
    credentials: Credentials | None
    timeout: float
    operations: type[IntEnum]

    def connect(self, service: str, kind: str, **facts: Any) -> tuple[Channel, Mapping[str, Any]]:
        """Join ``service``, and retry until the timeout if the connection fails.

        Args:
            service: Name of the service in the registry.
            kind: Purpose of the connection; selects the service that handles it.
            facts: Further facts for the server, as plain values.

        Returns:
            A channel, and the facts of the server's WELCOME.

        Raises:
            LostError: The server does not answer in time.
            EndedError: The run has ended.
            WorldsizeError: No process registered for the service in time.
            RefusedError: The server does not accept this process.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            entry = self.registry.wait_for_server(service)
            try:
                return self.connect_once(entry, kind, **facts)
            except LostError as error:
                self.registry.check_open()
                if time.monotonic() > deadline:
                    raise LostError(f"{service} ({entry.name}) is not responding: {error}") from error
                time.sleep(_RETRY)

    def connect_once(self, entry: Registration, kind: str, **facts: Any) -> tuple[Channel, Mapping[str, Any]]:
        """Join the server ``entry`` once, see :meth:`connect`. Raises LostError or RefusedError."""
        channel = connect_channel(
            entry.address, self.credentials, peer=entry.name, seconds=self.timeout, operations=self.operations
        )
        try:
            channel.wait_at_most(self.timeout)
            channel.send_message(CommonOperation.JOIN, {"kind": kind, "name": self.name, **facts})
            return channel, channel.receive_message(channel.receive_answer(CommonOperation.WELCOME))
        except (LostError, RefusedError):
            channel.close()
            raise
