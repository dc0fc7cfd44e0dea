"""Evaluates runs at several world sizes: efficiency, spread, and the knee."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worldsize.record.json_lines import JsonRows
from worldsize.record.metrics import metric_rows

PHASES = ("data", "compute", "communication", "update")
_WARM_UP = 0.2  # fraction of steps to skip at the start, while memory is allocated and DDP rebuilds its buckets


@dataclass(frozen=True)
class Timed:
    """Seconds per step: median and interquartile range, and the median of known phases."""

    step_seconds: float
    spread_seconds: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class Point:
    """One run of a scaling study, with ``accumulation`` micro-batches per process, on ``nodes`` nodes."""

    strategy: str
    world_size: int
    accumulation: int
    step_seconds: float
    spread_seconds: float
    phases: Mapping[str, float]
    samples_per_second: float
    predicted_seconds: float | None
    run: str
    nodes: int = 1

    @property
    def shape(self) -> str:
        """The number of nodes and processes per node, as in "2 × 4"."""
        return f"{self.nodes} × {self.world_size // self.nodes}"

    @property
    def error(self) -> float | None:
        """Relative error of the prediction. None without a prediction."""
        return None if self.predicted_seconds is None else self.predicted_seconds / self.step_seconds - 1


def summarize_timing(ranks: Sequence[Sequence[Mapping[str, float]]]) -> Timed:
    """Summarize step times from the lines of ``timing/`` (seconds, by rank), for steps present on all ranks.

    A step takes the time of the slowest rank; a phase is the mean over ranks. The first fifth of the steps is skipped.
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
    return Timed(statistics.median(seconds), compute_spread(seconds), phases)


