"""Charts of a scaling study: measured, predicted and ideal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from worldsize.errors import WorldsizeError
from worldsize.files import read_regular
from worldsize.observe.report.ranks import PHASES
from worldsize.observe.report.read import parse_number
from worldsize.observe.report.svg import SERIES, Axis, Chart, Plot, format_colour, series_colour, shorten_text
from worldsize.record.manifest import check_against_schema
from worldsize.strict_json import LARGEST, parse_strict_json

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
    """Measurements at one world size. Seconds are per step, NaN if not measured or predicted."""

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
        """The number of nodes and processes per node, as in "2 × 4"."""
        return f"{self.nodes} × {self.world_size // self.nodes}"

    @property
    def predicted_samples(self) -> float:
        """Predicted throughput in samples per second."""
        return self.samples_per_second * self.step_seconds / (self.predicted_seconds or math.nan)

    def phase_seconds(self, phase: str) -> float:
        """Return the seconds per step in a phase, 0 if not measured; "rest" is the remainder."""
        if phase == "rest":
            return max(0.0, self.step_seconds - sum(self.phases.values()))
        return self.phases.get(phase, 0.0)

    @property
    def error(self) -> float:
        """Relative error of the predicted time: 0.1 means that the prediction is 10% too slow."""
        return self.predicted_seconds / (self.step_seconds or math.nan) - 1


@final
@dataclass(frozen=True)
class Study:
    """A scaling study: ``facts`` common to its runs, and the points of each series by name."""

    facts: Mapping[str, Any]
    series: Mapping[str, Sequence[MeasuredPoint]]

    @property
    def has_nodes(self) -> bool:
        """Whether any of its runs used several nodes."""
        return any(point.nodes > 1 for point in self.points)

    @property
    def boundary(self) -> float | None:
        """World size that separates single-node from multi-node runs; None if there is none."""
        one = max((point.world_size for point in self.points if point.nodes == 1), default=math.inf)
        several = min((point.world_size for point in self.points if point.nodes > 1), default=-math.inf)
        return math.sqrt(one * several) if one < several else None

    @property
    def points(self) -> list[MeasuredPoint]:
        """Points of all series."""
        return [point for points in self.series.values() for point in points]


def read_study(path: Path) -> Study:
    """Read the file written by ``worldsize scale``.

    Raises:
        WorldsizeError: the file is damaged, or has a newer schema.
    """
    try:
        facts = parse_strict_json(read_regular(path, at_most=LARGEST))
        check_against_schema(facts, _SHAPE)
        schema = int(facts["schema"])
        series: defaultdict[str, list[MeasuredPoint]] = defaultdict(list)
        for each in sorted(facts["points"], key=lambda point: int(point["world_size"])):
            point = _parse_point(each, facts.get("knee") or {})
            series[point.series].append(point)
    except OSError as error:
        raise WorldsizeError(f"failed to read {path}: {error.strerror}. Run worldsize scale again.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise WorldsizeError(f"{path} is not a scaling study: {error!r}. Run worldsize scale again.") from None
    if schema > _SCHEMA:
        raise WorldsizeError(
            f"{path} has schema {schema}, but this version of worldsize supports {_SCHEMA}. Upgrade worldsize."
        )
    return Study(facts, dict(series))


def _parse_point(each: Mapping[str, Any], knee: Mapping[str, int]) -> MeasuredPoint:
    strategy, accumulation = str(each["strategy"]), each.get("accumulation") or 1
    series = strategy if accumulation == 1 else f"{strategy}, {accumulation} micro-batches"
    return MeasuredPoint(
        series=series,
        strategy=strategy,
        world_size=int(each["world_size"]),
        **{name: parse_number(each.get(name)) for name in _FIGURES},
        phases={name: parse_number(seconds) for name, seconds in (each.get("phases") or {}).items()},
        is_knee=knee.get(series, knee.get(strategy)) == each["world_size"],
        nodes=each.get("nodes", 1),  # missing in older studies
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
    """Draw throughput, efficiency and, per series with measured phases, a step's phases."""
    key = tuple((shorten_text(name), f"c{index % SERIES + 1}") for index, name in enumerate(study.series))
    throughput, efficiency = (_PREDICTED, _PREDICTED_SHARE) if study.facts.get("predicted") else (_LEGEND, _RELATIVE)
    efficiency += _UPRIGHT if study.boundary is not None else ""
    return [
        Chart("Throughput", _throughput(study).draw("Throughput"), throughput, key),
        Chart("Efficiency", _efficiency(study).draw("Efficiency"), efficiency, key),
        *(_breakdown(name, points) for name, points in study.series.items() if any(point.phases for point in points)),
    ]


