"""Reads a run folder during or after the run, and computes how long ranks waited for data.

The configuration is read from the manifest, without secrets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from worldsize.errors import WorldsizeError
from worldsize.files import is_file
from worldsize.observe.events import is_event
from worldsize.record.attempt import Attempt, last_failure
from worldsize.record.json_lines import JsonRows, wrap_read_errors
from worldsize.record.metrics import is_timing, metric_rows
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import refresh_run

SCALING = "scaling.json"
_MOST = 10_000  # maximum lines per file; more than a screen has pixels
_LEAST, _IN_ALL = 300, 1_000_000  # minimum lines per file with many files, and maximum lines in total
Line = Mapping[str, Any]


@final
@dataclass(frozen=True)
class Record:
    """A run: its manifest, metrics by kind, each rank's timing, and its events.

    Steps are thinned in long files, and with many ranks.

    Attributes:
        stands_for: Number of logged steps represented by each of ``steps``.
        timing_stands_for: Number of logged lines represented by each line of ``timing``, by rank.
        damaged: Number of unreadable lines, which are skipped.
    """

    folder: Path
    manifest: Mapping[str, Any]
    steps: Sequence[Line]
    evaluations: Sequence[Line]
    timing: Mapping[int, Sequence[Line]]
    events: Sequence[Line]
    stands_for: int
    timing_stands_for: Mapping[int, int]
    damaged: int

    @property
    def failure(self) -> str | None:
        """Cause of the last attempt's failure in one line, or None if it did not fail."""
        return last_failure(self.attempts)

    @property
    def attempts(self) -> list[Attempt]:
        """Attempts in the manifest, in order; empty before the run has started."""
        return list(self.manifest["attempts"])

    @property
    def state(self) -> str:
        """The exit reason of the last attempt, or "not started"."""
        return str(self.attempts[-1]["exit_reason"]) if self.attempts else "not started"

    @property
    def results(self) -> dict[str, Any]:
        """Results in the manifest; empty until an attempt has ended."""
        return self.manifest["results"] or {}

    def list_changes(self, attempt: int) -> list[tuple[str, Any, Any]]:
        """List configuration keys that changed with this attempt, as (key, old, new)."""
        resumed = self.manifest.get("resumed", ())
        return [tuple(change) for each in resumed if each["attempt"] == attempt for change in each["changes"]]

    @property
    def stragglers(self) -> list[Line]:
        """Straggler events that name a worker and a step."""
        return [each for each in self.events if each["event"] == "straggling"]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics at the end of the run, or of the last evaluation if the run has not ended."""
        metrics = self.results.get("metrics") or (self.evaluations[-1]["metrics"] if self.evaluations else {})
        return {name: parse_number(value) for name, value in metrics.items()}


def read_run(folder: Path, *, has_timing: bool = True, among: int = 1) -> Record:
    """Read the run in ``folder``.

    Args:
        folder: The run folder.
        has_timing: Whether to read each rank's timing.
        among: Number of runs that are read together; the more runs, the fewer steps are read from each.

    Raises:
        WorldsizeError: the folder is not a run, its manifest was edited, or a file cannot be read.
    """
    with wrap_read_errors(folder):
        manifest = refresh_run(RunDirectory(folder)).manifest
        ranks = _count_ranks(manifest)
        at_most = max(_LEAST, min(_MOST, _IN_ALL // (ranks * among)))  # a line of metrics also has one time per rank
        metrics = metric_rows(folder / "metrics.jsonl", at_most=at_most)
        events = JsonRows(folder / "events.jsonl", is_valid=is_event, at_most=_MOST)
        files = _timing_files(folder, ranks) if has_timing else ()
        times = {rank: JsonRows(path, is_valid=is_timing, at_most=at_most) for rank, path in files}
        logged, timing = list(metrics), {rank: list(rows) for rank, rows in times.items()}
        return Record(
            folder=folder,
            manifest=manifest,
            steps=[row for row in logged if row["event"] == "step"],
            evaluations=[row for row in logged if row["event"] == "evaluation"],
            timing=timing,
            events=list(events),
            stands_for=metrics.every,
            timing_stands_for={rank: rows.every for rank, rows in times.items()},
            damaged=sum(rows.damaged for rows in (metrics, events, *times.values())),
        )


def _count_ranks(manifest: Mapping[str, Any]) -> int:
    """Return the largest world size over the run's attempts."""
    sizes: list[int] = [manifest["cluster"]["processes"], *(each["world_size"] for each in manifest["attempts"])]
    return max(*sizes, 1)


