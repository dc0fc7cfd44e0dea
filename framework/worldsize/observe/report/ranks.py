"""Charts of a step's time by rank and by phase."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from worldsize.observe.data_waits import waited_share, waiting_text
from worldsize.observe.report.curves import Numbers, means
from worldsize.observe.report.read import Line, Record, number
from worldsize.observe.report.svg import Chart, colour, draw, series_colour, tip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASES = ("data", "compute", "communication", "update")
_COLUMNS = 80  # of a heat map
_AREAS = 150  # of the step breakdown


def rank_charts(record: Record) -> list[Chart]:
    """Draw heat maps of step times, and the phases of a step."""
    steps = {line["step"]: dict(enumerate(line["step_seconds"])) for line in record.steps}
    own: defaultdict[int, dict[int, float]] = defaultdict(dict)
    data: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for rank, lines in record.timing.items():
        for line in lines:
            data[line["step"]][rank] = number(line.get("data_seconds"))
            own[line["step"]][rank] = data[line["step"]][rank] + number(line.get("compute_seconds"))
    waits = "What a rank waits for the others counts."
    waited = waiting_text(waits_by_rank(record), record.manifest["config"])
    return [
        *heat_map("Step time by rank", steps, record.stragglers, waits),
        *heat_map("Own time by rank", dict(sorted(own.items())), record.stragglers, "Data and compute alone."),
        *(heat_map("Wait for data by rank", dict(sorted(data.items())), (), waited) if waited else ()),
        *step_breakdown(record),
    ]


def waits_by_rank(record: Record) -> dict[int, float]:
    """Return the share of time that each rank waited for data; the first rank's for those without timing."""
    if record.timing:
        return {rank: waited_share(lines) for rank, lines in record.timing.items()}
    steps = [{**line, "step_seconds": max(map(number, line["step_seconds"]), default=0.0)} for line in record.steps]
    return {0: waited_share(steps)} if steps else {}


def heat_map(
    title: str, seconds: Mapping[int, Mapping[int, float]], stragglers: Sequence[Line], note: str
) -> list[Chart]:
    """Draw ``seconds`` by step and rank, with a cross at each straggler."""
    ranks = 1 + max((rank for row in seconds.values() for rank in row), default=-1)
    table_sr = np.array([[number(row.get(rank)) for rank in range(ranks)] for row in seconds.values()])
    if not np.isfinite(table_sr).any():
        return []
    shown_rc = 1e3 * means(table_sr, at_most=_COLUMNS).T
    low, high = np.nanpercentile(shown_rc, (1, 99))
    high = high if high > low else low + 1

    def paint(axes: Axes) -> None:
        edges = (min(seconds), max(seconds) + 1, ranks - 0.5, -0.5)
        look = {"aspect": "auto", "interpolation": "none", "cmap": "YlGnBu", "vmin": low, "vmax": high}
        axes.imshow(shown_rc, extent=edges, **look)
        for event in stragglers:
            (cross,) = axes.plot(event["step"], event["rank"], "x", color=colour("bad"), markersize=6)
            tip(cross, f"rank {event['rank']} straggles: {event.get('cause')}")
        axes.grid(visible=False)
        axes.set_xlabel("step")
        axes.set_ylabel("rank")
        if ranks > 1:
            axes.locator_params(axis="y", integer=True)
        else:
            axes.set_yticks([0])
        scale = axes.inset_axes((1.03, 0, 0.04, 1))
        scale.imshow(np.linspace(high, low, 64)[:, None], extent=(0, 1, low, high), **look)
        scale.grid(visible=False)
        scale.set_xticks([])
        scale.yaxis.tick_right()
        scale.set_title("ms", fontsize=9, color=colour("muted"), loc="left")

    return [Chart(title, draw(title, paint, height=min(150 + 8 * ranks, 420)), note)]


def step_breakdown(record: Record) -> list[Chart]:
    """Draw the phases of a step as stacked means over ranks; unknown phases are one next to the wait for data."""
    lines = [line for timing in record.timing.values() for line in timing] or list(record.steps)
    names = PHASES if any("compute_seconds" in line for line in lines) else ("data", "step")
    steps, seconds_sp = _by_step(lines, names)
    if not len(steps):
        return []
    shown_sp = 1e3 * np.nan_to_num(means(seconds_sp, at_most=_AREAS))
    at = means(np.array(steps, dtype=np.float64)[:, None], at_most=_AREAS)[:, 0]
    typical = 1e3 * np.nanmedian(seconds_sp, axis=0)

    def paint(axes: Axes) -> None:
        areas = axes.stackplot(at, shown_sp.T, colors=[series_colour(index) for index in range(len(names))])
        for area, name, middle in zip(areas, names, typical, strict=True):
            tip(area, f"{name}: median {middle:.3g} ms")
        axes.set_ylim(0, 1.1 * np.percentile(shown_sp.sum(axis=1), 99) or 1)
        axes.set_xlabel("step")
        axes.set_ylabel("ms")
        axes.margins(x=0)

    key = tuple(
        (f"{name} {middle:.3g} ms", f"c{index + 1}")
        for index, (name, middle) in enumerate(zip(names, typical, strict=True))
    )
    return [Chart("Step breakdown", draw("Step breakdown", paint), "Mean over ranks; medians in the key.", key)]


def _by_step(lines: Sequence[Line], names: Sequence[str]) -> tuple[list[int], Numbers]:
    """Return the steps and their seconds [steps, phases], means over the lines that have all phases."""
    parts_by_step: defaultdict[int, list[list[float]]] = defaultdict(list)
    for line in lines:
        parts = [_seconds(line, name) for name in names]
        if not any(map(math.isnan, parts)):
            parts_by_step[line["step"]].append(parts)
    steps = sorted(parts_by_step)
    return steps, np.array([np.mean(parts_by_step[step], axis=0) for step in steps])


def _seconds(line: Line, phase: str) -> float:
    value = line.get(f"{phase}_seconds")
    return float(np.mean([number(each) for each in value])) if isinstance(value, list) and value else number(value)
