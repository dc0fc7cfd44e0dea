"""Shows at which sample and line a data worker is, even if it waits for a lock that nobody will release."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from itertools import islice, takewhile
from types import FrameType
from typing import Any, final

_ASK = signal.SIGRTMIN + 5
_SECONDS = 2.0  # that a worker has to answer
_POLL = 0.05
_CALLS = 12  # that are shown of a stack
_LOADER = "torch/utils/data/_utils"  # its calls, and those outside of it, are the same for all data


@final
class WorkerStacks:
    """A file in memory, shared with forked workers, into which they write where they are when they are asked."""

    def __init__(self) -> None:
        self._file = os.memfd_create("data workers")
        weakref.finalize(self, os.close, self._file)
        if threading.current_thread() is threading.main_thread():
            signal.signal(_ASK, signal.SIG_IGN)  # inherited: it does not end a worker that is asked too early

    def answer(self, sample_of: Callable[[FrameType | None], int | None]) -> None:
        """Let this process, a worker, answer. ``sample_of`` finds the sample that is loaded, given the stack."""
        file = self._file

        def note_sample(_: int, frame: FrameType | None) -> None:
            if (sample := sample_of(frame)) is not None:
                os.write(file, f"sample {sample}\n".encode())

        signal.signal(_ASK, note_sample)
        # written by the signal handler in C, whatever the interpreter waits for; then Python's own handler runs
        faulthandler.register(_ASK, file=file, all_threads=False, chain=True)

    def of(self, process: int) -> str:
        """Return what worker ``process`` writes: its stack, the innermost call first, and the sample that it loads."""
        before = os.fstat(self._file).st_size
        try:
            os.kill(process, _ASK)
        except ProcessLookupError:
            return "It has died."
        until, size = time.monotonic() + _SECONDS, before
        while time.monotonic() < until:
            time.sleep(_POLL)
            now = os.fstat(self._file).st_size
            if now == size > before:
                break
            size = now
        return _described(os.pread(self._file, 1 << 16, before).decode(errors="replace").splitlines())

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("only forked workers share the file")


def _described(lines: list[str]) -> str:
    """Describe a worker's answer: the sample, and the calls within the data set, the innermost one first."""
    sample = next((line for line in lines if line.startswith("sample ")), None)
    calls = takewhile(lambda line: _LOADER not in line, (line for line in lines if line.startswith("  File ")))
    if not lines:
        return "It does not say where it is."
    where = f"It loads {sample} and is here" if sample else "It is here"
    return "\n".join([f"{where}, the innermost call first:", *islice(calls, _CALLS)])
