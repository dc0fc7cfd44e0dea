"""Decides between two hosts that do not hear each other any more, in the run folder that they share.

Neither of the first host and another one can tell whether its peer is dead, is cut off, or has only slept. One file for
each connection decides, and belongs to the host that creates it: the first, which goes on without the other one, or the
other one, which then has the job queued again. The file server creates a file once, so that neither the clocks of the
hosts matter nor how late one of them sees what is there. The file is named after the keys of the connection, so that
none is taken for one of another attempt or start of the job.
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
from worldsize.record.run_record import view

_logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds
_WAIT = 1.5  # times ``node_timeout`` that another host waits for a decision of the first
_NO_FILE = (errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # no host can create one
_HOLD = 2.5  # times ``node_timeout`` that the first lets others decide: longer, since it may notice the loss sooner


def decide(file: Path) -> bool:
    """Create the file that decides; return False if the other host has. Raises OSError if the folder is not there."""
    try:
        file.open("x").close()
    except FileExistsError:
        return False
    return True


@final
@dataclass(frozen=True)
class LossPolicy:
    """Tells the first host whether it may go on without another one.

    Attributes:
        is_current: Returns whether the scheduler has not started the run again.
        is_shared: Whether other hosts, which share the run folder, have the run queued again if they lose this one.
        patience: Seconds of silence after which a host is lost.
    """

    is_current: Callable[[], bool] = lambda: True
    is_shared: bool = False
    patience: float = 0.0

    def may_lose(self, connection: AgentConnection, run: RunDirectory, suffices: Callable[[], bool]) -> bool:
        """Return whether the run goes on without the host of this connection; if not, another host takes it over.

        While ``suffices`` returns False, the others get the time to take it over: it may be this host that is cut off.
        """
        if not self.is_current():
            return False
        file, deadline = run.lost_link(connection.name), time.monotonic() + _HOLD * self.patience
        try:
            while self.is_shared and not suffices() and not file.exists() and time.monotonic() < deadline:
                time.sleep(min(_POLL, self.patience))
            return not self.is_shared or decide(file)
        except OSError as error:  # it could not train either
            _logger.error("the run folder cannot be written to: %s", error)
            return False


def is_left_behind(connection: AgentConnection, run: RunDirectory, patience: float) -> bool:
    """Wait on a host that has lost the first one until that goes on without it; False: the first is lost.

    ``patience``: seconds of silence after which a host is lost.
    """
    file, deadline = run.lost_link(connection.name), time.monotonic() + _WAIT * patience
    answers = True
    while True:
        try:
            if file.exists() or time.monotonic() > deadline:
                return not decide(file)  # a view of the folder may be old, but not this
        except OSError as error:  # the first host may have decided, and so it must be known
            if error.errno in _NO_FILE:
                return False
            if answers:
                _logger.warning("the run folder does not answer: %s", error)
            answers = False
        time.sleep(min(_POLL, patience))


def is_over(run: RunDirectory) -> bool:
    """Return whether the run has ended, as far as its folder tells."""
    with suppress(WorldsizeError, OSError):  # a folder that does not answer tells nothing
        return not is_locked(run.path) and view(run.path).exit_reason not in ("running", "killed")
    return False


def come_back(run: RunDirectory, join: Callable[[], AgentConnection], patience: float) -> AgentConnection | None:
    """Try to reach the first host, which has gone on without this one, until it answers; None: the run has ended.

    ``join`` raises WorldsizeError if it cannot be reached.

    Raises:
        FirstHostLostError: it has died: for ``patience`` seconds it has not held the lock of the run, as it did before.
    """
    deadline = float("inf")  # some file systems show a lock to its own host alone
    while True:
        if is_over(run):
            return None
        with suppress(OSError, WorldsizeError):
            if is_locked(run.path):
                deadline = time.monotonic() + patience
        if time.monotonic() > deadline:
            raise FirstHostLostError("the first node had gone on without this one, and is gone since.")
        with suppress(WorldsizeError):
            return join()
        time.sleep(min(_POLL, patience))
