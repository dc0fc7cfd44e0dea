"""What tests of listeners share."""

from __future__ import annotations

import logging

import pytest

from worldsize.messages import show_messages


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Return what a program shows of what is logged, also by the processes that it forks."""
    logger = logging.getLogger("worldsize")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    show_messages()
    return capfd
