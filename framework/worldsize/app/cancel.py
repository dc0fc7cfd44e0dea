"""``worldsize cancel RUN``: ask a run to save and to end, whatever launched it."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

from worldsize.errors import WorldsizeError
from worldsize.records.lock import is_locked
from worldsize.records.manifest import look
from worldsize.records.run_directory import RunDirectory


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize cancel", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    try:
        print(cancel(RunDirectory(parser.parse_args().run.resolve())))
    except WorldsizeError as error:
        sys.exit(str(error))


def cancel(run: RunDirectory) -> str:
    """What was done.

    Raises:
        WorldsizeError: the run is not alive, or it is on another host.
    """
    manifest = look(run.path)
    attempts = manifest["attempts"]
    if attempts and attempts[-1]["exit_reason"] == "completed":
        raise WorldsizeError(f"the run {run.path} is complete.")
    if manifest.get("jobs"):
        from worldsize.config.recorded import read_settings  # imports torch, which takes seconds

        job = str(manifest["jobs"][-1]["id"])
        read_settings(run).launcher.cancel(job)
        return f"job {job} was cancelled"
    if not attempts or attempts[-1]["exit_reason"] != "running":
        raise WorldsizeError(f"the run {run.path} is not being trained.")
    host = attempts[-1]["hosts"][0]
    if host != socket.gethostname() or not is_locked(run.path):
        raise WorldsizeError(f"the run {run.path} was launched on {host}; cancel it there.")
    os.kill(attempts[-1]["pid"], signal.SIGTERM)
    return f"process {attempts[-1]['pid']} was asked to save and to end"
