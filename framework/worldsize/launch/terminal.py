"""Shows the logs of a gang's processes on the terminal."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, final

from worldsize.files import open_regular

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog

_CHUNK = 1 << 20  # bytes
_logger = logging.getLogger(__name__)


@final
class Terminal:
    """Follows log files and shows each line after the name of its process, as in "[worker 3] ..."."""

    def __init__(self) -> None:
        self._tails: list[TailLog] = []

    def show(self, name: str, log: Path, *, start: int = 0) -> None:
        """Start to follow the log of the process ``name``, from byte ``start`` on."""
        from torch.distributed.elastic.multiprocessing.tail_log import TailLog  # takes seconds, as torch does

        prefix, earlier = f"[{name}] ", iter(range(_lines_before(start, log)))
        try:
            tail = TailLog(
                prefix,
                {0: str(log)},
                sys.stdout,
                {0: prefix},
                log_line_filter=lambda line: next(earlier, None) is None,
            )
            self._tails.append(tail.start())
        except RuntimeError as error:  # a host may allow a process but no thread to follow it
            _logger.warning("%s is not shown here, see %s: %s", name, log, error)

    def close(self) -> None:
        """Show the rest of all logs, and stop."""
        for tail in self._tails:
            tail.stop()


def size_of(log: Path) -> int:
    """Return the size of a log in bytes; 0 if it does not exist."""
    return log.stat().st_size if log.exists() else 0


def _lines_before(start: int, log: Path) -> int:
    """Return how many lines of a log end before byte ``start``, as Python splits a text file."""
    if not start:
        return 0
    decoder, lines = io.IncrementalNewlineDecoder(None, translate=True), 0
    with open_regular(log) as file:
        while start and (chunk := file.read(min(start, _CHUNK))):
            start -= len(chunk)
            lines += decoder.decode(chunk.decode("latin-1"), final=not start).count("\n")
    return lines
