"""Waits for conditions in tests, with a limit that only a hang exceeds."""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST = 180.0
_POLL = 0.05


def wait_until(happened: Callable[[], bool], seen: Callable[[], object] = str, seconds: float = _LONGEST) -> None:
    """Poll until ``happened`` returns True.

    Raises:
        AssertionError: it did not within ``seconds``; the message includes the result of ``seen``.
    """
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"nothing came in {seconds:g} s. {seen()}"
        time.sleep(_POLL)
