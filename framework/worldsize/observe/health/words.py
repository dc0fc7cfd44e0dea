"""Puts the state of a node into the cells of a table: the same on a terminal and in a report."""

from __future__ import annotations

from statistics import fmean

from worldsize.messages import size
from worldsize.observe.health.rows import HealthRow

COLUMNS = ("node", "CPU", "by others", "memory", "largest rank", "swap", "disk free", "network", "errors/min")
GPU_COLUMNS = ("GPU", "hottest", "slowed by", "memory errors")


def cells(row: HealthRow) -> list[str]:
    """Return the cells of a node under ``COLUMNS``, without the first."""
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


def gpu_cells(row: HealthRow) -> list[str]:
    """Return the cells of a node under ``GPU_COLUMNS``: its GPUs together; empty texts if it has none."""
    gpus = row["gpus"]
    work = [gpu["utilisation"] for gpu in gpus if "utilisation" in gpu]
    heat = [gpu["temperature"] for gpu in gpus if "temperature" in gpu]
    slowed = [f"GPU {gpu['index']}: {', '.join(gpu['slowed_by'])}" for gpu in gpus if gpu["slowed_by"]]
    errors = sum(gpu.get("ecc_errors", 0) for gpu in gpus)
    return [
        f"{fmean(work):.0%}" if work else "",
        f"{max(heat):.0f} °C" if heat else "",
        "; ".join(slowed),
        f"{errors:,}" if errors else "",
    ]
