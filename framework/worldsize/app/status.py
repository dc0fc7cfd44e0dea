"""``worldsize status [RUN ...]``: runs below a folder and how each ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from worldsize.errors import WorldsizeError
from worldsize.reproducibility.manifest import NAME, look
from worldsize.run_directory import RunDirectory


def main() -> None:
    roots = [Path(argument) for argument in sys.argv[1:]] or [Path("runs")]
    manifests = [path for root in roots for path in sorted(root.rglob(NAME))]
    if not manifests:
        sys.exit(f"no runs below {', '.join(map(str, roots))}. Name a run folder, or a folder that holds some.")
    Console().print(_table(manifests))


def _table(manifests: list[Path]) -> Table:
    table = Table("run", "started", "processes", "attempts", "job", "state")
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
    return (str(run), last["start"], size, str(len(attempts)), _job(manifest) or "", state_of(run, manifest))


def state_of(run: Path, manifest: Mapping[str, Any]) -> str:
    """How the run ended, or what its scheduler says as long as it has not."""
    reason = str(manifest["attempts"][-1]["exit_reason"]) if manifest["attempts"] else "not started"
    job = _job(manifest)
    told = _told(RunDirectory(run), job) if job and reason in ("running", "not started") else None
    return told or reason


def _job(manifest: Mapping[str, Any]) -> str | None:
    return manifest["jobs"][-1]["id"] if manifest.get("jobs") else None


def _told(run: RunDirectory, job: str) -> str | None:
    """What the scheduler says of a job."""
    from worldsize.config.recorded import read_settings  # imports torch, which takes seconds

    try:
        return read_settings(run).launcher.state(job)
    except WorldsizeError:
        return None
