"""The last state of all nodes, in few figures whatever their number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import final

from worldsize.observe.health.files import last_samples, sample_files
from worldsize.observe.health.rows import GpuRow, HealthRow, told
from worldsize.record.run_directory import RunDirectory

_INTERVAL = 20.0  # seconds between two looks at the files, for few nodes
_PER_NODE = 0.05  # seconds that each node adds to that
_FRESH = 10 * 60.0  # seconds for which a sample tells of now
_SINGLY = 16  # up to so many nodes have figures of their own


@final
class NodesHealth:
    """Reads the last sample of each node, at intervals.

    Args:
        folder: The run folder.
        interval: Least seconds between two looks; a run of many nodes is looked at more rarely.
        clock: Unix time.
    """

    def __init__(self, folder: Path, *, interval: float = _INTERVAL, clock: Callable[[], float] = time.time) -> None:
        self._run, self._interval, self._clock = RunDirectory(folder), interval, clock
        self._next = -math.inf
        self.last: Mapping[int, HealthRow] = {}

    def look(self) -> Mapping[int, HealthRow]:
        """Return the last sample of each node, without those that are old."""
        self.new()
        return self.last

    def new(self) -> Mapping[int, HealthRow]:
        """Return the same if it was read by this call; otherwise it is not yet time, and the result is empty."""
        now = self._clock()
        if now < self._next:
            return {}
        samples = {node: last_samples(path, since=now - _FRESH, at_most=1) for node, path in self._files()}
        self.last = {node: rows[0] for node, rows in samples.items() if rows}
        self._next = now + self._interval + _PER_NODE * len(samples)
        return self.last

    def _files(self) -> Iterable[tuple[int, Path]]:
        return sample_files(self._run).items()


def health_figures(rows: Mapping[int, HealthRow]) -> dict[str, float]:
    """Return figures for a logger by name: over all nodes, and of each if they are few."""
    if not rows:
        return {}
    every = list(rows.values())
    figures = {
        "cpu": fmean(row["cpu"] for row in every),
        "cpu_of_others": max(row["cpu_of_others"] for row in every),
        "memory": max(row["memory"] for row in every),
        "swap": max(row["swap"] for row in every),
        "disk": max(row["disk"] for row in every),
        "received": sum(row["received"] for row in every),
        "sent": sum(row["sent"] for row in every),
        "network_errors": sum(row["network_errors"] for row in every),
        "largest_process": float(max((size for row in every for size in row["resident"].values()), default=0)),
        **_of_gpus([gpu for row in every for gpu in row["gpus"]]),
    }
    named = {f"health/{name}": value for name, value in figures.items()}
    if len(rows) <= _SINGLY:
        for node, row in rows.items():
            own = {"cpu": row["cpu"], "memory": row["memory"], "swap": row["swap"], **_of_gpus(row["gpus"])}
            named |= {f"health/node_{node}/{name}": value for name, value in own.items()}
    return named


def _of_gpus(gpus: list[GpuRow]) -> dict[str, float]:
    """Return the figures of some GPUs: the mean of their work, and the worst of all else."""
    if not gpus:
        return {}
    work, heat, memory = (told(gpus, figure) for figure in ("utilisation", "temperature", "memory"))
    return {
        **({"gpu_utilisation": fmean(work), "gpu_utilisation_least": min(work)} if work else {}),
        **({"gpu_temperature": max(heat)} if heat else {}),
        **({"gpu_memory": max(memory)} if memory else {}),
        "gpus_slowed": float(sum(bool(gpu["slowed_by"]) for gpu in gpus)),
        "gpu_memory_errors": float(sum(gpu.get("ecc_errors", 0) for gpu in gpus)),
    }


def badness(row: HealthRow) -> float:
    """Return how much the state of a node deserves a look, so that the worst of many are shown."""
    slowed = sum(bool(gpu["slowed_by"]) + gpu.get("ecc_errors", 0) for gpu in row["gpus"])
    heat = max((gpu.get("temperature", 0.0) / 100 for gpu in row["gpus"]), default=0.0)
    swaps, errors = float(row["swap"] > 0), float(row["network_errors"] > 0)
    return 10 * slowed + 5 * swaps + 3 * errors + row["memory"] + row["disk"] + row["cpu_of_others"] + heat
