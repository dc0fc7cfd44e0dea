"""Load of parameter servers, if the strategy reports it with each logged step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from worldsize.observe.report.curves import Curve, lines
from worldsize.observe.report.read import Line, Record, number
from worldsize.observe.report.svg import Chart

_HOTTEST = 10
_FIGURES = ("pushes", "pulls", "bytes_in", "bytes_out", "longest_queue", "lost_updates", "seconds")


@final
@dataclass(frozen=True)
class Server:
    """Totals of a server over the run; about so, if steps of a long run were left out."""

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


def servers(record: Record) -> list[Server]:
    """Return the totals of each parameter server, by index; empty if the strategy has none."""
    loads = _loads(record)
    return [_total(f"server {index}", [line for _, line in loads[index]], record.stands_for) for index in sorted(loads)]


Loads = Mapping[int, Sequence[tuple[int, Line]]]  # the step and the load in each line, by server


def _loads(record: Record) -> Loads:
    """Collect the steps of each server, and its work since the line before."""
    loads: defaultdict[int, list[tuple[int, Line]]] = defaultdict(list)
    for line in record.steps:
        for index, load in enumerate(_servers_of(line)):
            loads[index].append((line["step"], load))
    return loads


def _servers_of(line: Line) -> Sequence[Line]:
    """Return the facts about each server in a line; nothing if their format is unknown."""
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


def _total(name: str, loads: Sequence[Line], stands_for: int) -> Server:
    sums = {
        key: stands_for * sum(int(load[key]) for load in loads) for key in ("pushes", "pulls", "bytes_in", "bytes_out")
    }
    most = {key: max(int(load[key]) for load in loads) for key in ("longest_queue", "lost_updates")}
    return Server(name, **sums, **most)


def hot_rows(record: Record) -> list[HotRows]:
    """List each table's most pushed rows over the run, without tables that have none."""
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for line in record.steps:
        for load in _servers_of(line):
            for name, table in load.get("tables", {}).items():
                counts[name].update(dict(table["hottest"]))
    return [HotRows(name, tuple(rows.most_common(_HOTTEST))) for name, rows in sorted(counts.items()) if rows]


def server_charts(record: Record) -> list[Chart]:
    """Draw traffic, requests and the longest queue of each server over steps."""
    loads = _loads(record)
    return [
        *lines("Received by servers", _rates(loads, "bytes_in", 1e-6), unit=" MB/s"),
        *lines("Sent by servers", _rates(loads, "bytes_out", 1e-6), unit=" MB/s"),
        *lines("Requests to servers", _rates(loads, "pushes", 1.0), unit=" pushes/s"),
        *lines("Longest queue at servers", _curves(loads, lambda load: number(load["longest_queue"])), unit=" pushes"),
    ]


def _rates(loads: Loads, key: str, scale: float) -> list[Curve]:
    return _curves(loads, lambda load: scale * number(load[key]) / (load["seconds"] or math.nan))


def _curves(loads: Loads, figure: Callable[[Line], float]) -> list[Curve]:
    return [
        Curve(f"server {index}", [step for step, _ in loads[index]], [figure(load) for _, load in loads[index]])
        for index in sorted(loads)
    ]
