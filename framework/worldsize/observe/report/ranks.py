"""Charts of step times by rank and phase, and of the load of parameter servers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from worldsize.observe.report.curves import StepCurve, average_rows, draw_lines
from worldsize.observe.report.read import Line, Record, compute_wait_share, parse_number, waiting_text
from worldsize.observe.report.svg import Axis, Chart, Numbers, Plot, format_colour, series_colour

PHASES = ("data", "compute", "communication", "update")
_COLUMNS = 80  # maximum columns of a heat map
_AREAS = 150  # maximum points of the step breakdown
_CELLS = 1280  # maximum cells of a heat map with individual tooltips


def rank_charts(record: Record) -> list[Chart]:
    """Draw heat maps of step times, and the phases of a step."""
    steps = {line["step"]: dict(enumerate(line["step_seconds"])) for line in record.steps}
    own: defaultdict[int, dict[int, float]] = defaultdict(dict)
    data: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for rank, logged in record.timing.items():
        for line in logged:
            data[line["step"]][rank] = parse_number(line.get("data_seconds"))
            own[line["step"]][rank] = data[line["step"]][rank] + parse_number(line.get("compute_seconds"))
    waits = "Includes waits for other ranks."
    waited = waiting_text(waits_by_rank(record), record.manifest["config"])
    return [
        *heat_map("Step time by rank", steps, record.stragglers, waits),
        *heat_map("Own time by rank", dict(sorted(own.items())), record.stragglers, "Data and compute only."),
        *(heat_map("Wait for data by rank", dict(sorted(data.items())), (), waited) if waited else ()),
        *step_breakdown(record),
    ]


def waits_by_rank(record: Record) -> dict[int, float]:
    """Return each rank's fraction of time waiting for data; without timing, only rank 0's."""
    if record.timing:
        return {rank: compute_wait_share(lines) for rank, lines in record.timing.items()}
    steps = [
        {**line, "step_seconds": max(map(parse_number, line["step_seconds"]), default=0.0)} for line in record.steps
    ]
    return {0: compute_wait_share(steps)} if steps else {}


def heat_map(
    title: str, seconds: Mapping[int, Mapping[int, float]], stragglers: Sequence[Line], note: str
) -> list[Chart]:
    """Draw ``seconds`` by step and rank, with a cross at each straggler.

    The color scale ends at the 1st and 99th percentiles, so that one slow step does not hide all others.
    """
    ranks = 1 + max((rank for row in seconds.values() for rank in row), default=-1)
    table_sr = np.array([[parse_number(row.get(rank)) for rank in range(ranks)] for row in seconds.values()])
    if not np.isfinite(table_sr).any():
        return []
    shown_rc = 1e3 * average_rows(table_sr, at_most=_COLUMNS).T
    low, high = np.nanpercentile(shown_rc, (1, 99))
    high = high if high > low else low + 1

    first, last = min(seconds), max(seconds) + 1
    ticks = [(-rank, str(rank)) for rank in range(0, ranks, max(1, -(-ranks // 8)))]
    plot = Plot(
        Axis("step", low=first, high=last),
        Axis("rank", low=0.5 - ranks, high=0.5, ticks=ticks),
        height=min(150 + 8 * ranks, 420),
    )
    plot.add_image(shown_rc, low, high, extent=(first, last, 0.5, 0.5 - ranks))
    edges = np.linspace(first, last, shown_rc.shape[1] + 1)
    for rank, row in enumerate(shown_rc):
        if shown_rc.size > _CELLS:
            plot.add_cell(first, last, 0.5 - rank, -0.5 - rank, f"rank {rank}: median {np.nanmedian(row):.3g} ms")
            continue
        for column, value in enumerate(row):
            text = f"rank {rank}, step {edges[column]:.0f}: {value:.3g} ms"
            plot.add_cell(edges[column], edges[column + 1], 0.5 - rank, -0.5 - rank, text)
    for event in stragglers:
        tip = f"rank {event['rank']} is a straggler: {event.get('cause')}"
        plot.add_points([event["step"]], [-event["rank"]], format_colour("bad"), tips=[tip], kind="cross")
    scale = f"Light: {low:.3g} ms and below; dark: {high:.3g} ms (99th percentile) and above."
    return [Chart(title, plot.draw(title), f"{note} {scale}".strip())]


def step_breakdown(record: Record) -> list[Chart]:
    """Draw the phases of a step as stacked means over ranks.

    Without timing, only the wait for data and the rest of the step are drawn.
    """
    lines = [line for timing in record.timing.values() for line in timing] or list(record.steps)
    names = PHASES if any("compute_seconds" in line for line in lines) else ("data", "step")
    steps, seconds_sp = _average_by_step(lines, names)
    if not len(steps):
        return []
    shown_sp = 1e3 * np.nan_to_num(average_rows(seconds_sp, at_most=_AREAS))
    at = average_rows(np.array(steps, dtype=np.float64)[:, None], at_most=_AREAS)[:, 0]
    typical = 1e3 * np.nanmedian(seconds_sp, axis=0)

    top = 1.1 * float(np.percentile(shown_sp.sum(axis=1), 99)) or 1.0
    plot, below = Plot(Axis("step", margin=0), Axis("ms", low=0, high=top)), np.zeros(len(shown_sp))
    for index, name in enumerate(names):
        above = below + shown_sp[:, index]
        plot.add_area(at, below, above, series_colour(index))
        plot.add_values(f"{name} (ms)", at, shown_sp[:, index])
        below = above
    key = tuple(
        (f"{name} {middle:.3g} ms", f"c{index + 1}")
        for index, (name, middle) in enumerate(zip(names, typical, strict=True))
    )
    return [Chart("Step breakdown", plot.draw("Step breakdown"), "Mean over ranks; medians in the legend.", key)]


def _average_by_step(lines: Sequence[Line], names: Sequence[str]) -> tuple[list[int], Numbers]:
    """Return steps and seconds (steps, phases), averaged over lines with all phases."""
    parts_by_step: defaultdict[int, list[list[float]]] = defaultdict(list)
    for line in lines:
        parts = [_read_seconds(line, name) for name in names]
        if not any(map(math.isnan, parts)):
            parts_by_step[line["step"]].append(parts)
    steps = sorted(parts_by_step)
    return steps, np.array([np.mean(parts_by_step[step], axis=0) for step in steps])


def _read_seconds(line: Line, phase: str) -> float:
    value = line.get(f"{phase}_seconds")
    return (
        float(np.mean([parse_number(each) for each in value]))
        if isinstance(value, list) and value
        else parse_number(value)
    )


_HOTTEST = 10
_FIGURES = ("pushes", "pulls", "bytes_in", "bytes_out", "longest_queue", "lost_updates", "seconds")


@final
@dataclass(frozen=True)
class Server:
    """Totals of a server over the run, estimated if steps were thinned in a long run."""

    name: str
    pushes: int
    pulls: int
    bytes_in: int
    bytes_out: int
    longest_queue: int
    lost_updates: int


@final
@dataclass(frozen=True)
class HotRows:
    """The most pushed rows of a table, with their numbers of pushes in a sample."""

    table: str
    rows: tuple[tuple[int, int], ...]


def list_servers(record: Record) -> list[Server]:
    """Return the totals of each parameter server, by index; empty if the strategy has none."""
    loads = _collect_loads(record)
    return [
        _sum_loads(f"server {index}", [line for _, line in loads[index]], record.stands_for) for index in sorted(loads)
    ]


Loads = Mapping[int, Sequence[tuple[int, Line]]]  # (step, load) of each line, by server


def _collect_loads(record: Record) -> Loads:
    """Collect the load of each server per logged step."""
    loads: defaultdict[int, list[tuple[int, Line]]] = defaultdict(list)
    for line in record.steps:
        for index, load in enumerate(_read_loads(line)):
            loads[index].append((line["step"], load))
    return loads


def _read_loads(line: Line) -> Sequence[Line]:
    """Return the loads of all servers in a line; empty if missing or in an unknown format."""
    facts = line.get("facts")
    listed = facts.get("servers") if isinstance(facts, dict) else None
    return listed if isinstance(listed, list) and all(map(_is_load, listed)) else []


def _is_load(load: Any) -> bool:
    if not isinstance(load, dict) or any(type(load.get(key)) not in (int, float) for key in _FIGURES):
        return False
    tables = load.get("tables", {})
    return isinstance(tables, dict) and all(map(_is_table, tables.values()))


def _is_table(table: Any) -> bool:
    rows = table.get("hottest") if isinstance(table, dict) else None
    return isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == 2 and all(type(each) is int for each in row) for row in rows
    )


def _sum_loads(name: str, loads: Sequence[Line], stands_for: int) -> Server:
    sums = {
        key: stands_for * sum(int(load[key]) for load in loads) for key in ("pushes", "pulls", "bytes_in", "bytes_out")
    }
    most = {key: max(int(load[key]) for load in loads) for key in ("longest_queue", "lost_updates")}
    return Server(name, **sums, **most)


def hot_rows(record: Record) -> list[HotRows]:
    """List each table's most pushed rows over the run, omitting tables without pushes."""
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for line in record.steps:
        for load in _read_loads(line):
            for name, table in load.get("tables", {}).items():
                counts[name].update(dict(table["hottest"]))
    return [HotRows(name, tuple(rows.most_common(_HOTTEST))) for name, rows in sorted(counts.items()) if rows]


def server_charts(record: Record) -> list[Chart]:
    """Draw traffic, requests and longest queue of each server over steps."""
    loads = _collect_loads(record)
    return [
        *draw_lines("Received by servers", _compute_rates(loads, "bytes_in", 1e-6), unit=" MB/s"),
        *draw_lines("Sent by servers", _compute_rates(loads, "bytes_out", 1e-6), unit=" MB/s"),
        *draw_lines("Requests to servers", _compute_rates(loads, "pushes", 1.0), unit=" pushes/s"),
        *draw_lines(
            "Longest queue at servers",
            _create_curves(loads, lambda load: parse_number(load["longest_queue"])),
            unit=" pushes",
        ),
    ]


def _compute_rates(loads: Loads, key: str, scale: float) -> list[StepCurve]:
    return _create_curves(loads, lambda load: scale * parse_number(load[key]) / (load["seconds"] or math.nan))


def _create_curves(loads: Loads, figure: Callable[[Line], float]) -> list[StepCurve]:
    return [
        StepCurve(f"server {index}", [step for step, _ in loads[index]], [figure(load) for _, load in loads[index]])
        for index in sorted(loads)
    ]
