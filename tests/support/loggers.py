"""The loggers with visible records, and their state."""

from __future__ import annotations

import logging

import pytest

from worldsize.messages import LOGGERS


def keep_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the loggers' present state at the end of ``monkeypatch``."""
    for logger in map(logging.getLogger, LOGGERS):
        for name in ("handlers", "level", "propagate"):
            monkeypatch.setattr(logger, name, getattr(logger, name))
