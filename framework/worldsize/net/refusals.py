"""A log of refusals that stays short however many there are."""

from __future__ import annotations

import logging
import threading
from typing import final

_logger = logging.getLogger(__name__)

_LOGGED = 100


@final
class RefusalLog:
    """Counts what a server refuses, and logs the first 100 refusals and every hundredth of the others.

    Attributes:
        count: The number of refusals so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._changing = threading.Lock()

    def add(self, who: str, why: object) -> None:
        """Count one more refusal, of ``who``; thread-safe."""
        with self._changing:
            self.count += 1
            count = self.count
        if count <= _LOGGED or count % _LOGGED == 0:  # a flood of them must not fill the disk
            _logger.info("refused %s: %s (%d so far)", who, why, count)
