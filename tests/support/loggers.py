"""The loggers whose records are shown, and their state."""

from __future__ import annotations

import logging

import pytest

from worldsize.messages import LOGGERS


def keep_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loggers be at the end of ``monkeypatch`` as they are now."""
    for logger in map(logging.getLogger, LOGGERS):
        for name in ("handlers", "level", "propagate"):
            monkeypatch.setattr(logger, name, getattr(logger, name))
