"""Reads a run folder at any moment of the run, and computes its ranks' waits for data.

The configuration is that of the manifest, without secrets.
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
from worldsize.record.json_lines import JsonRows, reading
from worldsize.record.metrics import is_timing, metric_rows
from worldsize.record.run_directory import RunDirectory, runs_below
from worldsize.record.run_record import look

SCALING = "scaling.json"
_MOST = 10_000  # lines of a file; more than a screen has pixels
_LEAST, _IN_ALL = 300, 1_000_000  # lines of a file if there are many, and of those of all ranks and runs together
Line = Mapping[str, Any]


@final
@dataclass(frozen=True)
class Record:
    """A run: its manifest, the lines of metrics.jsonl by kind, those of each rank's timing, and its events.

    The steps of long files, and of those of many ranks, are thinned.

    Attributes:
        stands_for: Number of logged steps for which one of ``steps`` stands.
        timing_stands_for: The same for the lines of each rank's timing.
        damaged: Number of unreadable lines, which are left out.
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
        """Cause of the last attempt's failure, in a line; None: it did not fail."""
        return last_failure(self.attempts)

    @property
    def attempts(self) -> list[Attempt]:
        """Attempts as the manifest lists them, in order; empty for a run not started yet."""
        return list(self.manifest["attempts"])

    @property
    def state(self) -> str:
        """The exit reason of the last attempt, or "not started"."""
        return str(self.attempts[-1]["exit_reason"]) if self.attempts else "not started"

    @property
    def results(self) -> dict[str, Any]:
        """Results in the manifest, empty until an attempt has ended."""
        return self.manifest["results"] or {}

    def changes(self, attempt: int) -> list[tuple[str, Any, Any]]:
        """List the keys of the configuration that changed with this attempt, with both values."""
        resumed = self.manifest.get("resumed", ())
        return [tuple(change) for each in resumed if each["attempt"] == attempt for change in each["changes"]]

    @property
    def stragglers(self) -> list[Line]:
        """Events that name a worker as slow, at a step."""
        return [each for each in self.events if each["event"] == "straggling"]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics at the end of the run, or of the last evaluation if it has not ended."""
        metrics = self.results.get("metrics") or (self.evaluations[-1]["metrics"] if self.evaluations else {})
        return {name: number(value) for name, value in metrics.items()}


def read_run(folder: Path, *, has_timing: bool = True, among: int = 1) -> Record:
    """Read the run in ``folder``.

    Args:
        folder: The run folder.
        has_timing: Whether the times of each rank are wanted.
        among: Number of runs that are read together: of many there are fewer steps each.

    Raises:
        WorldsizeError: there is none, its manifest was edited, or a file of it cannot be read.
    """
    with reading(folder):
        manifest = look(RunDirectory(folder)).manifest
        ranks = _ranks(manifest)
        at_most = max(_LEAST, min(_MOST, _IN_ALL // (ranks * among)))  # a line of metrics has a time of each rank, too
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


def _ranks(manifest: Mapping[str, Any]) -> int:
    """Return the largest number of processes that the run has had."""
    sizes: list[int] = [manifest["cluster"]["processes"], *(each["world_size"] for each in manifest["attempts"])]
    return max(*sizes, 1)


def _timing_files(folder: Path, ranks: int) -> Iterator[tuple[int, Path]]:
    """Yield the rank and the path of the timing file of each of the ``ranks``."""
    for path in sorted((folder / "timing").rglob("worker_*.jsonl")):
        named = re.fullmatch(r"worker_(\d{5,7})\.jsonl", path.name, re.ASCII)
        if named and int(named[1]) < ranks:
            yield int(named[1]), path


def runs_of(folder: Path) -> list[Path]:
    """Return [folder] if it is a run, else the runs in it, else the runs that name it as their sweep."""
    if is_file(RunDirectory(folder).manifest):
        return [folder]
    inside = [run.path for run in runs_below(folder)]
    return inside or [path for path in _siblings(folder) if _group(path) == folder.name]


def _siblings(folder: Path) -> list[Path]:
    """List the runs below the root that contains the sweep, which is at ``runs/sweeps/<sweep>``."""
    return [run.path for run in runs_below(folder.parents[1])] if folder.parent.name == "sweeps" else []


def _group(run: Path) -> str:
    with suppress(WorldsizeError), reading(run):
        return Path(look(RunDirectory(run)).manifest["config"]["run"]["group"] or "").name
    return ""


def number(value: Any) -> float:
    """Convert a value of ``metrics.jsonl``, where infinities are words, to a float; NaN if it is not a number."""
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return converted if math.isfinite(converted) else math.nan


def column(lines: Iterable[Line], key: str) -> list[float]:
    """Return the numbers under ``key``, one for each line; NaN for lines without it."""
    return [number(line.get(key)) for line in lines]


_LONG = 0.05  # share of the time above which a remedy is named
_NAMED = 5  # number of ranks named, those that wait longest


def waited_share(lines: Sequence[Line]) -> float:
    """Return the share of step time that one rank waited for data, from its timing lines; NaN if unknown.

    A line has the means of the steps since the line before it.
    """
    data = total = 0.0
    last = 0
    for line in lines:
        steps, last = max(1, line["step"] - last), line["step"]
        wait, rest = number(line.get("data_seconds")), number(line.get("step_seconds"))
        if not math.isnan(wait + rest):
            data, total = data + steps * wait, total + steps * (wait + rest)
    return data / total if total > 0 else math.nan


def waiting_text(shares: Mapping[int, float], config: Mapping[str, Any]) -> str | None:
    """Describe which share of the time ranks wait for data, and the remedy; return None if it is at most 5 %.

    Args:
        shares: of each rank; NaN where it is not known.
        config: of the run, for its ``data_workers``.
    """
    known = {rank: share for rank, share in shares.items() if not math.isnan(share)}
    if not known or max(known.values()) <= _LONG:
        return None
    worst = sorted(known, key=lambda rank: -known[rank])[:_NAMED]
    mean = sum(known.values()) / len(known)
    ranks = ", ".join(f"rank {rank} {known[rank]:.0%}" for rank in worst)
    which = f": {ranks}" if len(known) <= _NAMED else f"; longest wait: {ranks}"
    return f"Steps wait for data for {mean:.0%} of the time{which if len(known) > 1 else ''}. {_remedy(config)}"


def _remedy(config: Mapping[str, Any]) -> str:
    workers = config.get("data_workers", 0)
    others = "give the data set a method load_batch, or prepare the data once (worldsize prepare, for text)."
    if workers == "auto":
        return f"More data_workers than auto has started did not help, or there are no cores for them: {others}"
    more = f", or more than {workers}" if isinstance(workers, int) and workers > 0 else ""
    return f"Set data_workers=auto{more}, {others}"
