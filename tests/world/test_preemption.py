"""Signals that ask a process to end."""

from __future__ import annotations

import time

from worldsize.world.preemption import Preemption


def test_the_grace_begins_when_a_process_is_asked_to_end() -> None:
    preemption = Preemption([])
    assert preemption.seconds_left(30.0) == 30.0
    before = time.monotonic()
    preemption.want()
    left = preemption.seconds_left(30.0)
    assert 30.0 - (time.monotonic() - before) <= left <= 30.0
    preemption.want()  # again: the grace does not begin anew
    assert preemption.seconds_left(30.0) <= left
