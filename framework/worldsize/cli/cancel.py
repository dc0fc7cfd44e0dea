"""``worldsize cancel RUN``: save a checkpoint and stop a run, with any launcher."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

from worldsize.cli import run_folder
from worldsize.errors import WorldsizeError
from worldsize.launch.scheduled import Scheduler
from worldsize.messages import report_error
from worldsize.record.run_directory import RunDirectory, find_lock_holder, is_locked
from worldsize.record.run_record import refresh_run


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize cancel", description=__doc__)
    parser.add_argument("run", type=run_folder, help="a run folder, or last")
    try:
        print(cancel(RunDirectory(parser.parse_args().run)))
    except WorldsizeError as error:
        sys.exit(report_error(error))


def cancel(run: RunDirectory) -> str:
    """Ask the run to save and stop; return a one-sentence summary.

    Raises:
        WorldsizeError: the run is not being trained, or it was launched on another host.
    """
    view = refresh_run(run)
    if view.exit_reason == "completed":
        raise WorldsizeError(f"the run {run.path} is complete.")
    if view.job and (launcher := Scheduler(run).launcher):
        launcher.cancel(view.job)
        return f"job {view.job} was cancelled"
    if view.exit_reason != "running":
        raise WorldsizeError(f"the run {run.path} is not running.")
    attempt = view.attempts[-1]
    host, process = attempt["hosts"][0], find_lock_holder(run.path)
    if process is None and view.is_own and is_locked(run.path):  # the kernel may not report the lock's owner
        process = attempt["pid"]
    if host != socket.gethostname():
        raise WorldsizeError(f"the run {run.path} was launched on {host}; cancel it there.")
    if process is None:
        raise WorldsizeError(
            f"the process of the run {run.path} belongs to another user. Only that user can cancel the run."
        )
    try:
        os.kill(process, signal.SIGTERM)
    except PermissionError:
        raise WorldsizeError(
            f"process {process} of the run {run.path} belongs to another user. Only that user can cancel the run."
        ) from None
    return f"sent SIGTERM to process {process}; it saves a checkpoint and exits"
