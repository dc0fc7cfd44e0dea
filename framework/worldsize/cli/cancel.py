"""``worldsize cancel RUN``: ask a run to save and to end, whatever launched it."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

from worldsize.errors import WorldsizeError
from worldsize.launch.scheduled import Scheduler
from worldsize.messages import refuse
from worldsize.record.run_directory import RunDirectory, holder_of, is_locked
from worldsize.record.run_record import look


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize cancel", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    try:
        print(cancel(RunDirectory(parser.parse_args().run.resolve())))
    except WorldsizeError as error:
        sys.exit(refuse(error))


def cancel(run: RunDirectory) -> str:
    """Ask the run to save and to end; return a sentence about what was done.

    Raises:
        WorldsizeError: the run is not being trained, or it was launched on another host.
    """
    view = look(run)
    if view.exit_reason == "completed":
        raise WorldsizeError(f"the run {run.path} is complete.")
    if view.job and (launcher := Scheduler(run).launcher):
        launcher.cancel(view.job)
        return f"job {view.job} was cancelled"
    if view.exit_reason != "running":
        raise WorldsizeError(f"the run {run.path} is not being trained.")
    attempt = view.attempts[-1]
    host, process = attempt["hosts"][0], holder_of(run.path)
    if process is None and view.is_own and is_locked(run.path):  # the kernel may not say which process holds the lock
        process = attempt["pid"]
    if host != socket.gethostname() or process is None:
        raise WorldsizeError(f"the run {run.path} was launched on {host}; cancel it there.")
    try:
        os.kill(process, signal.SIGTERM)
    except PermissionError:
        raise WorldsizeError(f"the run {run.path} is trained by process {process} of another user.") from None
    return f"process {process} was asked to save and to end"
