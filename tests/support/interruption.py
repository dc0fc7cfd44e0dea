"""Ends the gang of a process while the process waits for a peer."""

from __future__ import annotations

from worldsize.collectives.group import INTERRUPTION


def end_gang_soon() -> None:
    """End the gang for the waits of this process, at their third check."""
    checks = iter([None, None])

    def check() -> None:
        if next(checks, "ended") == "ended":
            raise ConnectionError("the gang has ended")

    INTERRUPTION.start_tracking(check, longest=120.0)
