"""Notice that the folder of a run was deleted while the run trains."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar, final

from worldsize.records.run_directory import is_missing


@final
class FolderWatch:
    """Looks about once a second whether the run's manifest is there.

    It counts as deleted when it is missing twice in a row: on some mounted buckets a file that is being replaced is
    missing for a moment. What is not there from the beginning, as in an examination, is not missed.
    """

    interval: ClassVar[float] = 1.0  # seconds between two looks

    def __init__(self, manifest: Path) -> None:
        self._manifest, self._is_expected = manifest, manifest.exists()
        self._next = time.monotonic() + self.interval
        self._misses = 0

    @property
    def is_deleted(self) -> bool:
        return self._misses > 1

    def look(self) -> bool:
        """Look, unless the last time was less than a second ago; return whether the folder was deleted."""
        if self._is_expected and time.monotonic() >= self._next and not self.is_deleted:
            self._next = time.monotonic() + self.interval
            self._misses = self._misses + 1 if is_missing(self._manifest) else 0
        return self.is_deleted
