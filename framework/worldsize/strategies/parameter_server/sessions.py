"""Record of the pushes applied from each worker, so that each is applied exactly once if connections break."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from worldsize.net.frames import RefusedError


@dataclass
class Session:
    """One membership of a worker in the run; its pushes are numbered from 1.

    Attributes:
        epoch: The epoch in which the worker was admitted.
        sequence: Number of the last push that was applied.
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
        """Return the session of a worker. A later epoch starts a new session; the same epoch continues the old one.

        Raises:
            RefusedError: The worker has since joined in a later epoch.
        """
        session = self._by_name.get(name)
        if session is None or epoch > session.epoch:
            session = self._by_name[name] = Session(epoch, self._taken_by_master.get(epoch, 0))
        if epoch < session.epoch:
            raise RefusedError(f"{name} has since rejoined in epoch {session.epoch}; this is epoch {epoch}")
        return session

    def note_taken(self, epoch: int, sequence: int) -> None:
        """Record, on a standby, the last push that the master has applied."""
        self._taken_by_master[epoch] = sequence

    def image(self) -> dict[int, int]:
        """Return the last sequence number of each epoch, for a standby."""
        return {**self._taken_by_master, **{each.epoch: each.sequence for each in self._by_name.values()}}

    def restore(self, image: Mapping[int, int]) -> None:
        """Load the :meth:`image` of a master."""
        self._taken_by_master = dict(image)
