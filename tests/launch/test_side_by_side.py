"""Signals reach parallel runs of a sweep, whichever thread of the launching process receives them."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

from worldsize.launch.sweep import SideBySide


def test_a_signal_that_another_thread_gets_is_passed_on_while_the_main_thread_waits(tmp_path: Path) -> None:
    side_by_side, ended = SideBySide(tmp_path), threading.Event()
    with subprocess.Popen(["sleep", "600"]) as run, side_by_side.forward_signals():
        (tmp_path / "processes" / str(run.pid)).touch()

        def wait() -> None:
            run.wait()
            ended.set()

        threading.Thread(target=wait).start()
        threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
        assert ended.wait(120)
    assert run.returncode == -signal.SIGTERM
    assert side_by_side.exit_code() == 128 + signal.SIGTERM
