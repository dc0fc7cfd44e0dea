"""Shows the logs of a gang's processes on the terminal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog

_logger = logging.getLogger(__name__)


@final
class Terminal:
    """Follows log files and shows each line after the name of its process, as in "[worker 3] ..."."""

    def __init__(self) -> None:
        self._tails: list[TailLog] = []

    def show(self, name: str, log: Path) -> None:
        """Start to follow the log of the process ``name``."""
        from torch.distributed.elastic.multiprocessing.tail_log import TailLog  # takes seconds, as torch does

        prefix = f"[{name}] "
        try:
            self._tails.append(TailLog(prefix, {0: str(log)}, sys.stdout, {0: prefix}).start())
        except RuntimeError as error:  # a host may allow a process but no thread to follow it
            _logger.warning("%s is not shown here, see %s: %s", name, log, error)

    def close(self) -> None:
        """Show the rest of all logs, and stop."""
        for tail in self._tails:
            tail.stop()
