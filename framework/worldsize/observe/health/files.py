"""Health files of nodes, and a summary over all nodes."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, final

from worldsize.core import NodeAlert
from worldsize.files import open_regular
from worldsize.observe.events import NODE_ALERT
from worldsize.observe.health.rows import GpuRow, HealthRow, collect_values, is_health, why_slow
from worldsize.observe.progress import Tail
from worldsize.record.json_lines import Row, complete_lines, parse_row
from worldsize.record.run_directory import RunDirectory, create_parent_folders
from worldsize.strict_json import sanitize_json

_LINES = 5000  # maximum lines of a sample file; then every other line is dropped
_END = 1 << 16  # bytes at the end of a file that contain its last lines
_RECENT = 120.0  # maximum age in seconds of a sample that explains a slow process
_SEARCHED = 64  # maximum number of nodes whose files are searched for a host
_ALERTS = "_alerts.jsonl"


@final
class HealthFile:
    """Sample file of a node. At 5,000 lines, every other sample is dropped.

    Raises:
        FileNotFoundError: the run folder was deleted.
    """

    def __init__(self, run: RunDirectory, node: int) -> None:
        self._path = run.get_health_file(node)
        self._run, self._alerts = run, _alerts_file(run, node)
        create_parent_folders(self._path, run)
        self._lines = sum(1 for _ in complete_lines(self._path))

    def add_row(self, row: HealthRow, alerts: Sequence[NodeAlert]) -> None:
        """Append a sample, and append its alerts to a separate file."""
        if self._lines >= _LINES:
            self._thin_samples()
        with self._path.open("a") as file:
            file.write(json.dumps(sanitize_json(row)) + "\n")
        self._lines += 1
        if alerts:
            create_parent_folders(self._alerts, self._run)
            with self._alerts.open("a") as file:
                file.writelines(json.dumps(sanitize_json(asdict(each))) + "\n" for each in alerts)

    def _thin_samples(self) -> None:
        kept = [line for line, _ in complete_lines(self._path)][1::2]
        draft = self._path.with_name(f".{self._path.name}")
        draft.write_bytes(b"".join(kept))
        draft.replace(self._path)
        self._lines = len(kept)


def _alerts_folder(run: RunDirectory) -> Path:
    """Return the folder of alerts, which is separate so that it can be listed quickly."""
    return run.path / "health" / "alerts"


def _alerts_file(run: RunDirectory, node: int) -> Path:
    samples = run.get_health_file(node)
    return _alerts_folder(run) / samples.parent.relative_to(run.path / "health") / (samples.stem + _ALERTS)


@final
class AlertFiles:
    """Reads alerts of all nodes that are raised after this object was created."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = _alerts_folder(run)
        self._tails = {path: Tail(path) for path in self._list_paths()}

    def read_new_alerts(self) -> Iterator[NodeAlert]:
        """Yield alerts since the last call. Nodes without alerts do not have a file."""
        for path in self._list_paths():
            tail = self._tails.setdefault(path, Tail(path, from_start=True))
            yield from (alert for line in tail.read() if (alert := parse_alert(parse_row(line))))

    def _list_paths(self) -> list[Path]:
        with suppress(OSError):
            return sorted(self._folder.rglob(f"*{_ALERTS}"))
        return []


@final
class AlertNews:
    """Reads alerts appended to ``events.jsonl`` after this object was created."""

    def __init__(self, events: Path) -> None:
        self._tail = Tail(events)

    def read_alerts(self) -> list[NodeAlert]:
        """Return the alerts since the last call."""
        named = (parse_row(line) for line in self._tail.read() if NODE_ALERT.encode() in line)
        return [alert for row in named if row and row.get("event") == NODE_ALERT and (alert := parse_alert(row))]


def parse_alert(row: Row | None) -> NodeAlert | None:
    """Return the alert described by a row, or None if the row is not an alert."""
    kinds: Mapping[str, tuple[type, ...]] = {
        "node": (int,),
        "host": (str,),
        "what": (str,),
        "value": (int, float),
        "limit": (int, float),
        "rank": (int, type(None)),
        "gpu": (int, type(None)),
        "detail": (str,),
    }
    facts: dict[str, Any] = {each.name: row.get(each.name) for each in fields(NodeAlert)} if row else {}
    return NodeAlert(**facts) if row and all(type(facts[name]) in kind for name, kind in kinds.items()) else None


def last_samples(path: Path, *, since: float = 0.0, at_most: int = 3) -> list[HealthRow]:
    """Read the last samples of a node's file since Unix time ``since``; may be empty."""
    with suppress(OSError), open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        rows = [row for line in file.read().splitlines()[-at_most:] if (row := parse_row(line)) and is_health(row)]
        return [row for row in rows if row["time"] >= since]
    return []


