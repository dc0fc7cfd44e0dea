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
            attempts = look(run).attempts
            sys.exit(print(debug_summary(run, attempts[-1] if attempts else None)))
        if command := _of_launcher(scheduler, follow=options.follow):
            sys.exit(_shown(command))
        for line in lines(scheduler, options.rank, follow=options.follow):
            print(line, flush=options.follow)
    except WorldsizeError as error:
        sys.exit(refuse(error))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)


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
        WorldsizeError: the folder is not a run.
    """
    read: dict[Path, int] = {}
    run = scheduler.run
    while True:
        ended = not is_alive(scheduler)
        for path in sorted((run.path / "logs").rglob("*.log"), key=lambda path: path.name):
            prefix, rank = _prefix(path)
            if ranks is None or rank in ranks:
                yield from (f"{prefix}{line}" for line in _new(path, read, has_ended=ended))
        if ended or not follow:
            return
        time.sleep(_POLL)


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
