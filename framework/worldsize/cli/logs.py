"""``worldsize logs RUN``: show the output of a run's processes, with prefixes such as "[worker 3]"."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from worldsize.cli import RUN, run_folder
from worldsize.config.arguments import build_integer_parser
from worldsize.core.limits import Range
from worldsize.errors import WorldsizeError
from worldsize.files import open_regular
from worldsize.launch.scheduled import Scheduler, is_alive
from worldsize.messages import format_ranks, printable, report_error
from worldsize.observe.nccl_log import debug_summary
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import refresh_run

_POLL = 0.2  # seconds between two polls
_LONGEST = 1 << 20  # maximum bytes of a line to show at once


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize logs", description=__doc__)
    parser.add_argument("run", nargs="?", type=run_folder, default="last", help=RUN)
    parser.add_argument(
        "--rank",
        type=build_integer_parser(Range(least=0)),
        action="append",
        help="show only this rank; may be given more than once",
    )
    parser.add_argument("--follow", "-f", action="store_true", help="continue until the run ends")
    parser.add_argument("--debug", action="store_true", help="summarize the logs of NCCL and torch (cluster.debug)")
    options = parser.parse_args()
    run = RunDirectory(options.run)
    scheduler = Scheduler(run)
    try:
        if options.debug:
            print(_summarize_debug_logs(run))
            return
        if command := _find_log_command(scheduler, follow=options.follow):
            sys.exit(_show_command_output(command))
        recorded = refresh_run(run)
        if recorded.failure:
            print(f"attempt {len(recorded.attempts)}: {recorded.failure}", flush=True)
        for line in read_log_lines(scheduler, options.rank, follow=options.follow):
            print(line, flush=options.follow)
    except WorldsizeError as error:
        sys.exit(report_error(error))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)


def _summarize_debug_logs(run: RunDirectory) -> str:
    """Summarize the logs of NCCL and torch; without cluster.debug, first explain why they are short."""
    view = refresh_run(run)
    if not view.manifest["config"].get("cluster", {}).get("debug"):
        print("the run had cluster.debug=false, so little was logged. Set cluster.debug=true.", file=sys.stderr)
    return debug_summary(run, view.attempts[-1] if view.attempts else None)


def _find_log_command(scheduler: Scheduler, *, follow: bool) -> Sequence[str]:
    """Return the launcher's log command if the run folder does not have the job's logs yet, otherwise ()."""
    view = refresh_run(scheduler.run)
    if view.job is None or view.attempts:
        return ()
    launcher = scheduler.launcher
    return launcher.log_command(view.job, follow=follow) if launcher else ()


def _show_command_output(command: Sequence[str]) -> int:
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(*_escape_lines(line), sep="\n", flush=True)
        return process.returncode
    except OSError as error:
        raise WorldsizeError(f"failed to start {command[0]} to show the logs of this run: {error}.") from error


def read_log_lines(scheduler: Scheduler, ranks: list[int] | None, *, follow: bool) -> Iterator[str]:
    """Yield the lines of all logs of the run, escaped and prefixed; with ``follow``, until the run has ended.

    Raises:
        WorldsizeError: the folder is not a run, its processes write no logs, a rank in ``ranks`` does not exist, or a
            log cannot be read. The error is raised after all other lines.
    """
    read: dict[Path, int] = {}
    unread: dict[Path, str] = {}
    known: set[int] = set()
    run = scheduler.run
    while True:
        ended = not is_alive(scheduler)
        paths = sorted((run.path / "logs").rglob("*.log"), key=lambda path: path.name)
        if not paths and (ended or not follow or run.metrics.exists()):  # once metrics exist, any log would exist too
            raise WorldsizeError(_explain_missing_logs(run))
        for path in paths:
            prefix, rank = _format_prefix(path)
            known |= set() if rank is None else {rank}
            if path in unread or not (ranks is None or rank in ranks):
                continue
            try:
                new = _read_new_lines(path, read, has_ended=ended)
                yield from (f"{prefix}{line}" for output in new for line in _escape_lines(output))
            except OSError as error:
                unread[path] = error.strerror or str(error)
        if ended or not follow:
            break
        time.sleep(_POLL)
    if unread:
        raise WorldsizeError("\n".join(f"failed to read {path}: {why}." for path, why in unread.items()))
    if unknown := sorted({*(ranks or ())} - known):
        there = f"Output found for {format_ranks(sorted(known))}" if known else "No process has written output"
        raise WorldsizeError(f"no output from rank {unknown[0]} in {run.path}. {there}.")


def _explain_missing_logs(run: RunDirectory) -> str:
    fact = f"no log files in {run.path / 'logs'}"
    if not refresh_run(run).attempts:
        return f"{fact}: no attempt has started."
    return (
        f"{fact}. Processes that you start with torchrun, srun, mpirun or python write to their terminal or to the "
        "scheduler's output file; look there."
    )


def _format_prefix(path: Path) -> tuple[str, int | None]:
    named = re.fullmatch(r"([a-z_]+)_(\d{5})", path.stem)
    return (f"[{named[1]} {int(named[2])}] ", int(named[2])) if named else (f"[{path.stem}] ", None)


def _read_new_lines(path: Path, read: dict[Path, int], *, has_ended: bool) -> Iterator[bytes]:
    """Yield lines added since the last call, splitting long lines; omit an incomplete last line until ``has_ended``."""
    with open_regular(path) as file:
        file.seek(read.get(path, 0))
        while line := file.readline(_LONGEST):
            if not (line.endswith(b"\n") or len(line) == _LONGEST or has_ended):
                return
            read[path] = file.tell()
            yield line


def _escape_lines(output: bytes) -> list[str]:
    """Return the lines of ``output``, with all control characters except tabs escaped."""
    lines = output.decode(errors="replace").splitlines()
    return ["\t".join(map(printable, line.split("\t"))) for line in lines]
