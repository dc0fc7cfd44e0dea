"""Waits for other processes and threads, independent of the machine's speed."""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST = 180.0
_POLL = 0.05


def wait_until(happened: Callable[[], bool], seen: Callable[[], object] = str, seconds: float = _LONGEST) -> None:
    """Wait until ``happened``.

    Raises:
        AssertionError: it has not happened after ``seconds``; the message has what ``seen`` returns.
    """
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"nothing came in {seconds:g} s. {seen()}"
        time.sleep(_POLL)
