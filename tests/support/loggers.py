"""Restores loggers that a test configures."""

from __future__ import annotations

import logging

import pytest

from worldsize.messages import LOGGERS


def keep_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore handlers, level and propagation of ``LOGGERS`` when the test ends."""
    for logger in map(logging.getLogger, LOGGERS):
        for name in ("handlers", "level", "propagate"):
            monkeypatch.setattr(logger, name, getattr(logger, name))
