"""Record of the pushes taken from each worker, so that each is taken once, whatever connections break."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from worldsize.transport.frames import RefusedError


@dataclass
class Session:
    """One worker since it last joined the run: its pushes of an epoch are numbered from 1.

    Attributes:
        epoch: The epoch in which the worker was admitted.
        sequence: Number of the last push that was taken.
    """

    epoch: int
    sequence: int = 0


@final
class Sessions:
    """The sessions of all workers on one server. Callers hold the shard's lock."""

    def __init__(self) -> None:
        self._by_name: dict[str, Session] = {}
        self._taken_by_master: dict[int, int] = {}  # sequence by epoch, while this server was a standby

    def open(self, name: str, epoch: int) -> Session:
        """Return the session of a worker. A later epoch begins anew; the same one goes on where its connection broke.

        Raises:
            RefusedError: The worker has joined in a later epoch since.
        """
        session = self._by_name.get(name)
        if session is None or epoch > session.epoch:
            session = self._by_name[name] = Session(epoch, self._taken_by_master.get(epoch, 0))
        if epoch < session.epoch:
            raise RefusedError(f"{name} has come back since as epoch {session.epoch}; this is {epoch}")
        return session

    def note_taken(self, epoch: int, sequence: int) -> None:
        """Note, as a standby, which push the master has taken last."""
        self._taken_by_master[epoch] = sequence

    def image(self) -> dict[int, int]:
        """Return the last sequence number of each epoch, for a standby."""
        return {**self._taken_by_master, **{each.epoch: each.sequence for each in self._by_name.values()}}

    def restore(self, image: Mapping[int, int]) -> None:
        """Take over the :meth:`image` of a master."""
        self._taken_by_master = dict(image)