_LEGEND = "Dots: measured, with spread. Dashed: predicted. Dotted: ideal. Ring: the knee."
_RELATIVE = "Samples per second per process, relative to the smallest world size. Dashed: predicted. Ring: the knee."
_PREDICTED = "Predicted, not measured. Dotted: ideal. Ring: the knee."
_PREDICTED_SHARE = "Predicted compute share of a step. Ring: the knee."
_UPRIGHT = " Right of the vertical line: multiple nodes."


def _throughput(study: Study) -> Plot:
    plot = Plot(_world_sizes(study), Axis("samples/s", is_log=True, margin=0.06), height=260)
    for index, (name, points) in enumerate(study.series.items()):
        shade, sizes = series_colour(index), [point.world_size for point in points]
        rates = [point.samples_per_second for point in points]
        plot.add_line(
            sizes,
            [rate / (point.efficiency or math.nan) for rate, point in zip(rates, points, strict=True)],
            format_colour("muted"),
            dash="1.5 2.5",
            width=1,
        )
        plot.add_line(sizes, [point.predicted_samples for point in points], shade, dash="6 3")
        for rate, point in zip(rates, points, strict=True):
            half = rate * point.spread_seconds / (point.step_seconds or math.nan) / 2
            plot.add_line([point.world_size] * 2, [rate - half, rate + half], shade)
        plot.add_line(sizes, rates, shade)
        plot.add_points(
            sizes,
            rates,
            shade,
            tips=[f"{name}, {point.world_size}: {point.samples_per_second:,.0f}" for point in points],
        )
        _mark_knee(plot, points, rates)
    return plot


def _efficiency(study: Study) -> Plot:
    plot, sizes = Plot(_world_sizes(study), Axis("%", low=0), height=260), [point.world_size for point in study.points]
    for index, (name, points) in enumerate(study.series.items()):
        shares, own = [100 * point.efficiency for point in points], [point.world_size for point in points]
        plot.add_line(own, [100 * point.predicted_efficiency for point in points], series_colour(index), dash="6 3")
        plot.add_line(own, shares, series_colour(index))
        tips = [f"{name}, {point.world_size}: {point.efficiency:.1%}" for point in points]
        plot.add_points(own, shares, series_colour(index), tips=tips)
        _mark_knee(plot, points, shares)
    plot.add_line(
        [min(sizes, default=1), max(sizes, default=1)], [100, 100], format_colour("muted"), dash="1.5 2.5", width=1
    )
    if (boundary := study.boundary) is not None:
        plot.add_line([boundary, boundary], [0, 100], format_colour("muted"), width=1)
    return plot


def _mark_knee(plot: Plot, points: Sequence[MeasuredPoint], heights: Sequence[float]) -> None:
    for point, height in zip(points, heights, strict=True):
        if point.is_knee:
            tip = f"{point.series}: the knee is at {point.world_size}"
            plot.add_points([point.world_size], [height], format_colour("ink"), tips=[tip], kind="ring")


def _world_sizes(study: Study) -> Axis:
    sizes = sorted({point.world_size for point in study.points})
    return Axis("processes", is_log=True, ticks=[(size, str(size)) for size in sizes], margin=0.04)


def _breakdown(name: str, points: Sequence[MeasuredPoint]) -> Chart:
    """Draw the measured phases, and "rest" if some phases were not measured."""
    title = f"Step breakdown: {shorten_text(name)}"
    known = [phase for phase in PHASES if any(phase in point.phases for point in points)]
    shades = {phase: f"c{PHASES.index(phase) + 1}" for phase in known}
    shades |= {"rest": "muted"} if len(known) < len(PHASES) else {}
    ticks = [(index, str(point.world_size)) for index, point in enumerate(points)]
    plot = Plot(Axis("processes", low=-0.5, high=len(points) - 0.5, ticks=ticks), Axis("ms", low=0), height=260)
    for index, point in enumerate(points):
        below = 0.0
        for phase, shade in shades.items():
            above = below + 1e3 * point.phase_seconds(phase)
            tip = f"{phase} at {point.world_size}: {above - below:.3g} ms"
            plot.add_area([index - 0.35, index + 0.35], [below] * 2, [above] * 2, format_colour(shade), tip=tip)
            below = above
    return Chart(title, plot.draw(title), "Medians.", tuple(shades.items()))
