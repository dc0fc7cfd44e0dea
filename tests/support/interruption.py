"""Lets the gang of a process end while the process waits for a peer."""

from __future__ import annotations

from worldsize.collectives.peer_waits import INTERRUPTION


def end_gang_soon() -> None:
    """Let the waits of this process find, at the third look, that its gang has ended."""
    checks = iter([None, None])

    def check() -> None:
        if next(checks, "ended") == "ended":
            raise ConnectionError("the gang has ended")

    INTERRUPTION.begin(check, longest=120.0)
