"""Fixtures shared by tests of listeners."""

from __future__ import annotations

import pytest

from tests.support.loggers import keep_loggers
from worldsize.messages import show_messages


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Capture a program's visible log output, including that from processes that it forks."""
    keep_loggers(monkeypatch)
    show_messages()
    return capfd
