"""``worldsize logs RUN``: what the processes of a run say, with their "[worker 3]" prefixes."""

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
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import look

_POLL = 0.2  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize logs", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument(
        "--rank", type=whole(Range(least=0)), action="append", help="of these ranks alone; may be given more than once"
    )
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run ends")
    options = parser.parse_args()
    run = RunDirectory(options.run.resolve())
    scheduler = Scheduler(run)
    try:
        if command := _of_launcher(scheduler, follow=options.follow):
            sys.exit(_shown(command))
        for line in lines(scheduler, options.rank, follow=options.follow):
            print(line, flush=options.follow)
    except WorldsizeError as error:
        sys.exit(refuse(error))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)


def _of_launcher(scheduler: Scheduler, *, follow: bool) -> Sequence[str]:
    """The command that shows the logs of a run that writes them elsewhere."""
    view = look(scheduler.run)
    if view.job is None or view.attempts:
        return ()
    launcher = scheduler.launcher
    return launcher.log_command(view.job, follow=follow) if launcher else ()


def _shown(command: Sequence[str]) -> int:
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise WorldsizeError(f"{command[0]} shows the logs of this run, and cannot be run here: {error}.") from error


def lines(scheduler: Scheduler, ranks: list[int] | None, *, follow: bool) -> Iterator[str]:
    """Lines of all logs of its run, each after its prefix; with ``follow`` until the run has ended.

    Raises:
        WorldsizeError: this is no run.
    """
    read: dict[Path, int] = {}
    run = scheduler.run
    while True:
        ended = not is_alive(scheduler)
        for path in sorted((run.path / "logs").rglob("*.log"), key=lambda path: path.name):
            prefix, rank = _prefix(path)
            if ranks is None or rank in ranks:
                yield from (f"{prefix}{line}" for line in _new(path, read, whole=ended))
        if ended or not follow:
            return
        time.sleep(_POLL)


def _prefix(path: Path) -> tuple[str, int | None]:
    named = re.fullmatch(r"([a-z_]+)_(\d{5})", path.stem)
    return (f"[{named[1]} {int(named[2])}] ", int(named[2])) if named else (f"[{path.stem}] ", None)


def _new(path: Path, read: dict[Path, int], *, whole: bool) -> list[str]:
    """Lines since the last look; a last one without an end only if there will be no more."""
    with path.open("rb") as file:
        file.seek(read.get(path, 0))
        data = file.read()
    if not whole:
        data = data[: data.rfind(b"\n") + 1]
    read[path] = read.get(path, 0) + len(data)
    return data.decode(errors="replace").splitlines()
