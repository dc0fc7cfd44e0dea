"""The health of the nodes of a run, for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, final

import numpy as np

from worldsize.observe.events import NODE_ALERT
from worldsize.observe.health.files import sample_files
from worldsize.observe.health.rows import HealthRow, is_health
from worldsize.observe.health.words import COLUMNS, GPU_COLUMNS, cells, gpu_cells
from worldsize.observe.report.read import Record
from worldsize.observe.report.svg import Chart, draw, series_colour, tip
from worldsize.records.json_lines import Rows
from worldsize.records.run_directory import RunDirectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NODES = 32  # number of nodes shown
_LINES = 300  # of each of their files


@final
@dataclass(frozen=True)
class NodesHealthTable:
    """A row of texts for each node, under ``columns``; ``left_out``: nodes that are not shown."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    charts: tuple[Chart, ...]
    left_out: int


def nodes_health(record: Record) -> NodesHealthTable | None:
    """Summarize the samples of the nodes, those with alerts first; None: there are none."""
    files = sample_files(RunDirectory(record.folder))
    alerted = {each["node"] for each in record.events if each["event"] == NODE_ALERT}
    chosen = sorted(sorted(files, key=lambda node: node not in alerted)[:_NODES])
    read = {node: list(Rows(files[node], is_valid=is_health, at_most=_LINES)) for node in chosen}
    rows_by_node: dict[int, Sequence[HealthRow]] = {node: rows for node, rows in read.items() if rows}  # type: ignore[misc]
    if not rows_by_node:
        return None
    has_gpus = any(row["gpus"] for rows in rows_by_node.values() for row in rows)
    texts = []
    for node, rows in rows_by_node.items():
        worst = _worst(rows)
        texts.append((f"{node} {worst['host']}", *cells(worst), *(gpu_cells(worst) if has_gpus else ())))
    columns = (*COLUMNS, *(GPU_COLUMNS if has_gpus else ()))
    return NodesHealthTable(columns, tuple(texts), tuple(_charts(rows_by_node)), len(files) - len(rows_by_node))


def _worst(rows: Sequence[HealthRow]) -> HealthRow:
    """Return a line with the mean of what is a rate, and the worst of what is a state."""
    seen = [gpu for row in rows for gpu in row["gpus"]]
    gpus = {gpu["index"]: gpu for gpu in sorted(seen, key=lambda gpu: bool(gpu["slowed_by"]))}
    sizes: dict[str, int] = {}
    for row in rows:
        for rank, size in row["resident"].items():
            sizes[rank] = max(size, sizes.get(rank, 0))
    return {
        **rows[-1],
        "cpu": fmean(row["cpu"] for row in rows),
        "cpu_of_others": fmean(row["cpu_of_others"] for row in rows),
        "memory": max(row["memory"] for row in rows),
        "swap": max(row["swap"] for row in rows),
        "disk_free": min(row["disk_free"] for row in rows),
        "received": fmean(row["received"] for row in rows),
        "sent": fmean(row["sent"] for row in rows),
        "network_errors": max(row["network_errors"] for row in rows),
        "resident": sizes,
        "gpus": [gpus[index] for index in sorted(gpus)],
    }


def _charts(rows_by_node: Mapping[int, Sequence[HealthRow]]) -> list[Chart]:
    """Draw processors, memory and GPUs over time, a line for each node."""
    start = min(rows[0]["time"] for rows in rows_by_node.values())
    pictures = []
    for title, values in (
        ("CPU", {node: [row["cpu"] for row in rows] for node, rows in rows_by_node.items()}),
        ("Memory", {node: [row["memory"] for row in rows] for node, rows in rows_by_node.items()}),
        ("GPUs", {node: [_gpu_work(row) for row in rows] for node, rows in rows_by_node.items()}),
    ):
        times = {node: [(row["time"] - start) / 60 for row in rows] for node, rows in rows_by_node.items()}
        if np.isfinite([each for column in values.values() for each in column]).sum() > len(values):
            pictures.append(_over_time(f"{title} by node", times, values))
    return pictures


def _gpu_work(row: HealthRow) -> float:
    work = [gpu["utilisation"] for gpu in row["gpus"] if "utilisation" in gpu]
    return fmean(work) if work else float("nan")


def _over_time(title: str, times: Mapping[int, Sequence[float]], values: Mapping[int, Sequence[float]]) -> Chart:
    def paint(axes: Axes) -> None:
        for place, (node, column) in enumerate(values.items()):
            (line,) = axes.plot(times[node], 100 * np.array(column), color=series_colour(place), linewidth=1)
            tip(line, f"node {node}")
        axes.set_ylim(0, 105)
        axes.set_xlabel("minutes")
        axes.set_ylabel("%")

    return Chart(title, draw(title, paint), "A line for each node.")
