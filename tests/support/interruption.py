"""Simulates the end of a gang while a process waits for a peer."""

from __future__ import annotations

from worldsize.collectives.group import INTERRUPTION


def end_gang_soon() -> None:
    """Make a wait of this process raise ConnectionError at its third check, as if the gang had ended."""
    checks = iter([None, None])

    def check() -> None:
        if next(checks, "ended") == "ended":
            raise ConnectionError("the gang has ended")

    INTERRUPTION.start_tracking(check, longest=120.0)
