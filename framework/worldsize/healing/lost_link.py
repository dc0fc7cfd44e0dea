"""Arbitration, through the run folder, between two disconnected hosts.

Neither host can detect whether its peer is dead, disconnected or only suspended. The host that creates a file, one per
connection, wins: either the first host, which continues without its peer, or the peer, which then requeues the job.
The file server creates a file only once, so the decision does not depend on the hosts' clocks or on delays in seeing
the folder's content. The file name is derived from the connection's keys, so each attempt and each start of the job
has its own file.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from worldsize.errors import FirstHostLostError, WorldsizeError
from worldsize.net.agent_connection import AgentConnection
from worldsize.record.run_directory import RunDirectory, is_locked
from worldsize.record.run_record import read_run

_logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds between two checks
_WAIT = 1.5  # multiple of ``node_timeout`` for which a host waits for the first host's decision
_NO_FILE = (errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # no host can create the file
_HOLD = 2.5  # multiple of ``node_timeout`` for others to decide; above _WAIT, since they may notice the loss later


def claim_decision(file: Path) -> bool:
    """Create the deciding file; return False if the other host has created it. Raises OSError."""
    try:
        file.open("x").close()
    except FileExistsError:
        return False
    return True


@final
@dataclass(frozen=True)
class LossPolicy:
    """Decides whether the first host may continue without a lost host.

    Attributes:
        is_current: Returns False if the scheduler has restarted the run or will do so.
        is_shared: Whether the hosts share the run folder, and requeue the run if they lose the first host.
        patience: Seconds of silence after which a host is lost.
    """

    is_current: Callable[[], bool] = lambda: True
    is_shared: bool = False
    patience: float = 0.0

    def may_lose(self, connection: AgentConnection, run: RunDirectory, suffices: Callable[[], bool]) -> bool:
        """Return whether this host may continue without the connection's host.

        If not, the other hosts take over. While ``suffices`` returns False, too few hosts respond, so this host may
        itself be disconnected. In that case, give the others time to take over.
        """
        if not self.is_current():
            return False
        file, deadline = run.get_lost_link_file(connection.name), time.monotonic() + _HOLD * self.patience
        try:
            while self.is_shared and not suffices() and not file.exists() and time.monotonic() < deadline:
                time.sleep(min(_POLL, self.patience))
            return not self.is_shared or claim_decision(file)
        except OSError as error:  # without the folder this host could not train, either
            _logger.error("failed to write to the run folder: %s", error)
            return False


def is_left_behind(connection: AgentConnection, run: RunDirectory, patience: float) -> bool:
    """Return whether the first host continues without this one.

    If the first host does not decide in time, this host decides that the first host is lost. It then returns False, as
    it does if the deciding file cannot be created.

    ``patience``: seconds of silence after which a host is lost.
    """
    file, deadline = run.get_lost_link_file(connection.name), time.monotonic() + _WAIT * patience
    answers = True
    while True:
        try:
            if file.exists() or time.monotonic() > deadline:
                # unlike exists(), creation does not depend on an outdated view of the folder
                return not claim_decision(file)
        except OSError as error:  # retry, since the first host may have decided
            if error.errno in _NO_FILE:
                return False
            if answers:
                _logger.warning("failed to access the run folder, retrying: %s", error)
            answers = False
        time.sleep(min(_POLL, patience))


def is_over(run: RunDirectory) -> bool:
    """Return whether the run has ended, according to its folder; False if unreadable."""
    with suppress(WorldsizeError, OSError):  # inconclusive if the folder is unavailable
        return not is_locked(run.path) and read_run(run.path).exit_reason not in ("running", "killed")
    return False


def come_back(run: RunDirectory, join: Callable[[], AgentConnection], patience: float) -> AgentConnection | None:
    """Try to rejoin the first host, which continued; return None if the run has ended.

    ``join`` raises WorldsizeError while the first host is unreachable.

    Raises:
        FirstHostLostError: the first host died: it has not held the run's lock for ``patience`` seconds.
    """
    deadline = float("inf")  # none until the lock is seen: some file systems show a lock only on the host that holds it
    while True:
        if is_over(run):
            return None
        with suppress(OSError, WorldsizeError):
            if is_locked(run.path):
                deadline = time.monotonic() + patience
        if time.monotonic() > deadline:
            raise FirstHostLostError("the first node continued without this node and was lost later.")
        with suppress(WorldsizeError):
            return join()
        time.sleep(min(_POLL, patience))
