"""``worldsize agent RUN``: run one host's part of a run; launchers start an agent on every host."""

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
from worldsize.messages import FIRST_LOST, outlive_output, report_error
from worldsize.plan.doctor.findings import REPORT, read_facts
from worldsize.plan.doctor.report import Report
from worldsize.record.run_directory import RunDirectory
from worldsize.world.environments import read_node
from worldsize.world.scratch import leftovers, private_folder

_COLUMNS = 160  # width of a table in a log
_DRAFT = ".begin_"  # prefix of incomplete run folders


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize agent", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument(
        "--tether",
        action="store_true",
        help="read variables and signals from standard input, one JSON value per line; exit when standard input closes",
    )
    parser.add_argument("--from", dest="source", type=Path, help="folder with the initial files of the run folder")
    options = parser.parse_args()
    outlive_output()
    if options.tether:
        _start_tether()
    try:
        if options.source:
            _begin_with(options.source, options.run)
        run = RunDirectory(options.run.resolve())
        code = agent(run)
        if options.source and read_node(os.environ).rank == 0:
            _show_report(run)
    except WorldsizeError as error:
        code = report_error(error)
        if isinstance(error, FirstHostLostError):
            code = FIRST_LOST
    exit_process(code)


def _show_report(run: RunDirectory) -> None:
    """Print the report of an examination to the job's log, the only output that the user sees."""
    if not (facts := read_facts(run.findings, REPORT)):
        return
    report = Report.from_json(facts)
    Console(width=_COLUMNS, highlight=False).print(report.build_table())
    print(report.format_log_line(), flush=True)


def _start_tether() -> None:
    """Read environment variables, then (in a thread) signals, from standard input; kill this process when it closes.

    It is also killed if a message does not arrive within the time announced by the previous one: this host is then
    disconnected, and a different host may lead the run. The workers die with this process.
    """
    lines = os.fdopen(os.dup(0), "rb", buffering=0)  # not sys.stdin, whose lock could block forked children
    os.environ.update(json.loads(lines.readline() or b"{}"))

    def watch_parent() -> None:
        within: float | None = None
        while select.select([lines], [], [], within)[0] and (line := lines.readline()):
            match json.loads(line):
                case {"within": int() | float() as seconds}:
                    within = seconds
                case name:
                    os.kill(os.getpid(), signal.Signals[name])
        os.kill(os.getpid(), signal.SIGKILL)  # the workers die with it

    threading.Thread(target=watch_parent, daemon=True, name="tether").start()


def _begin_with(source: Path, run: Path) -> None:
    """Create the run folder from the files in ``source``, unless a different host has already created it."""
    if (run / "config.yaml").exists():
        return
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        for killed in leftovers(run.parent, prefix=_DRAFT):
            shutil.rmtree(killed, ignore_errors=True)
        draft = private_folder(run.parent, prefix=_DRAFT)
        _copy_run_files(source, draft)
    except OSError as error:
        raise ConfigError(
            f"failed to write {run.parent}: {error}. Check that the bucket or volume is mounted and writable."
        ) from error
    try:
        draft.rename(run)
    except OSError:
        shutil.rmtree(draft)
        if not (run / "config.yaml").exists():
            raise ConfigError(f"the folder {run} exists but is not a run.") from None


def _copy_run_files(source: Path, draft: Path) -> None:
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, draft / file.name)
            (draft / file.name).chmod(0o600)
    if (plugins := RunDirectory(source).plugins).is_dir():
        shutil.copytree(plugins, RunDirectory(draft).plugins)
