"""Reads what a run folder tells, at whatever moment it is looked at.

The configuration is the one in the manifest, from which secrets were taken out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from worldsize.errors import WorldsizeError
from worldsize.records.run_directory import RunDirectory, runs_below
from worldsize.records.run_record import look

SCALING = "scaling.json"
Line = Mapping[str, Any]


@final
@dataclass(frozen=True)
class Record:
    """A run: its manifest, the lines of metrics.jsonl by kind, those of each rank's timing, and its events."""

    folder: Path
    manifest: dict[str, Any]
    steps: Sequence[Line]
    evaluations: Sequence[Line]
    timing: Mapping[int, Sequence[Line]]
    events: Sequence[Line]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Attempts as the manifest lists them, the first one first; empty for a run not started yet."""
        return list(self.manifest["attempts"])

    @property
    def state(self) -> str:
        """Exit reason of the last attempt, as the manifest names it, or "not started"."""
        return str(self.attempts[-1]["exit_reason"]) if self.attempts else "not started"

    @property
    def results(self) -> dict[str, Any]:
        """Results that the manifest has, empty until an attempt has ended."""
        return self.manifest["results"] or {}

    def changes(self, attempt: int) -> list[tuple[str, Any, Any]]:
        """List the keys of the configuration that changed with this attempt, with both values."""
        resumed = self.manifest.get("resumed", ())
        return [tuple(change) for each in resumed if each["attempt"] == attempt for change in each["changes"]]

    @property
    def stragglers(self) -> list[Line]:
        """Events that name a worker as slow, at a step."""
        return [each for each in self.events if each.get("event") == "straggling" and {"rank", "step"} <= each.keys()]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics from the end of the run, else from the last evaluation."""
        metrics = self.results.get("metrics") or (self.evaluations[-1]["metrics"] if self.evaluations else {})
        return {name: number(value) for name, value in metrics.items()}


def read_run(folder: Path) -> Record:
    """Read the run in ``folder``.

    Raises:
        WorldsizeError: there is none, or its manifest was edited.
    """
    logged = rows(folder / "metrics.jsonl")
    return Record(
        folder=folder,
        manifest=dict(look(RunDirectory(folder)).manifest),
        steps=[row for row in logged if row.get("event") == "step"],
        evaluations=[row for row in logged if row.get("event") == "evaluation"],
        timing={_rank(path): rows(path) for path in sorted((folder / "timing").glob("worker_*.jsonl"))},
        events=rows(folder / "events.jsonl"),
    )


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("worker_"))


def rows(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file that may still grow; one that is cut off or damaged is left out."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [row for row in map(parsed, lines) if row]


def parsed(line: str) -> dict[str, Any]:
    """Parse a line of JSON; return an empty mapping if it is no JSON object."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def runs_of(folder: Path) -> list[Path]:
    """List the run that ``folder`` is, else the runs in it, else those that name it as their sweep."""
    if RunDirectory(folder).manifest.exists():
        return [folder]
    inside = [run.path for run in runs_below(folder)]
    return inside or [path for path in _siblings(folder) if _group(path) == folder.name]


def _siblings(folder: Path) -> list[Path]:
    """List the runs of the root that sweeps lie in, as ``runs/sweeps/<sweep>`` does."""
    return [run.path for run in runs_below(folder.parents[1])] if folder.parent.name == "sweeps" else []


def _group(run: Path) -> str:
    try:
        return Path(look(RunDirectory(run)).manifest["config"]["run"]["group"] or "").name
    except WorldsizeError:
        return ""


def number(value: Any) -> float:
    """Convert to a float, NaN if it is none; ``metrics.jsonl`` writes infinities and NaN as words."""
    converted = math.nan if value is None else float(value)
    return converted if math.isfinite(converted) else math.nan


def column(lines: Iterable[Line], key: str) -> list[float]:
    """Return the numbers under ``key``, one for each line; NaN where a line has none."""
    return [number(line.get(key)) for line in lines]
