"""Evaluates runs at several world sizes: efficiency, spread, and where more processes no longer pay off."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from worldsize.records.json_lines import Rows
from worldsize.records.metrics import metric_rows

PHASES = ("data", "compute", "communication", "update")
_WARM_UP = 0.2  # share of steps to skip at the start, in which memory is allocated and DDP rebuilds its buckets


@dataclass(frozen=True)
class Timed:
    """Seconds of a run: the median and interquartile range of its steps, and the median of each known phase."""

    step_seconds: float
    spread_seconds: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class Point:
    """One run of a study. ``accumulation``: micro-batches of each process in a step."""

    strategy: str
    world_size: int
    accumulation: int
    step_seconds: float
    spread_seconds: float
    phases: Mapping[str, float]
    samples_per_second: float
    predicted_seconds: float | None
    run: str

    @property
    def error(self) -> float | None:
        """Error of the prediction relative to the measurement; None without a prediction."""
        return None if self.predicted_seconds is None else self.predicted_seconds / self.step_seconds - 1


def timed(ranks: Sequence[Sequence[Mapping[str, float]]]) -> Timed:
    """Evaluate the lines of ``timing/`` (seconds, by rank) for the steps that all ranks have.

    A step takes the time of the slowest rank; a phase is the mean over ranks. The first fifth of the steps is left out.
    """
    by_step = [{int(line["step"]): line for line in lines} for lines in ranks]
    shared = sorted(set.intersection(*map(set, by_step)))
    steps = [[lines[step] for lines in by_step] for step in shared]
    steps = steps[int(_WARM_UP * len(steps)) :]
    seconds = [max(line["step_seconds"] + line["data_seconds"] for line in lines) for lines in steps]
    known = [phase for phase in PHASES if f"{phase}_seconds" in steps[0][0]]
    phases = {
        phase: statistics.median(statistics.fmean(line[f"{phase}_seconds"] for line in lines) for lines in steps)
        for phase in known
    }
    return Timed(statistics.median(seconds), spread(seconds), phases)


def spread(seconds: Sequence[float]) -> float:
    """Return the interquartile range of ``seconds``, in seconds."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return high - low


def read_timed(run: Path, batch_size: int) -> Timed:
    """Read the times of a run folder: those of its ranks, or only its throughput if no rank wrote any.

    Ranks write none with ``observe.step_breakdown=false`` and where servers lead.
    """
    files = sorted((run / "timing").rglob("worker_*.jsonl"))
    if files:
        return timed([list(Rows(file)) for file in files])
    rows = metric_rows(run / "metrics.jsonl")
    steps = [(row["step"], batch_size / row["samples_per_second"]) for row in rows if row["event"] == "step"]
    return timed([[{"step": step, "step_seconds": seconds, "data_seconds": 0.0} for step, seconds in steps]])


def efficiencies(points: Sequence[Point]) -> list[float]:
    """Return samples per second and process, relative to the smallest world size with the least accumulation."""
    base = min(points, key=lambda point: (point.world_size, point.accumulation))
    alone = base.samples_per_second / base.world_size
    return [point.samples_per_second / point.world_size / alone for point in points]


def knees(points: Sequence[Point]) -> dict[str, int]:
    """Return for each strategy the world size at which efficiency × speedup is largest.

    Below it more processes gain more speed than they lose efficiency, above it less (Eager, Zahorjan and Lazowska 1989,
    doi:10.1109/12.21127, section 4).
    """
    power = {
        (point.strategy, point.world_size): share * share * point.world_size
        for point, share in sorted(zip(points, efficiencies(points), strict=True), key=lambda pair: pair[1])
    }
    return {
        strategy: max((key for key in power if key[0] == strategy), key=lambda key: power[key])[1]
        for strategy in dict.fromkeys(point.strategy for point in points)
    }