def sample_files(run: RunDirectory) -> dict[int, Path]:
    """Return the sample files in a run folder by node, in order."""
    files = {}
    with suppress(OSError):
        for path in (run.path / "health").rglob("node_*.jsonl"):
            if named := re.fullmatch(r"node_(\d{5,7})\.jsonl", path.name, re.ASCII):
                files[int(named[1])] = path
    return dict(sorted(files.items()))


def why_host_is_slow(run: RunDirectory, host: str, rank: int, *, per_node: int) -> str:
    """Describe current problems of a host from its last samples; empty if none are known.

    Args:
        run: The run folder.
        host: Name of the host.
        rank: Global rank of a process on the host.
        per_node: Number of processes per node.
    """
    first, since = rank // per_node, time.time() - _RECENT
    # in a gang that heals, the ranks of a node need not be consecutive
    others = [node for node in islice(sample_files(run), _SEARCHED) if node != first]
    for node in (first, *others):
        rows = last_samples(run.get_health_file(node), since=since)
        if rows and rows[-1]["host"] == host:
            return why_slow(rows)
    return ""


_INTERVAL = 20.0  # seconds between reads of the files, with few nodes
_PER_NODE = 0.05  # additional seconds per node
_FRESH = 10 * 60.0  # maximum age in seconds of a current sample
_SINGLY = 16  # maximum number of nodes that are logged individually


@final
class NodesHealth:
    """Reads the last sample of each node, at intervals.

    Args:
        folder: The run folder.
        interval: Minimum seconds between reads; longer with many nodes.
        clock: Returns Unix time.
    """

    def __init__(self, folder: Path, *, interval: float = _INTERVAL, clock: Callable[[], float] = time.time) -> None:
        self._run, self._interval, self._clock = RunDirectory(folder), interval, clock
        self._next = -math.inf
        self.last: Mapping[int, HealthRow] = {}

    def get_current_samples(self) -> Mapping[int, HealthRow]:
        """Return the last sample of each node, without outdated ones."""
        self.read_new_samples()
        return self.last

    def read_new_samples(self) -> Mapping[int, HealthRow]:
        """Read the nodes' last samples if the interval has elapsed; otherwise return {}."""
        now = self._clock()
        if now < self._next:
            return {}
        samples = {node: last_samples(path, since=now - _FRESH, at_most=1) for node, path in self._list_files()}
        self.last = {node: rows[0] for node, rows in samples.items() if rows}
        self._next = now + self._interval + _PER_NODE * len(samples)
        return self.last

    def _list_files(self) -> Iterable[tuple[int, Path]]:
        return sample_files(self._run).items()


def health_figures(rows: Mapping[int, HealthRow]) -> dict[str, float]:
    """Return metrics for a logger by name: over all nodes, and per node if there are few."""
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
        **_summarize_gpus([gpu for row in every for gpu in row["gpus"]]),
    }
    named = {f"health/{name}": value for name, value in figures.items()}
    if len(rows) <= _SINGLY:
        for node, row in rows.items():
            own = {"cpu": row["cpu"], "memory": row["memory"], "swap": row["swap"], **_summarize_gpus(row["gpus"])}
            named |= {f"health/node_{node}/{name}": value for name, value in own.items()}
    return named


def _summarize_gpus(gpus: list[GpuRow]) -> dict[str, float]:
    """Return metrics over several GPUs: mean and lowest utilization, maxima, and totals."""
    if not gpus:
        return {}
    work, heat, memory = (collect_values(gpus, figure) for figure in ("utilisation", "temperature", "memory"))
    return {
        **({"gpu_utilisation": fmean(work), "gpu_utilisation_least": min(work)} if work else {}),
        **({"gpu_temperature": max(heat)} if heat else {}),
        **({"gpu_memory": max(memory)} if memory else {}),
        "gpus_slowed": float(sum(bool(gpu["slowed_by"]) for gpu in gpus)),
        "gpu_memory_errors": float(sum(gpu.get("ecc_errors", 0) for gpu in gpus)),
    }


def score_problems(row: HealthRow) -> float:
    """Return a score of a node's problems, used to show the worst of many nodes."""
    slowed = sum(bool(gpu["slowed_by"]) + gpu.get("ecc_errors", 0) for gpu in row["gpus"])
    heat = max((gpu.get("temperature", 0.0) / 100 for gpu in row["gpus"]), default=0.0)
    swaps, errors = float(row["swap"] > 0), float(row["network_errors"] > 0)
    return 10 * slowed + 5 * swaps + 3 * errors + row["memory"] + row["disk"] + row["cpu_of_others"] + heat
