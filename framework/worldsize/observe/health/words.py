"""Puts the state of a node into the cells of a table: the same on a terminal and in a report."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from worldsize.messages import size
from worldsize.observe.health.rows import HealthRow, told

_COLUMNS = ("node", "CPU", "by others", "memory", "largest rank", "swap", "disk free", "network", "errors/min")
_GPU_COLUMNS = ("GPU", "hottest", "slowed by", "memory errors")


def table_of(rows_by_node: Mapping[int, HealthRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns of a table of nodes, and the cells of each; GPUs have columns if any node has some."""
    has_gpus = any(row["gpus"] for row in rows_by_node.values())
    columns = (*_COLUMNS, *(_GPU_COLUMNS if has_gpus else ()))
    table = [
        (f"{node} {row['host']}", *_cells(row), *(_gpu_cells(row) if has_gpus else ()))
        for node, row in rows_by_node.items()
    ]
    return columns, table


def _cells(row: HealthRow) -> list[str]:
    """Return the cells of a node under ``_COLUMNS``, without the first."""
    largest = max(row["resident"].items(), key=lambda each: each[1], default=None)
    return [
        f"{row['cpu']:.0%}",
        f"{row['cpu_of_others']:.0%}",
        f"{row['memory']:.0%}",
        f"rank {largest[0]}: {size(largest[1])}" if largest else "",
        f"{size(row['swap'])}/s" if row["swap"] else "",
        size(row["disk_free"]),
        f"{size(row['received'] + row['sent'])}/s",
        f"{row['network_errors']:,.0f}" if row["network_errors"] else "",
    ]


def _gpu_cells(row: HealthRow) -> list[str]:
    """Return the cells of a node under ``_GPU_COLUMNS``: its GPUs together; empty texts if it has none."""
    gpus = row["gpus"]
    work, heat = told(gpus, "utilisation"), told(gpus, "temperature")
    slowed = [f"GPU {gpu['index']}: {', '.join(gpu['slowed_by'])}" for gpu in gpus if gpu["slowed_by"]]
    errors = sum(gpu.get("ecc_errors", 0) for gpu in gpus)
    return [
        f"{fmean(work):.0%}" if work else "",
        f"{max(heat):.0f} °C" if heat else "",
        "; ".join(slowed),
        f"{errors:,}" if errors else "",
    ]
