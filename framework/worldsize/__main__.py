"""Entry point of ``worldsize``, ``python -m worldsize`` and ``train.py``, before any slow import."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the ``worldsize`` command line."""
    if sys.argv[1:2] == ["agent"]:  # block scheduler signals during imports; the gang unblocks them
        from worldsize.world.processes import SIGNALS

        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with _ends_at_once():
        from worldsize.cli import main as command
    _run_command(command)


def train() -> None:
    """Run ``worldsize train`` with the arguments of ``train.py``."""
    with _ends_at_once():
        from worldsize.cli.train import main as command
    _run_command(command)


@contextmanager
def _ends_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process without a traceback while there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # shells ignore SIGINT in background jobs
        yield
        return
    signal.signal(signal.SIGINT, _exit_on_interrupt)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_on_interrupt(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


def _run_command(command: Callable[[], None]) -> None:
    try:
        command()
    except KeyboardInterrupt:
        from worldsize.cli import exit_process

        exit_process(_INTERRUPTED)


if __name__ == "__main__":
    main()
