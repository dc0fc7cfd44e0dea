"""Exit codes of a sweep's runs, whichever processes called them."""

from __future__ import annotations

from pathlib import Path
from typing import final

from worldsize.world.preemption import PREEMPTED


@final
class ExitCodes:
    """Records the exit code of each run of a sweep in ``folder``, where other processes read them."""

    def __init__(self, folder: Path) -> None:
        self._search, self._others = folder / "search", folder / "sweep"

    def note(self, code: int, *, of_search: bool) -> None:
        """Add a code, in a single write so that lines of several processes do not mix."""
        with (self._search if of_search else self._others).open("a") as lines:
            lines.write(f"{code}\n")

    def noted(self) -> list[int]:
        """Return the exit codes of all runs so far."""
        return [*_codes(self._search), *_codes(self._others)]

    def is_failed_search(self) -> bool:
        """Return whether at least one run of a search has failed and none has completed."""
        return bool(codes := _codes(self._search)) and 0 not in codes


def _codes(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def ends_sweep(code: int) -> bool:
    """Return whether the code means that the run was asked to end, and with it the sweep."""
    return code == PREEMPTED or code > 128
