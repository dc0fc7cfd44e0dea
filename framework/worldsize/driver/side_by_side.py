"""Signals of a sweep whose launcher calls the runs in processes of its own, several at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import final

from worldsize.world.parent import die_with_parent
from worldsize.world.preemption import SIGNALS

_WAKING = 0.5  # seconds


@final
class SideBySide:
    """Passes the signals of the launching process on to those that call the runs, which note themselves in ``folder``.

    They are in process groups of their own: Ctrl-C of the terminal would come to them a second time, which ends a run
    at once. The launching process takes none itself, since joblib would kill the others before they have saved.
    """

    def __init__(self, folder: Path) -> None:
        self._asked, self._processes = folder / "asked", folder / "processes"
        self._processes.mkdir()
        self._launching = os.getpid()

    def join(self) -> None:
        """Note this process, where the next run is about to begin; signals wait until that run takes them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
            die_with_parent(self._launching)
        (self._processes / str(os.getpid())).touch()

    def is_asked(self) -> bool:
        """Tell whether a signal has come, so that no further run shall begin; true for good."""
        return self._asked.exists()

    def exit_code(self) -> int:
        """Return 128 and the number of the first signal; 0: none has come."""
        return 128 + int(self._asked.read_text()) if self.is_asked() else 0

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Pass on the signals that ask for an end, and that of a terminal that closes, without taking them.

        The kernel may hand a signal to any thread, but Python handles it in the main one, which joblib lets wait: a
        timer wakes that.
        """
        numbers = [number for number in (*SIGNALS, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._pass_on) for number in numbers}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *_: None)
        timer = signal.setitimer(signal.ITIMER_REAL, _WAKING, _WAKING)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if not self.is_asked():
            self._asked.write_text(str(number))
        for process in self._processes.iterdir():  # one that is not there yet looks whether it is asked
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGTERM if number == signal.SIGHUP else number)
