"""How the runs of a sweep ended, whichever processes called them."""

from __future__ import annotations

from pathlib import Path
from typing import final

from worldsize.world.preemption import PREEMPTED


@final
class ExitCodes:
    """Notes the exit code of each run of a sweep in ``folder``, where other processes look them up."""

    def __init__(self, folder: Path) -> None:
        self._search, self._others = folder / "search", folder / "sweep"

    def note(self, code: int, *, of_search: bool) -> None:
        """Add a code. One write of a line, so that those of several processes do not mix."""
        with (self._search if of_search else self._others).open("a") as lines:
            lines.write(f"{code}\n")

    def noted(self) -> list[int]:
        """Return the codes of all runs so far."""
        return [*_codes(self._search), *_codes(self._others)]

    def is_failed_search(self) -> bool:
        """Tell whether a search has no run that completed, and one at least that did not."""
        return bool(codes := _codes(self._search)) and 0 not in codes


def _codes(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def ends_sweep(code: int) -> bool:
    """Tell whether a run was asked to end, by whoever does not want the next one either."""
    return code == PREEMPTED or code > 128