def _timing_files(folder: Path, ranks: int) -> Iterator[tuple[int, Path]]:
    """Yield the rank and path of each timing file, for ranks below ``ranks``."""
    for path in sorted((folder / "timing").rglob("worker_*.jsonl")):
        named = re.fullmatch(r"worker_(\d{5,7})\.jsonl", path.name, re.ASCII)
        if named and int(named[1]) < ranks:
            yield int(named[1]), path


def find_runs(folder: Path) -> list[Path]:
    """Return the run at ``folder``, else the runs inside, else those of the sweep ``folder``."""
    if is_file(RunDirectory(folder).manifest):
        return [folder]
    inside = [run.path for run in runs_below(folder)]
    return inside or [path for path in _siblings(folder) if _read_group(path) == folder.name]


def _siblings(folder: Path) -> list[Path]:
    """List all runs in the root folder of the sweep ``runs/sweeps/<sweep>``."""
    return [run.path for run in runs_below(folder.parents[1])] if folder.parent.name == "sweeps" else []


def _read_group(run: Path) -> str:
    with suppress(WorldsizeError), wrap_read_errors(run):
        return Path(refresh_run(RunDirectory(run)).manifest["config"]["run"]["group"] or "").name
    return ""


def parse_number(value: Any) -> float:
    """Convert a value of ``metrics.jsonl`` to a float, or NaN if it is not a finite number."""
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return converted if math.isfinite(converted) else math.nan


def extract_column(lines: Iterable[Line], key: str) -> list[float]:
    """Return the numbers under ``key``, one per line; NaN for lines without it."""
    return [parse_number(line.get(key)) for line in lines]


_LONG = 0.05  # fraction of time above which a remedy is suggested
_NAMED = 5  # maximum number of ranks named, those that wait longest


def compute_wait_share(lines: Sequence[Line]) -> float:
    """Return the fraction of step time that a rank waited for data; NaN if unknown.

    Each line has means over the steps since the previous line.
    """
    data = total = 0.0
    last = 0
    for line in lines:
        steps, last = max(1, line["step"] - last), line["step"]
        wait, rest = parse_number(line.get("data_seconds")), parse_number(line.get("step_seconds"))
        if not math.isnan(wait + rest):
            data, total = data + steps * wait, total + steps * (wait + rest)
    return data / total if total > 0 else math.nan


def waiting_text(shares: Mapping[int, float], config: Mapping[str, Any]) -> str | None:
    """Describe how long ranks wait for data, and the remedy; None if at most 5% of the time.

    Args:
        shares: fraction of time per rank; NaN if unknown.
        config: configuration of the run, for its ``data_workers``.
    """
    known = {rank: share for rank, share in shares.items() if not math.isnan(share)}
    if not known or max(known.values()) <= _LONG:
        return None
    worst = sorted(known, key=lambda rank: -known[rank])[:_NAMED]
    mean = sum(known.values()) / len(known)
    ranks = ", ".join(f"rank {rank} {known[rank]:.0%}" for rank in worst)
    which = f": {ranks}" if len(known) <= _NAMED else f"; longest wait: {ranks}"
    return f"Steps wait for data {mean:.0%} of the time{which if len(known) > 1 else ''}. {_suggest_remedy(config)}"


def _suggest_remedy(config: Mapping[str, Any]) -> str:
    workers = config.get("data_workers", 0)
    others = "add a load_batch method to the dataset, or prepare the data once (worldsize prepare, for text)."
    if workers == "auto":
        return (
            f"data_workers=auto adds no more workers: they would not help, or CPU cores are lacking. Instead, {others}"
        )
    more = f", or more than {workers}" if isinstance(workers, int) and workers > 0 else ""
    return f"Set data_workers=auto{more}, {others}"
