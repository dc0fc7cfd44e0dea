"""What tests of listeners share."""

from __future__ import annotations

import pytest

from tests.support.loggers import keep_loggers
from worldsize.messages import show_messages


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Return what a program shows of what is logged, also by the processes that it forks."""
    keep_loggers(monkeypatch)
    show_messages()
    return capfd
