"""How what modules log reaches the user: one plain line each on standard error."""

from __future__ import annotations

import logging
import sys


class _Line(logging.Formatter):
    """Names the level of a warning; what failed says so by itself."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return f"warning: {text}" if record.levelno == logging.WARNING else text


class _StandardError(logging.Handler):
    """Writes to the standard error of the moment, which is another file in a forked worker."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def show_messages() -> None:
    """Show what worldsize's modules log; called once by each program, and inherited by what it forks."""
    logger, handler = logging.getLogger("worldsize"), _StandardError()
    handler.setFormatter(_Line())
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False  # or it would be said again by who has configured the root logger
