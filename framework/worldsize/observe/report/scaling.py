"""Charts of a scaling study: measured, predicted and ideal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from worldsize.errors import WorldsizeError
from worldsize.files import read_regular
from worldsize.observe.report.ranks import PHASES
from worldsize.observe.report.read import number
from worldsize.observe.report.svg import SERIES, Chart, colour, draw, plain, series_colour, tip
from worldsize.record.manifest import check
from worldsize.strict_json import LARGEST, parse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SCHEMA = 1
_SIZE = {"type": "integer", "minimum": 1, "maximum": 1_000_000}
_POINT = {
    "type": "object",
    "properties": {
        "strategy": {"type": "string"},
        "world_size": _SIZE,
        "accumulation": {"type": ["integer", "null"]},
        "nodes": _SIZE,
        "phases": {"type": ["object", "null"], "additionalProperties": {"type": ["number", "null"]}},
    },
}
_SHAPE = {
    "type": "object",
    "properties": {
        "schema": {"type": "integer"},
        "points": {"type": "array", "items": _POINT},
        "least": {"type": ["number", "null"]},
        "knee": {"type": ["object", "null"], "additionalProperties": {"type": ["integer", "null"]}},
    },
}


@final
@dataclass(frozen=True)
class MeasuredPoint:
    """A measured world size. Seconds are per step, NaN if not measured or not predicted."""

    series: str
    strategy: str
    world_size: int
    step_seconds: float
    spread_seconds: float
    predicted_seconds: float
    samples_per_second: float
    efficiency: float
    predicted_efficiency: float
    phases: Mapping[str, float]
    is_knee: bool
    nodes: int

    @property
    def shape(self) -> str:
        """The nodes, and the processes of each: "2 × 4"."""
        return f"{self.nodes} × {self.world_size // self.nodes}"

    @property
    def predicted_samples(self) -> float:
        """Predicted throughput in samples a second."""
        return self.samples_per_second * self.step_seconds / (self.predicted_seconds or math.nan)

    def phase_seconds(self, phase: str) -> float:
        """Return the seconds of a phase in a step, 0 if not measured; "rest" is the remainder."""
        if phase == "rest":
            return max(0.0, self.step_seconds - sum(self.phases.values()))
        return self.phases.get(phase, 0.0)

    @property
    def error(self) -> float:
        """Relative error of the predicted seconds: 0.1 means that the prediction is 10% too slow."""
        return self.predicted_seconds / (self.step_seconds or math.nan) - 1


@final
@dataclass(frozen=True)
class Study:
    """A scaling study: ``facts`` common to its runs, and the points of each series by name."""

    facts: Mapping[str, Any]
    series: Mapping[str, Sequence[MeasuredPoint]]

    @property
    def has_nodes(self) -> bool:
        """Whether some of its runs were on several nodes."""
        return any(point.nodes > 1 for point in self.points)

    @property
    def boundary(self) -> float | None:
        """World size between those on one node and those on several; None: there are not both, or they overlap."""
        one = max((point.world_size for point in self.points if point.nodes == 1), default=math.inf)
        several = min((point.world_size for point in self.points if point.nodes > 1), default=-math.inf)
        return math.sqrt(one * several) if one < several else None

    @property
    def points(self) -> list[MeasuredPoint]:
        """Points of all series."""
        return [point for points in self.series.values() for point in points]


def read_study(path: Path) -> Study:
    """Read the file that ``worldsize scale`` wrote.

    Raises:
        WorldsizeError: the file is damaged, or of a newer schema.
    """
    try:
        facts = parse(read_regular(path, at_most=LARGEST))
        check(facts, _SHAPE)
        schema = int(facts["schema"])
        series: defaultdict[str, list[MeasuredPoint]] = defaultdict(list)
        for each in sorted(facts["points"], key=lambda point: int(point["world_size"])):
            point = _point(each, facts.get("knee") or {})
            series[point.series].append(point)
    except OSError as error:
        raise WorldsizeError(f"{path} cannot be read: {error.strerror}. Measure again: worldsize scale.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise WorldsizeError(f"{path} is not a scaling study: {error!r}. Measure again: worldsize scale.") from None
    if schema > _SCHEMA:
        raise WorldsizeError(f"{path} has schema {schema}; this worldsize reads {_SCHEMA}. Upgrade worldsize.")
    return Study(facts, dict(series))


def _point(each: Mapping[str, Any], knee: Mapping[str, int]) -> MeasuredPoint:
    strategy, accumulation = str(each["strategy"]), each.get("accumulation") or 1
    series = strategy if accumulation == 1 else f"{strategy}, {accumulation} micro-batches"
    return MeasuredPoint(
        series=series,
        strategy=strategy,
        world_size=int(each["world_size"]),
        **{name: number(each.get(name)) for name in _FIGURES},
        phases={name: number(seconds) for name, seconds in (each.get("phases") or {}).items()},
        is_knee=knee.get(series, knee.get(strategy)) == each["world_size"],
        nodes=each.get("nodes", 1),  # older studies do not say
    )


_FIGURES = (
    "step_seconds",
    "spread_seconds",
    "predicted_seconds",
    "samples_per_second",
    "efficiency",
    "predicted_efficiency",
)


def study_charts(study: Study) -> list[Chart]:
    """Draw throughput, efficiency, and the phases of each series that has measured any."""
    key = tuple((plain(name), f"c{index % SERIES + 1}") for index, name in enumerate(study.series))
    throughput, efficiency = (_PREDICTED, _PREDICTED_SHARE) if study.facts.get("predicted") else (_LEGEND, _RELATIVE)
    efficiency += _UPRIGHT if study.boundary is not None else ""
    return [
        Chart("Throughput", draw("Throughput", partial(_throughput, study=study), height=260), throughput, key),
        Chart("Efficiency", draw("Efficiency", partial(_efficiency, study=study), height=260), efficiency, key),
        *(_breakdown(name, points) for name, points in study.series.items() if any(point.phases for point in points)),
    ]


_LEGEND = "Dots: measured, with spread. Dashed: predicted. Dotted: ideal. Ring: the knee."
_RELATIVE = "Samples a second of each process, against the smallest world size. Dashed: predicted. Ring: the knee."
_PREDICTED = "Predicted; nothing was run. Dotted: ideal. Ring: the knee."
_PREDICTED_SHARE = "Share of a step that computes, predicted. Ring: the knee."
_UPRIGHT = " To the right of the upright line: several nodes."


def _throughput(axes: Axes, study: Study) -> None:
    for index, (name, points) in enumerate(study.series.items()):
        shade, sizes = series_colour(index), [point.world_size for point in points]
        rates = [point.samples_per_second for point in points]
        ideal = [point.samples_per_second / point.efficiency for point in points]
        spread = [
            rate * point.spread_seconds / point.step_seconds / 2 for rate, point in zip(rates, points, strict=True)
        ]
        axes.plot(sizes, ideal, ":", color=colour("muted"), linewidth=1)
        axes.plot(sizes, [point.predicted_samples for point in points], "--", color=shade)
        axes.errorbar(sizes, rates, spread, color=shade, linestyle="none", capsize=3)
        (line,) = axes.plot(sizes, rates, "o-", color=shade, markersize=4)
        tip(line, f"{name}: " + ", ".join(f"{point.world_size}: {point.samples_per_second:,.0f}" for point in points))
        _ring(axes, points, rates)
    axes.set_yscale("log", base=10, subs=(2, 5))
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted("{x:,.0f}")
    axes.set_ylabel("samples/s")
    _world_sizes(axes, study)


def _efficiency(axes: Axes, study: Study) -> None:
    for index, (name, points) in enumerate(study.series.items()):
        shares = [100 * point.efficiency for point in points]
        (line,) = axes.plot(
            [point.world_size for point in points], shares, "o-", color=series_colour(index), markersize=4
        )
        tip(line, f"{name}: " + ", ".join(f"{point.world_size}: {point.efficiency:.1%}" for point in points))
        expected = [100 * point.predicted_efficiency for point in points]
        axes.plot([point.world_size for point in points], expected, "--", color=series_colour(index))
        _ring(axes, points, shares)
    if (boundary := study.boundary) is not None:
        axes.axvline(boundary, color=colour("muted"), linewidth=1)
    axes.axhline(100, color=colour("muted"), linestyle=":", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("%")
    _world_sizes(axes, study)


def _ring(axes: Axes, points: Sequence[MeasuredPoint], heights: Sequence[float]) -> None:
    for point, height in zip(points, heights, strict=True):
        if point.is_knee:
            look: dict[str, Any] = {"markersize": 12, "markerfacecolor": "none", "markeredgecolor": colour("ink")}
            (ring,) = axes.plot([point.world_size], [height], "o", **look)
            tip(ring, f"{point.series}: the knee is at {point.world_size}")


def _world_sizes(axes: Axes, study: Study) -> None:
    sizes = sorted({point.world_size for point in study.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels=[str(size) for size in sizes], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("processes")


def _breakdown(name: str, points: Sequence[MeasuredPoint]) -> Chart:
    """Draw the measured phases, and "rest" if they do not add up to the step."""
    title = f"Step breakdown: {plain(name)}"
    known = [phase for phase in PHASES if any(phase in point.phases for point in points)]
    shades = {phase: f"c{PHASES.index(phase) + 1}" for phase in known}
    shades |= {"rest": "muted"} if len(known) < len(PHASES) else {}
    paint = partial(_phases, points=points, shades=shades)
    return Chart(title, draw(title, paint, height=260), "Medians.", tuple(shades.items()))


def _phases(axes: Axes, points: Sequence[MeasuredPoint], shades: Mapping[str, str]) -> None:
    bottoms = [0.0] * len(points)
    for phase, shade in shades.items():
        heights = [1e3 * point.phase_seconds(phase) for point in points]
        bars = axes.bar(range(len(points)), heights, 0.7, bottom=bottoms, color=colour(shade))
        for bar, point, height in zip(bars, points, heights, strict=True):
            tip(bar, f"{phase} at {point.world_size}: {height:.3g} ms")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(points)), [str(point.world_size) for point in points])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("processes")
    axes.set_ylabel("ms")
