"""The health of the nodes of a run, for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, final

import numpy as np

from worldsize.observe.events import NODE_ALERT
from worldsize.observe.health.files import alert_of, sample_files
from worldsize.observe.health.rows import GpuRow, HealthRow, is_health, told
from worldsize.observe.health.words import table_of
from worldsize.observe.report.read import Record
from worldsize.observe.report.svg import Chart, draw, series_colour, tip
from worldsize.record.json_lines import Rows
from worldsize.record.run_directory import RunDirectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NODES = 32  # number of nodes shown
_LINES = 300  # of each of their files


@final
@dataclass(frozen=True)
class NodesHealthTable:
    """A row of texts for each node, under ``columns``; ``left_out``: nodes that are not shown."""

    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    charts: Sequence[Chart]
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
    errors = _memory_errors(record)
    columns, texts = table_of({node: _worst(rows, errors.get(node, {})) for node, rows in rows_by_node.items()})
    return NodesHealthTable(columns, texts, _charts(rows_by_node), len(files) - len(rows_by_node))


def _memory_errors(record: Record) -> dict[int, dict[int, int]]:
    """Count the memory errors that there were alerts about, by node and GPU: not all lines of samples are read."""
    counts: dict[int, dict[int, int]] = {}
    for each in record.events:
        alert = alert_of(dict(each)) if each["event"] == NODE_ALERT else None
        if alert and alert.what == "ecc" and alert.gpu is not None and isinstance(alert.value, int):
            of_node = counts.setdefault(alert.node, {})
            of_node[alert.gpu] = of_node.get(alert.gpu, 0) + alert.value
    return counts


def _worst_gpu(samples: Sequence[GpuRow], errors: int) -> GpuRow:
    """Return one GPU's mean work, the most of its states, whatever slowed it down, and the sum of its errors."""
    worst: GpuRow = {
        "index": samples[0]["index"],
        "slowed_by": sorted({by for each in samples for by in each["slowed_by"]}),
    }
    if work := told(samples, "utilisation"):
        worst["utilisation"] = fmean(work)
    if memory := told(samples, "memory"):
        worst["memory"] = max(memory)
    if heat := told(samples, "temperature"):
        worst["temperature"] = max(heat)
    counted = [each["ecc_errors"] for each in samples if "ecc_errors" in each]
    if counted or errors:
        worst["ecc_errors"] = max(sum(counted), errors)
    return worst


def _worst(rows: Sequence[HealthRow], errors: Mapping[int, int]) -> HealthRow:
    """Return a line with the mean of what is a rate, and the worst of what is a state.

    ``errors``: the memory errors that there were alerts about, by GPU.
    """
    gpus: dict[int, list[GpuRow]] = {}
    for gpu in (gpu for row in rows for gpu in row["gpus"]):
        gpus.setdefault(gpu["index"], []).append(gpu)
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
        "gpus": [_worst_gpu(gpus[index], errors.get(index, 0)) for index in sorted(gpus)],
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
    work = told(row["gpus"], "utilisation")
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
