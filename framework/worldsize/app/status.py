"""``worldsize status [RUN ...]``: runs below a folder and how each ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from worldsize.driver.scheduled import SILENT, Scheduler, job_of
from worldsize.errors import WorldsizeError
from worldsize.records.manifest import NAME, look
from worldsize.records.run_directory import RunDirectory


def main() -> None:
    roots = [Path(argument) for argument in sys.argv[1:]] or [Path("runs")]
    manifests = [path for root in roots for path in sorted(root.rglob(NAME))]
    if not manifests:
        sys.exit(f"no runs below {', '.join(map(str, roots))}. Name a run folder, or a folder that holds some.")
    Console().print(_table(manifests))


def _table(manifests: list[Path]) -> Table:
    table = Table(Column("run", overflow="fold"), "started", "processes", "attempts", "job", "state")
    for path in manifests:
        table.add_row(*_row(path.parent))
    return table


def _row(run: Path) -> tuple[str, ...]:
    try:
        manifest = look(run)
    except WorldsizeError as error:
        return (str(run), "", "", "", "", str(error))
    attempts: list[dict[str, Any]] = manifest["attempts"]
    last = attempts[-1] if attempts else {"start": ""}
    size = str(last.get("world_size", ""))
    try:
        state = state_of(manifest, Scheduler(RunDirectory(run)))
    except WorldsizeError as error:
        state = str(error)
    return (str(run), last["start"], size, str(len(attempts)), job_of(manifest) or "", state)


def state_of(manifest: Mapping[str, Any], scheduler: Scheduler) -> str:
    """How the run ended, or what its scheduler says as long as it has not."""
    reason = str(manifest["attempts"][-1]["exit_reason"]) if manifest["attempts"] else None
    job = job_of(manifest)
    if reason not in ("running", None) or job is None:
        return reason or "not started"
    told = scheduler.state(job)
    if told == SILENT:
        return f"{reason or 'submitted'}; {SILENT}"
    return told or reason or "its job is over, and no attempt is noted here"
