"""``worldsize logs RUN``: the output of a run's processes, each line with a prefix such as "[worker 3]"."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from worldsize.config.arguments import whole
from worldsize.core.limits import Range
from worldsize.driver.scheduled import Scheduler, is_alive
from worldsize.errors import WorldsizeError
from worldsize.messages import refuse
from worldsize.observe.debug_summary import debug_summary
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import look
from worldsize.spans import named

_POLL = 0.2  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize logs", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument(
        "--rank",
        type=whole(Range(least=0)),
        action="append",
        help="of these ranks alone; may be given more than once",
    )
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run ends")
    parser.add_argument("--debug", action="store_true", help="what NCCL and torch said with cluster.debug, summarised")
    options = parser.parse_args()
    run = RunDirectory(options.run.resolve())
    scheduler = Scheduler(run)
    try:
        if options.debug:
            print(_debugged(run))
            return
        if command := _of_launcher(scheduler, follow=options.follow):
            sys.exit(_shown(command))
        if failure := look(run).failure:
            print(f"attempt {len(look(run).attempts)}: {failure}", flush=True)
        for line in lines(scheduler, options.rank, follow=options.follow):
            print(line, flush=options.follow)
    except WorldsizeError as error:
        sys.exit(refuse(error))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)


def _debugged(run: RunDirectory) -> str:
    """Return the summary of what NCCL and torch logged, and say first why there is little of it in most runs."""
    view = look(run)
    if not view.manifest["config"].get("cluster", {}).get("debug"):
        print("the run had cluster.debug=false, so little was logged. Set cluster.debug=true.", file=sys.stderr)
    return debug_summary(run, view.attempts[-1] if view.attempts else None)


def _of_launcher(scheduler: Scheduler, *, follow: bool) -> Sequence[str]:
    """Run the launcher's own command for logs if they are not in the run folder; return its exit code."""
    view = look(scheduler.run)
    if view.job is None or view.attempts:
        return ()
    launcher = scheduler.launcher
    return launcher.log_command(view.job, follow=follow) if launcher else ()


def _shown(command: Sequence[str]) -> int:
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise WorldsizeError(f"{command[0]} shows the logs of this run but cannot be started here: {error}.") from error


def lines(scheduler: Scheduler, ranks: list[int] | None, *, follow: bool) -> Iterator[str]:
    """Yield the lines of all logs of the run with their prefixes; with ``follow`` until the run has ended.

    Raises:
        WorldsizeError: the folder is not a run, or no process of it has one of the ranks.
    """
    read: dict[Path, int] = {}
    known: set[int] = set()
    run = scheduler.run
    while True:
        ended = not is_alive(scheduler)
        for path in sorted((run.path / "logs").rglob("*.log"), key=lambda path: path.name):
            prefix, rank = _prefix(path)
            known |= set() if rank is None else {rank}
            if ranks is None or rank in ranks:
                yield from (f"{prefix}{line}" for line in _new(path, read, has_ended=ended))
        if ended or not follow:
            break
        time.sleep(_POLL)
    if unknown := sorted({*(ranks or ())} - known):
        there = f"There is output of {named(sorted(known))}" if known else "No process has written any"
        raise WorldsizeError(f"no process of {run.path} has rank {unknown[0]}. {there}.")


def _prefix(path: Path) -> tuple[str, int | None]:
    named = re.fullmatch(r"([a-z_]+)_(\d{5})", path.stem)
    return (f"[{named[1]} {int(named[2])}] ", int(named[2])) if named else (f"[{path.stem}] ", None)


def _new(path: Path, read: dict[Path, int], *, has_ended: bool) -> list[str]:
    """Return the lines added since the last call; an incomplete last line only if the log ``has_ended``."""
    with path.open("rb") as file:
        file.seek(read.get(path, 0))
        data = file.read()
    if not has_ended:
        data = data[: data.rfind(b"\n") + 1]
    read[path] = read.get(path, 0) + len(data)
    return data.decode(errors="replace").splitlines()
