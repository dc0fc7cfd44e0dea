"""Show on the terminal what the processes of a gang write to their logs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog


@final
class Terminal:
    """Follows log files and shows each line after the name of its process, as in "[worker 3] ..."."""

    def __init__(self) -> None:
        self._tails: list[TailLog] = []

    def show(self, name: str, log: Path) -> None:
        """Begin to follow the log of the process ``name``."""
        from torch.distributed.elastic.multiprocessing.tail_log import TailLog  # takes seconds, as torch does

        prefix = f"[{name}] "
        self._tails.append(TailLog(prefix, {0: str(log)}, sys.stdout, {0: prefix}).start())

    def close(self) -> None:
        """Show what is left of all logs, and end."""
        for tail in self._tails:
            tail.stop()
