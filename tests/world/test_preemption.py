"""Signals that request the end of a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from worldsize.world.processes import Preemption


def test_the_grace_begins_when_a_process_is_asked_to_end() -> None:
    preemption = Preemption([])
    assert preemption.seconds_left(30.0) == 30.0
    before = time.monotonic()
    preemption.request_stop()
    left = preemption.seconds_left(30.0)
    assert 30.0 - (time.monotonic() - before) <= left <= 30.0
    preemption.request_stop()  # again: the grace period does not restart
    assert preemption.seconds_left(30.0) <= left


def test_a_repeated_sighup_lets_a_worker_save_and_a_repeated_sigterm_ends_it() -> None:
    program = """if True:
        import signal, time
        from worldsize.world.processes import Preemption
        now, time.monotonic = time.monotonic(), lambda: now
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
        preemption = Preemption(["SIGTERM", "SIGHUP"])
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
            print(number.name, preemption.is_wanted(), flush=True)
            now += 60.0
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["SIGHUP", "True", "SIGHUP", "True", "SIGTERM", "True", "SIGHUP", "True"]
    assert done.returncode == -signal.SIGTERM, done.stderr
