"""``worldsize agent RUN``: one host's part of a run; a launcher starts one on every host."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import threading
from pathlib import Path

from rich.console import Console

from worldsize.cli import exit_process
from worldsize.errors import ConfigError, FirstHostLostError, WorldsizeError
from worldsize.launch.agent import agent
from worldsize.messages import FIRST_LOST, outlive_output, refuse
from worldsize.plan.doctor.findings import REPORT, read_facts
from worldsize.plan.doctor.report import Report
from worldsize.record.run_directory import RunDirectory
from worldsize.world.environments import node
from worldsize.world.scratch import leftovers, private_folder

_COLUMNS = 160  # of a table in a log
_DRAFT = ".begin_"  # prefix of run folders that are not complete yet


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize agent", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument(
        "--tether",
        action="store_true",
        help="take variables and signals from standard input, a JSON value a line, and end when it ends",
    )
    parser.add_argument("--from", dest="source", type=Path, help="folder of files to begin the run folder with")
    options = parser.parse_args()
    outlive_output()
    if options.tether:
        _tether()
    try:
        if options.source:
            _begin_with(options.source, options.run)
        run = RunDirectory(options.run.resolve())
        code = agent(run)
        if options.source and node(os.environ).rank == 0:
            _show_report(run)
    except WorldsizeError as error:
        code = refuse(error)
        if isinstance(error, FirstHostLostError):
            code = FIRST_LOST
    exit_process(code)


def _show_report(run: RunDirectory) -> None:
    """Print the report of an examination, if it was one: whoever asked for it sees the log of this job alone."""
    if not (facts := read_facts(run.findings, REPORT)):
        return
    report = Report.from_json(facts)
    Console(width=_COLUMNS, highlight=False).print(report.table())
    print(report.as_line(), flush=True)


def _tether() -> None:
    """End this process, and so its workers, when standard input ends: whoever started it is gone.

    The same happens if nothing comes for as long as the last message said that the next would take: this host is cut
    off then, and another one may lead the run instead.
    """
    lines = os.fdopen(os.dup(0), "rb", buffering=0)  # not sys.stdin: a forked child waits for the lock of its reader
    os.environ.update(json.loads(lines.readline() or b"{}"))

    def watch() -> None:
        within: float | None = None
        while select.select([lines], [], [], within)[0] and (line := lines.readline()):
            match json.loads(line):
                case {"within": int() | float() as seconds}:
                    within = seconds
                case name:
                    os.kill(os.getpid(), signal.Signals[name])
        os.kill(os.getpid(), signal.SIGKILL)  # the workers die with it

    threading.Thread(target=watch, daemon=True, name="tether").start()


def _begin_with(source: Path, run: Path) -> None:
    """Create the run folder from the files in ``source``, unless another host has created it."""
    if (run / "config.yaml").exists():
        return
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        for killed in leftovers(run.parent, prefix=_DRAFT):
            shutil.rmtree(killed, ignore_errors=True)
        draft = private_folder(run.parent, prefix=_DRAFT)
        _copy(source, draft)
    except OSError as error:
        raise ConfigError(
            f"{run.parent} cannot be written: {error}. Is the bucket or volume mounted, and ours?"
        ) from error
    try:
        draft.rename(run)
    except OSError:
        shutil.rmtree(draft)
        if not (run / "config.yaml").exists():
            raise ConfigError(f"the run folder {run} exists and is no run.") from None


def _copy(source: Path, draft: Path) -> None:
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, draft / file.name)
            (draft / file.name).chmod(0o600)
    if (plugins := RunDirectory(source).plugins).is_dir():
        shutil.copytree(plugins, RunDirectory(draft).plugins)
