"""Detects that the folder of a run was deleted during training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar, final

from worldsize.record.run_directory import is_missing


@final
class FolderWatch:
    """Checks about once a second whether the run's manifest exists.

    The folder counts as deleted if the manifest is missing twice in a row, since on some mounted buckets a file is
    missing for a moment while it is replaced. A run without a manifest from the start, such as an examination, is not
    checked.
    """

    interval: ClassVar[float] = 1.0  # seconds between two checks

    def __init__(self, manifest: Path) -> None:
        self._manifest, self._is_expected = manifest, manifest.exists()
        self._next = time.monotonic() + self.interval
        self._misses = 0

    @property
    def is_deleted(self) -> bool:
        return self._misses > 1

    def look(self) -> bool:
        """Return whether the folder was deleted; check at most once a second."""
        if self._is_expected and time.monotonic() >= self._next and not self.is_deleted:
            self._next = time.monotonic() + self.interval
            self._misses = self._misses + 1 if is_missing(self._manifest) else 0
        return self.is_deleted