def compute_spread(seconds: Sequence[float]) -> float:
    """Return the interquartile range of ``seconds``, in seconds."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return high - low


def read_timed(run: Path, batch_size: int) -> Timed:
    """Read the step times of a run folder: per rank, or else from the throughput.

    Timing files are missing with ``observe.step_breakdown=false``, or if a server leads the training.
    """
    files = sorted((run / "timing").rglob("worker_*.jsonl"))
    if files:
        return summarize_timing([list(JsonRows(file)) for file in files])
    rows = metric_rows(run / "metrics.jsonl")
    steps = [(row["step"], batch_size / row["samples_per_second"]) for row in rows if row["event"] == "step"]
    return summarize_timing([[{"step": step, "step_seconds": seconds, "data_seconds": 0.0} for step, seconds in steps]])


def efficiencies(points: Sequence[Point]) -> list[float]:
    """Return throughput per process, relative to the smallest world size with the least accumulation."""
    base = min(points, key=lambda point: (point.world_size, point.accumulation))
    alone = base.samples_per_second / base.world_size
    return [point.samples_per_second / point.world_size / alone for point in points]


def predict_efficiencies(points: Sequence[Point]) -> list[float] | None:
    """Return the :func:`efficiencies` of predicted step times, or None if any is missing."""
    predicted = [point.predicted_seconds for point in points]
    if any(not seconds for seconds in predicted):
        return None
    rates = [
        point.samples_per_second * point.step_seconds / (seconds or 1.0)
        for point, seconds in zip(points, predicted, strict=True)
    ]
    return efficiencies([replace(point, samples_per_second=rate) for point, rate in zip(points, rates, strict=True)])


def marginals(points: Sequence[Point]) -> list[float | None]:
    """Return each point's marginal efficiency: the gain per process over the next smaller size.

    It is relative to the speed per process at the smallest world size of the same strategy: 1 if scaling is perfect,
    negative if more processes are slower. None at the smallest world size of a series.
    """
    return [
        None if (before := _find_previous_point(point, points)) is None else _compute_marginal(point, before, points)
        for point in points
    ]


def _compute_marginal(point: Point, before: Point, points: Sequence[Point]) -> float:
    own = (each for each in points if each.strategy == point.strategy)
    base = min(own, key=lambda each: (each.world_size, each.accumulation))
    each = (point.samples_per_second - before.samples_per_second) / (point.world_size - before.world_size)
    return each / (base.samples_per_second / base.world_size)


def marginal_text(share: float | None) -> str:
    """Format a marginal efficiency; empty for None."""
    return "" if share is None else f"{round(share, 2) + 0.0:.0%}"  # never "-0%"


def _find_previous_point(point: Point, points: Sequence[Point]) -> Point | None:
    """Return the point at the next smaller world size of the same series; if there are several, on the fewest nodes."""
    series = (each for each in points if (each.strategy, each.accumulation) == (point.strategy, point.accumulation))
    smaller = [each for each in series if each.world_size < point.world_size]
    return max(smaller, key=lambda each: (each.world_size, -each.nodes), default=None)


def find_knees(points: Sequence[Point], *, least: float | None = None) -> dict[str, int]:
    """Return each strategy's knee: the world size beyond which more processes do not pay off.

    Args:
        points: The study.
        least: Minimum marginal efficiency (see :func:`marginals`) that pays off; the knee is the last world size before
            the first one below it. If None, the knee maximizes efficiency × speedup. Below it, more processes gain more
            speed than they lose efficiency, above it less (Eager, Zahorjan and Lazowska 1989, doi:10.1109/12.21127,
            section 4).
    """
    if least is not None:
        return {strategy: _last_worth(points, strategy, least) for strategy in _strategies(points)}
    power = {
        (point.strategy, point.world_size): share * share * point.world_size
        for point, share in sorted(zip(points, efficiencies(points), strict=True), key=lambda pair: pair[1])
    }
    return {
        strategy: max((key for key in power if key[0] == strategy), key=lambda key: power[key])[1]
        for strategy in _strategies(points)
    }


def _strategies(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.strategy for point in points))


def _last_worth(points: Sequence[Point], strategy: str, least: float) -> int:
    """Return the last world size before the marginal efficiency (best series per size) falls below ``least``."""
    best: dict[int, float] = {}
    for point, share in zip(points, marginals(points), strict=True):
        if point.strategy == strategy:
            best[point.world_size] = max(best.get(point.world_size, -math.inf), 1.0 if share is None else share)
    sizes = sorted(best)
    first = next((place for place, size in enumerate(sizes) if best[size] < least), len(sizes))
    return sizes[max(0, first - 1)]


def boundary_text(points: Sequence[Point], shares: Sequence[float] | None = None) -> list[str]:
    """Describe the measured and predicted efficiency of each series across the node boundary.

    ``shares`` replace the :func:`efficiencies`.
    """
    predicted: Sequence[float | None] = predict_efficiencies(points) or [None] * len(points)
    rows = list(zip(points, shares or efficiencies(points), predicted, marginals(points), strict=True))
    said = []
    for series in dict.fromkeys((point.strategy, point.accumulation) for point in points):
        own = [row for row in rows if (row[0].strategy, row[0].accumulation) == series]
        one = max((row for row in own if row[0].nodes == 1), key=lambda row: row[0].world_size, default=None)
        several = min(
            (row for row in own if row[0].nodes > 1), key=lambda row: (row[0].world_size, row[0].nodes), default=None
        )
        if one and several:
            said.append(
                f"{series[0]} at the node boundary, {one[0].shape} to {several[0].shape}: "
                f"{_describe_drop(one, several)}."
            )
    return said


def _describe_drop(one: tuple[Point, float, float | None, float | None], several: tuple[Any, ...]) -> str:
    text = f"efficiency {one[1]:.0%} to {several[1]:.0%}"
    if one[2] is not None and several[2] is not None:
        text += f" (predicted {one[2]:.0%} to {several[2]:.0%})"
    return (
        text
        if several[3] is None
        else f"{text}; each additional process adds {marginal_text(several[3])} of the throughput of a single process"
    )
