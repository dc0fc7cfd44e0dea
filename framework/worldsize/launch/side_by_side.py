"""Forwards signals in a sweep whose launcher calls several runs at once, in its own processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, final

from worldsize.world.processes import SIGNALS, die_with_parent

_WAKING = 0.5  # seconds


@final
class SideBySide:
    """Forwards signals from the launching process to those that call the runs, which register in ``folder``.

    Those have their own process groups, since a second signal from Ctrl-C would end a run at once. The launching
    process does not act on signals itself, since joblib would kill the others before they have saved.
    """

    def __init__(self, folder: Path) -> None:
        self._asked, self._processes = folder / "asked", folder / "processes"
        self._processes.mkdir()
        self._launching = os.getpid()

    def join(self) -> None:
        """Register this process, which is about to begin a run; signals are blocked until that run handles them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
            die_with_parent(self._launching)
        (self._processes / str(os.getpid())).touch()

    def is_asked(self) -> bool:
        """Return whether a signal has come, after which no further run begins."""
        return self._asked.exists()

    def exit_code(self) -> int:
        """Return 128 plus the number of the first signal, or 0 if none has come."""
        return 128 + int(self._asked.read_text()) if self.is_asked() else 0

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Forward signals inside the context, without acting on them.

        The kernel may deliver a signal to any thread, but Python handles it in the main thread, which joblib blocks; a
        timer wakes it.
        """
        numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before: dict[int, Any] = {number: signal.signal(number, self._pass_on) for number in numbers}
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
        for process in self._processes.iterdir():  # a process that has not registered yet checks is_asked() itself
            with suppress(ProcessLookupError):
                os.kill(int(process.name), number)
