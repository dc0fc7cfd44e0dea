"""Registry of a run's services: a folder that all processes share, with an epoch for each takeover.

A service is anything that others connect to, such as "shard 0" or "centre". The process that created ``epoch_n.json``
serves it in epoch n. Creation is exclusive, so that no epoch has two servers. Whoever can write the folder can serve,
so it must be private to the run. (With credentials, a connection also proves the name of the server.)

:class:`Dialer` looks a service up, authenticates, joins, and retries while another process takes it over.
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
from worldsize.net.endpoints import connect
from worldsize.net.frames import CommonOperation, RefusedError

_POLL = 0.01  # seconds
_LARGEST = 1 << 16  # bytes of an entry


class EndedError(WorldsizeError):
    """The run has ended; there is nobody to connect to."""


@final
@dataclass(frozen=True)
class Registration:
    """The process that serves a service.

    Attributes:
        epoch: Number of the takeover, from 1.
        address: Where the process listens, see :mod:`worldsize.net.endpoints`.
        name: The process's name, as in its certificate.
    """

    epoch: int
    address: str
    name: str


@final
@dataclass(frozen=True)
class Registry:
    """The registry of a run's services.

    Attributes:
        folder: The folder that all processes of the run share.
        timeout: Seconds to wait for a server.
    """

    folder: Path
    timeout: float

    def newest(self, service: str) -> Registration | None:
        """Return the newest server of ``service``; None: there was none yet."""
        files = sorted(self._folder_of(service).glob("epoch_*.json"), key=_epoch_of)
        if not files:
            return None
        return Registration(_epoch_of(files[-1]), **json.loads(read_regular(files[-1], at_most=_LARGEST)))

    def acquire(self, service: str, epoch: int, address: str, name: str) -> bool:
        """Try to become the server of ``service`` in ``epoch``; return False if another process is."""
        folder = self._folder_of(service)
        for each in (self.folder, folder):  # not their parents: a run folder that was deleted stays deleted
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

    def wait(self, service: str, after: int = 0) -> Registration:
        """Wait for an entry of an epoch later than ``after``, and return the newest.

        Raises:
            WorldsizeError: No process took the service in time.
            EndedError: The run has ended, so no process will.
        """
        deadline = time.monotonic() + self.timeout
        while (entry := self.newest(service)) is None or entry.epoch <= after:
            self.check_open()
            if time.monotonic() > deadline:
                raise WorldsizeError(f"no server has taken {service} within {self.timeout:g} s (cluster.timeout).")
            time.sleep(_POLL)
        return entry

    def end(self) -> None:
        """Mark the run as ended, for all processes that look for a service."""
        (self.folder / "ended").touch()

    def check_open(self) -> None:
        """Raise EndedError if the run has ended."""
        if (self.folder / "ended").exists():
            raise EndedError("the run has ended.")

    def _folder_of(self, service: str) -> Path:
        return self.folder / service.replace(" ", "_")


def _epoch_of(path: Path) -> int:
    return int(path.stem.removeprefix("epoch_"))


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

    def attempt(self, entry: Registration, kind: str, **facts: Any) -> tuple[Channel, Mapping[str, Any]]:
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
