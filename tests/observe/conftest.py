"""What tests of listeners share."""

from __future__ import annotations

import logging

import pytest

from worldsize.messages import LOGGERS, show_messages


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Return what a program shows of what is logged, also by the processes that it forks."""
    for each in map(logging.getLogger, LOGGERS):
        for name in ("handlers", "level", "propagate"):
            monkeypatch.setattr(each, name, getattr(each, name))
    show_messages()
    return capfd
