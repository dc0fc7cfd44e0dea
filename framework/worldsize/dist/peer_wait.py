"""What this process waits for from another one outside of collectives, and since when, for those who look for hangs."""

from __future__ import annotations

import threading
import time
from typing import Self, final


@final
class PeerWait:
    """The open wait of the main thread for a message or for work of other processes; there is one in a process.

    Other threads are left out: those of a server wait for requests for as long as it lives. It is no generator, which
    would take longer than many a message.

    >>> with PEER_WAIT.during("the message WEIGHTS of a peer"):
    ...     what, seconds = PEER_WAIT.open()
    """

    def __init__(self) -> None:
        self._open: tuple[str, float] | None = None

    def during(self, what: str) -> Self:
        """Return a context in which the calling thread waits for ``what``; contexts do not nest."""
        if _is_main_thread():
            self._open = what, time.monotonic()
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if _is_main_thread():
            self._open = None

    def open(self) -> tuple[str, float] | None:
        """Return what is waited for and for how many seconds; None: for nothing."""
        if (wait := self._open) is None:
            return None
        what, since = wait
        return what, time.monotonic() - since


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


PEER_WAIT = PeerWait()
